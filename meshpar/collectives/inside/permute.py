"""Point-to-point inside a region: sends and receives that belong together become one `ppermute`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.arrays import moving
from meshpar.collectives.groups import check_member, world
from meshpar.collectives.inside.members import Members, members_of, varying
from meshpar.collectives.p2p_op import P2POp, Peer
from meshpar.collectives.region import current_region
from meshpar.errors import CollectiveError
from meshpar.mesh import Group
from meshpar.placements.values import describe

__all__ = ["batch_isend_irecv", "recv", "send"]

Edges = tuple[tuple[int, int], ...]
"""Pairs (position of the sender, position of the receiver) in a group, sorted."""


def send(x: jax.Array, dst: int, group: Group, timeout: float | None = None) -> NoReturn:
    """Raises: all ranks run one program, in which a send alone has no receiver."""
    raise _alone("send", "isend", "irecv")


def recv(like: jax.Array, src: int, group: Group, timeout: float | None = None) -> NoReturn:
    """Raises: all ranks run one program, in which a receive alone has no sender."""
    raise _alone("receive", "irecv", "isend")


def _alone(what: str, own: str, other: str) -> CollectiveError:
    return CollectiveError(
        f"a {what} alone does not exist inside a region.",
        because="all ranks run one program, so that each send needs the receive at its other end",
        instead=f"mp.batch_isend_irecv([mp.P2POp(mp.{own}, x, peer), mp.P2POp(mp.{other}, y, "
        "peer)]), peer a function or table rank -> peer",
    )


def batch_isend_irecv(operations: Sequence[P2POp], timeout: float | None = None) -> list[Any]:
    """What each receive gets, its own array where nothing comes; for each send what it sent."""
    if timeout is not None:
        raise CollectiveError(f"timeout={timeout!r} has no meaning inside a region.")
    named = [op.group or world(current_region()) for op in operations]
    groups = [members_of(group) for group in named]
    edges = [_edges(*each) for each in zip(operations, named, groups, strict=True)]
    results: list[Any] = [op.tensor for op in operations]
    sends = [i for i, op in enumerate(operations) if op.kind == "isend"]
    for i, op in enumerate(operations):
        if op.kind == "isend":
            continue
        partner = next((s for s in sends if (groups[s], edges[s]) == (groups[i], edges[i])), None)
        if partner is None:
            raise _unmatched(i, op, edges, operations)
        sends.remove(partner)
        results[i] = _moved(operations[partner].tensor, op.tensor, edges[i], groups[i])
    if sends:
        raise _unmatched(sends[0], operations[sends[0]], edges, operations)
    return results


def _moved(sent: Any, like: Any, edges: Edges, members: Members) -> Any:
    receives = np.zeros(max(members.count, 1), np.bool_)
    receives[[receiver for _, receiver in edges]] = True
    pairs = [(members.picks[s], members.picks[r]) for s, r in edges]

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise CollectiveError(f"{describe(x)} is sent where {describe(y)} is received.")
        if not members.axes:
            return x if edges else y
        came = lax.ppermute(varying(x, members.axes), members.axes, pairs)
        if members.everyone and receives.all():
            return came
        position = members.position()
        return jnp.where((position >= 0) & jnp.asarray(receives)[position], came, y)

    return jax.tree.map(lambda x, y: moving(one, x, y), sent, like)


def _edges(op: P2POp, group: Group, members: Members) -> Edges:
    """The pairs of an operation, by evaluating its peer on each rank of the group."""
    edges: list[tuple[int, int]] = []
    for rank in group.ranks:
        peer = _peer_of(op.peer, rank, op)
        if peer is None:
            continue
        check_member(f"{op.kind}: the peer of rank {rank}", peer, group, members.region)
        here, there = members.index_of(rank), members.index_of(peer)
        edges.append((here, there) if op.kind == "isend" else (there, here))
    for end, word in enumerate(("sends", "receives")):
        ends = [pair[end] for pair in edges]
        twice = next((e for e in ends if ends.count(e) > 1), None)
        if twice is not None:
            raise CollectiveError(
                f"{op.kind}: rank {group.ranks[twice]} {word} more than once in one operation.",
                because=f"the pairs (from, to) are {_shown(edges, group.ranks)}",
                instead="one mp.P2POp for each",
            )
    return tuple(sorted(edges))


def _peer_of(peer: Peer, rank: int, op: P2POp) -> int | None:
    if isinstance(peer, Mapping):
        return peer.get(rank)
    if callable(peer):
        return peer(rank)
    if isinstance(peer, Sequence) and 0 <= rank < len(peer):
        return peer[rank]
    raise CollectiveError(
        f"{op.kind}: peer={peer!r} does not say who the peer of rank {rank} is.",
        because="inside a region all ranks run one program, which names the peer of every rank",
        instead="a function or table rank -> peer: lambda rank: (rank + 1) % mp.get_world_size()",
    )


def _unmatched(
    i: int, op: P2POp, edges: Sequence[Edges], operations: Sequence[P2POp]
) -> CollectiveError:
    other = "irecv" if op.kind == "isend" else "isend"
    found = [_shown(e, None) for e, o in zip(edges, operations, strict=True) if o.kind == other]
    return CollectiveError(
        f"operation {i}, {op.kind}, has no {other} at its other end.",
        pairs=f"{_shown(edges[i], None)}, as positions (from, to) in its group",
        because=f"each send needs a receive with the same pairs; the {other}s have "
        f"{'; '.join(found) or 'none'}",
    )


def _shown(edges: Sequence[tuple[int, int]], ranks: Sequence[int] | None) -> str:
    named = [(s, r) if ranks is None else (ranks[s], ranks[r]) for s, r in edges]
    return ", ".join(f"({s}, {r})" for s, r in named) or "no pairs"
