"""A call whose program is started and not waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax

from meshpar._jax import is_ready
from meshpar.collectives.between.behind import publish
from meshpar.collectives.between.channel import Channel, Open
from meshpar.collectives.between.faults import expired, gone, gone_long, lost
from meshpar.collectives.between.world import World

__all__ = ["Flight", "Started"]

_TELL_AFTER = 0.01  # seconds until a rank that waits tells the others so
_SHORTEST, _LONGEST = 2e-5, 2e-3  # seconds between looks


@dataclass(frozen=True, slots=True)
class Flight:
    """A call on its way.

    Args:
      world, channel, call: whose and which.
      arrays: its results, of one program.
    """

    world: World
    channel: Channel
    call: Open
    arrays: list[jax.Array]

    def done(self) -> bool:
        """Whether it has ended."""
        return all(is_ready(x) for x in self.arrays[:1])

    def wait(self, timeout: float | None) -> None:
        """Waits for it.

        Raises:
          CollectiveTimeout: it has not ended in so many seconds.
          PeerError: a rank is gone.
        """
        self.call.timed = timeout is not None
        begin, told = time.monotonic(), False
        while not self.done():
            waited = time.monotonic() - begin
            if timeout is not None and waited > timeout:
                self.call.timed, self.channel.given_up = False, True
                raise expired(self.world, self.channel, self.call.moment, timeout)
            if gone_long(self.world, self.channel):
                self.channel.failed = self.call.moment.number
                raise gone(self.world, self.channel, self.call.moment)
            if not told and waited > _TELL_AFTER:
                told = True
                publish(self.world)
            time.sleep(min(max(waited / 10, _SHORTEST), _LONGEST))
        self.channel.end(self.call)
        try:
            jax.block_until_ready(self.arrays)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            self.channel.failed = self.call.moment.number
            raise lost(self.world, self.channel, self.call.moment, error) from None


@dataclass(frozen=True, slots=True, repr=False)
class Started:
    """A result that is on its way, by one call or several.

    Args:
      value: what it will be.
      flights: the calls.
      timeout: seconds from when each is waited for until it raises.
    """

    value: Any
    flights: list[Flight]
    timeout: float | None

    def result(self) -> Any:
        """Waits for the result; raises what a call does."""
        for flight in self.flights:
            flight.wait(self.timeout)
        return self.value

    def done(self) -> bool:
        """Whether it has ended."""
        return all(flight.done() for flight in self.flights)
