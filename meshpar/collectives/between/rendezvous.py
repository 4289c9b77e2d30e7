"""Waiting in the key-value store for what other ranks put there, but not for ranks that won't."""

from __future__ import annotations

import time

from meshpar.collectives.between.behind import publish, who_is_behind
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.faults import contradiction, expired, gone
from meshpar.collectives.between.world import World

__all__ = ["wait_for"]

_LONGEST_SLEEP = 0.05
_ASK_AFTER = 0.3  # seconds between questions about what the others do


def wait_for(
    world: World, channel: Channel, moment: Moment, key: str, count: int
) -> dict[str, bytes]:
    """The values under `key` once there are `count` of them.

    Raises:
      CollectiveError: they cannot come: a rank of the channel is gone, or in another call.
      CollectiveTimeout: it is later than the moment's `until`.
    """
    assert world.store is not None, "a job of several ranks has a store"
    sleep, asked = 0.0005, time.monotonic()
    while True:
        values = world.store.under(key)
        if len(values) >= count:
            return values
        if world.gone(channel):
            raise gone(world, channel, moment)
        now = time.monotonic()
        if moment.until is not None and now > moment.until:
            publish(world)
            raise expired(world, channel, moment, moment.until - moment.since)
        if now - asked > _ASK_AFTER:
            asked = now
            publish(world)
            waiting = who_is_behind(world, channel, moment)
            # A rank that is in this very call found it known already, so it is another one there.
            if waiting.hopeless:
                raise contradiction(channel, moment, waiting.facts)
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)
