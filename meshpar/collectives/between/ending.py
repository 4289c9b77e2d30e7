"""A process that ends lets the calls end first that it has started and nobody has waited for.

The others may come to them later. Until then the watchdog looks after these calls, too.
"""

from __future__ import annotations

import time

from meshpar.collectives.between.world import World

__all__ = ["finish"]

_LOOK_EVERY = 0.005


def finish(world: World) -> None:
    """Waits for the calls on their way, but not where a rank has gone or one was given up."""
    while _on_the_way(world):
        time.sleep(_LOOK_EVERY)


def _on_the_way(world: World) -> bool:
    for channel in list(world.channels.values()):
        channel.settle()
        started = any(call.result is not None for call in list(channel.open.values()))
        lane = world.lanes.get(channel.ranks) if channel.pair else None
        queued = lane is not None and not lane.is_free
        if (started or queued) and not channel.given_up and not world.gone(channel):
            return True
    return False
