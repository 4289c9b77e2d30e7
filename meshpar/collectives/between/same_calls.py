"""Whether ranks that go on are still making the same calls.

A call that is new is agreed on, one that is known costs nothing. So where all ranks know two calls
and mix them up, nothing stops them; with equal shapes a sum may meet a maximum, and the numbers are
wrong. Therefore a rank keeps a digest of the calls of each channel, and its watchdog compares it
with those of its neighbours in the channel, off the critical path.
"""

from __future__ import annotations

import json
import time

import jax

from meshpar.collectives.between.channel import Channel, Past
from meshpar.collectives.between.world import World

__all__ = ["first_other_call"]

_SHOWN = 1 << 10  # calls that a rank shows once they differ
_LOOK_EVERY = 0.02
_OTHER = "one without arrays"
_SINCE = "their results may be wrong"


def first_other_call(world: World, channel: Channel) -> str | None:
    """What this rank and a neighbour have made of one call, where they have made different ones."""
    ranks, store = channel.ranks, world.store
    if store is None or len(ranks) == 1 or not channel.past:
        return None
    at = ranks.index(world.rank)
    try:
        for rank in {ranks[at - 1], ranks[(at + 1) % len(ranks)]}:
            told = json.loads(store.get(f"progress/{rank}") or b"{}").get(channel.key)
            if told and told[-1] and _differ(list(channel.past), *told[-1]):
                return _difference(world, channel, rank)
    except jax.errors.JaxRuntimeError:
        return None  # rank 0, which holds the store, is gone; `peers` says so
    return None


def _differ(past: list[Past], number: int, digest: int) -> bool:
    return any(mine.number == number and mine.digest != digest for mine in reversed(past))


def _difference(world: World, channel: Channel, rank: int) -> str:
    """Shows the neighbour this rank's calls, and compares them with those that it shows."""
    store, key = world.store, f"differ/{channel.key}"
    assert store is not None, "there is a neighbour"
    mine = {call.number: call.text for call in list(channel.past)[-_SHOWN:]}
    store.put(f"{key}/{world.rank}", json.dumps(mine).encode())
    shown, until = None, time.monotonic() + world.patience.grace
    while shown is None and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
        shown = store.get(f"{key}/{rank}")
    others = {int(number): text for number, text in json.loads(shown or b"{}").items()}
    told = f"the ranks have not made the same calls of {channel}: "
    if others:
        for number in range(max(min(mine), min(others)), min(max(mine), max(others)) + 1):
            here, there = mine.get(number, _OTHER), others.get(number, _OTHER)
            if here != there:
                return f"{told}call {number} was {here} here, and {there} on rank {rank}; {_SINCE}"
    last = channel.past[-1]
    return f"{told}those of rank {rank} are others, up to call {last.number}, {last.text}; {_SINCE}"
