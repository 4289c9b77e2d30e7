"""Python objects between processes: pickled, small ones through the key-value store.

Unpickling runs code that the sender chose, as everywhere where objects travel: the ranks of a job
trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshpar.collectives.between import messages, movement
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.engine import in_turn
from meshpar.collectives.between.rendezvous import wait_for
from meshpar.collectives.between.terms import Terms
from meshpar.collectives.between.world import World, here
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

_SMALL = 200_000  # bytes; the store takes five times as long as arrays for 50 MB


def all_gather_object(obj: Any, group: Group, terms: Terms) -> list[Any]:
    """The objects of all ranks, in the group's order."""
    data = pickle.dumps(obj)
    if group.nranks == 1:
        return [pickle.loads(data)]

    def exchange(world: World, channel: Channel, moment: Moment) -> dict[str, bytes]:
        assert world.store is not None, "there are others"
        key = f"objects/{channel.key}/{moment.number}"
        world.store.put(f"{key}/{world.rank}", _letter(data))
        letters = wait_for(world, channel, moment, key, group.nranks)
        world.store.read_by(key, group.nranks)
        return letters

    letters = in_turn("all_gather_object()", exchange, group.ranks, terms)
    most = max(_announced(letter) for letter in letters.values())
    arrays = movement.all_gather(_padded(data, most), group, terms) if most else ()
    return [
        _opened(letters[str(rank)], arrays[i] if most else None)
        for i, rank in enumerate(group.ranks)
    ]


def gather_object(obj: Any, dst: int, group: Group, terms: Terms) -> list[Any]:
    """The objects of all ranks on `dst`; an empty list elsewhere."""
    found = all_gather_object(obj, group, terms)
    return found if here().rank == dst else []


def broadcast_object_list(
    objects: Sequence[Any], src: int, group: Group, terms: Terms
) -> list[Any]:
    """The objects of `src`, which has as many as the other ranks.

    Raises:
      CollectiveError: this rank has another number of them.
    """
    return _from_one(f"broadcast_object_list(src={src})", objects, src, group, terms)


def scatter_object_list(objects: Sequence[Any] | None, src: int, group: Group, terms: Terms) -> Any:
    """This rank's item of the list of `src`."""
    rank = here().rank
    data = [pickle.dumps(item) for item in objects or ()] if rank == src else []
    if group.nranks == 1:
        return pickle.loads(data[0])
    mine = group.ranks.index(rank)
    most = max((_announced(_letter(item)) for item in data), default=0)

    def exchange(world: World, channel: Channel, moment: Moment) -> tuple[bytes, int]:
        assert world.store is not None, "there are others"
        key = f"objects/{channel.key}/{moment.number}"
        for position, item in enumerate(data):
            if position != mine:
                letter = _letter(item)
                world.store.put(f"{key}/{position}/letter", letter)
                world.store.put(f"{key}/{position}/most", str(most).encode())
        if world.rank == src:
            return _letter(data[mine]), most
        found = wait_for(world, channel, moment, f"{key}/{mine}", 2)
        world.store.read_by(key, group.nranks - 1)
        return found["letter"], int(found["most"])

    letter, most = in_turn(f"scatter_object_list(src={src})", exchange, group.ranks, terms)
    if not most:
        return _opened(letter, None)
    arrays = [_padded(item, most) for item in data] or None
    array = movement.scatter(arrays, src, group, terms, like=_padded(b"", most))
    return _opened(letter, array)


def send_object_list(objects: Sequence[Any], dst: int, group: Group, terms: Terms) -> None:
    """Gives objects to `dst`."""
    pair = Group((here().rank, dst))
    _from_one("objects()", objects, here().rank, pair, terms, pair=True)


def recv_object_list(count: int, src: int, group: Group, terms: Terms) -> list[Any]:
    """The objects that `src` sends, as many as are expected.

    Raises:
      CollectiveError: it sends another number of them.
    """
    pair = Group((src, here().rank))
    return _from_one("objects()", [None] * count, src, pair, terms, pair=True)


def _from_one(
    name: str,
    objects: Sequence[Any],
    src: int,
    group: Group,
    terms: Terms,
    *,
    pair: bool = False,
) -> list[Any]:
    is_source = here().rank == src
    data = pickle.dumps(list(objects)) if is_source else b""
    if group.nranks == 1:
        return pickle.loads(data)

    def exchange(world: World, channel: Channel, moment: Moment) -> bytes:
        assert world.store is not None, "there are others"
        key = f"objects/{channel.key}/{moment.number}"
        if is_source:
            world.store.put(f"{key}/letter", _letter(data))
            return _letter(data)
        letter = wait_for(world, channel, moment, key, 1)["letter"]
        world.store.read_by(key, group.nranks - 1)
        return letter

    letter = in_turn(name, exchange, group.ranks, terms, pair=pair)
    most = _announced(letter)
    array = None
    if most and pair and is_source:
        messages.send(_padded(data, most), group.ranks[1], group, terms)
    elif most and pair:
        array = messages.recv(_padded(b"", most), src, group, terms)
    elif most:
        array = movement.broadcast(_padded(data, most), src, group, terms)
    if is_source:
        return list(objects)
    found = _opened(letter, array)
    if len(found) != len(objects):
        raise CollectiveError(
            f"rank {src} gives {len(found)} object(s), and this list has {len(objects)}.",
            because="the lists of all ranks have the same length",
        )
    return found


# A letter is the pickle itself, or the length of one that travels as an array.


def _letter(data: bytes) -> bytes:
    return b"s" + data if len(data) <= _SMALL else b"l" + str(len(data)).encode()


def _announced(letter: bytes) -> int:
    """The length of the pickle that follows as an array; 0 where none does."""
    return int(letter[1:]) if letter[:1] == b"l" else 0


def _opened(letter: bytes, array: jax.Array | None) -> Any:
    if letter[:1] == b"s":
        return pickle.loads(letter[1:])
    return pickle.loads(np.asarray(array)[: _announced(letter)].tobytes())


def _padded(data: bytes, size: int) -> Any:
    """Bytes as an array, of one of few lengths, so that few programs are compiled."""
    step = 1 << max(size.bit_length() - 3, 0)
    array = np.zeros(-(-size // step) * step, np.uint8)
    kept = min(len(data), size)
    array[:kept] = np.frombuffer(data[:kept], np.uint8)
    return array
