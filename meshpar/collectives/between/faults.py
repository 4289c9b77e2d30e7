"""What is raised when the other ranks do not come, or go away."""

from __future__ import annotations

import time

from meshpar.collectives.between.behind import who_is_behind
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.world import World
from meshpar.errors import CollectiveError, CollectiveTimeout, PeerError

__all__ = ["contradiction", "expired", "gone", "gone_long", "lost"]

_LOOK_EVERY = 0.02


def gone(world: World, channel: Channel, moment: Moment) -> PeerError:
    """The error for ranks that are known to be gone."""
    departures = world.gone(channel)
    return PeerError(
        f"{'; '.join(map(str, departures))}.",
        call=f"{moment} of {channel}",
        because="a collective needs all of its ranks",
        instead="start the job again, with python -m meshpar.launch --max_restart 1 by itself",
    )


def lost(world: World, channel: Channel, moment: Moment, error: BaseException) -> CollectiveError:
    """The error for a call that XLA has broken off, once it is known who has gone."""
    until = time.monotonic() + world.patience.grace
    while time.monotonic() < until:
        if world.gone(channel):
            return gone(world, channel, moment)
        time.sleep(_LOOK_EVERY)
    return PeerError(
        "the call broke off.",
        call=f"{moment} of {channel}",
        because=str(error),
        ranks=who_is_behind(world, channel, moment),
    )


def expired(world: World, channel: Channel, moment: Moment, timeout: float) -> CollectiveTimeout:
    """The error for a call whose time is over."""
    return CollectiveTimeout(
        f"not all ranks have come within {timeout:g} s.",
        call=f"{moment} of {channel}",
        because=who_is_behind(world, channel, moment),
        instead="a longer timeout=, or none: then the watchdog says who is behind",
    )


def contradiction(channel: Channel, moment: Moment, facts: tuple[str, ...]) -> CollectiveError:
    """The error for ranks that do not make the same call."""
    return CollectiveError(
        f"the ranks do not make the same call of {channel}.",
        here=str(moment),
        ranks="; ".join(facts),
        because="a collective takes the same operation, shape and dtype on each of its ranks, and "
        "all of them make their calls in the same order",
    )


def gone_long(world: World, channel: Channel) -> bool:
    """Whether a member went so long ago that XLA would have raised if it could."""
    times = [departure.at for departure in world.gone(channel)]
    return bool(times) and time.monotonic() - min(times) > world.patience.grace
