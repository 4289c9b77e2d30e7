"""Who keeps the others waiting, as far as the ranks have told."""

from __future__ import annotations

import json
from dataclasses import dataclass

import jax

from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.world import World

__all__ = ["Waiting", "publish", "who_is_behind"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a call does not end.

    Args:
      facts: a line for each rank that does not take part in it.
      hopeless: whether it cannot end any more: a rank is in another call, or has given it up.
    """

    facts: tuple[str, ...]
    hopeless: bool = False

    def __str__(self) -> str:
        return "; ".join(self.facts) if self.facts else "all ranks say that they are in it"


def publish(world: World) -> None:
    """Tells the others where this rank is in each of its channels.

    The watchdog does it off the critical path; a call that waits does it at once.
    """
    if world.store is None:
        return
    channels = [c for c in list(world.channels.values()) if c.moment.number]
    moments = {
        c.key: (*c.moment[:2], c.state, c.failed, c.past[-1][:2] if c.past else None)
        for c in channels
    }
    try:
        world.store.put(f"progress/{world.rank}", json.dumps(moments).encode())
    except jax.errors.JaxRuntimeError:
        return  # rank 0, which holds the store, is gone; `peers` says so


def who_is_behind(world: World, channel: Channel, moment: Moment) -> Waiting:
    """Compares what the other ranks of a channel last told with the call that this one is in."""
    gone = world.gone(channel)
    if gone:
        return Waiting(tuple(map(str, gone)), hopeless=True)
    if world.store is None:
        return Waiting(())
    try:
        told = world.store.under("progress")
    except jax.errors.JaxRuntimeError:
        return Waiting(("rank 0, which holds the key-value store, does not answer",))
    facts: list[str] = []
    hopeless = False
    for rank in channel.ranks:
        if rank == world.rank:
            continue
        calls = json.loads(told.get(str(rank), b"{}"))
        number, text, state, failed, _ = calls.get(channel.key, (0, "", "done", 0, None))
        if failed == moment.number:
            facts.append(f"rank {rank} has given call {failed} up after an error")
            hopeless = True
        elif number < moment.number:
            doing = "in" if state == "running" else "after"
            place = f"{doing} call {number}, {text}" if number else "before its first call"
            facts.append(f"rank {rank} has not come; it is {place}{_elsewhere(calls, channel)}")
        elif number == moment.number and text != moment.text:
            facts.append(f"rank {rank} is in another call {number}: {text}")
            hopeless = True
    return Waiting(tuple(facts), hopeless)


def _elsewhere(calls: dict[str, tuple[int, str, str, int, object]], channel: Channel) -> str:
    """What a rank is doing in other channels."""
    running = [
        text
        for key, (_, text, state, *_) in calls.items()
        if key != channel.key and state == "running"
    ]
    return f", and in {running[0]} with other ranks" if running else ""
