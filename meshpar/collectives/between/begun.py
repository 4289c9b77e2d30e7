"""The begin and the end of a call, and what is checked between them."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax

from meshpar.collectives.between.agreement import agree
from meshpar.collectives.between.channel import Channel, Moment, Open
from meshpar.collectives.between.faults import gone, lost
from meshpar.collectives.between.world import World
from meshpar.errors import CollectiveError

__all__ = ["Begun", "agreed", "check_member"]

# As which XLA's collectives and the key-value store break off where a peer has gone.
_BROKEN_OFF = (jax.errors.JaxRuntimeError, ValueError)


def check_member(world: World, ranks: tuple[int, ...]) -> None:
    """Checks that this rank is one of some.

    Raises:
      CollectiveError: it is not.
    """
    if world.rank not in ranks:
        raise CollectiveError(
            f"rank {world.rank} is outside the group.",
            because=f"its ranks are {', '.join(map(str, ranks))}",
            instead="if mp.get_rank(group) >= 0: ...",
        )


def agreed(world: World, channel: Channel, moment: Moment) -> None:
    """Sees to it that all ranks make this call, and are there.

    Raises:
      CollectiveError: they do not, or are not.
    """
    if world.departures and world.gone(channel):
        raise gone(world, channel, moment)
    if moment.text not in channel.agreed:
        agree(world, channel, moment)
        channel.agree(moment.text)
    channel.remember(moment)


class Begun:
    """The next call of a channel, which ends with the `with` unless it gets a `result`.

    A class, as what `contextlib` makes takes three times as long.

    Args:
      world, channel: whose it is.
      text, timeout, gives_up: as of `Channel.begin`.

    Raises:
      PeerError: what XLA raises where a peer has gone.
    """

    __slots__ = ("call", "channel", "world")

    def __init__(
        self,
        world: World,
        channel: Channel,
        text: str,
        timeout: float | None,
        *,
        gives_up: bool = True,
    ) -> None:
        self.world, self.channel = world, channel
        self.call = channel.begin(text, timeout, gives_up=gives_up)

    def __enter__(self) -> Open:
        return self.call

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        call, channel = self.call, self.channel
        try:
            if isinstance(error, CollectiveError):
                channel.failed = call.moment.number
            elif error is not None and isinstance(error, _BROKEN_OFF):
                channel.failed = call.moment.number
                if len(channel.ranks) > 1:
                    raise lost(self.world, channel, call.moment, error) from None
        finally:
            if call.result is None:
                channel.end(call)
