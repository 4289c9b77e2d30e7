"""Messages on CPUs run in threads of their own where anything is on its way.

Those that go both ways at once, or were started in another order on the other side, must not wait
for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any

from meshpar.collectives.between.begun import Begun, check_member
from meshpar.collectives.between.behind import publish
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.faults import expired, gone, gone_long
from meshpar.collectives.between.terms import Terms
from meshpar.collectives.between.world import World, here

__all__ = ["Pending", "in_lane", "later"]

_LOOK_EVERY = 0.05  # seconds between looks at who is gone, while a timed message waits
_TELL_AFTER = 0.01  # seconds until it tells the others that it waits


@dataclass(frozen=True, slots=True, repr=False)
class Pending:
    """A call that runs in its lane's thread.

    Args:
      future: its result.
      channel: whose call it is.
      timeout: seconds from when it is waited for until it raises.
    """

    future: Future[Any]
    channel: Channel
    timeout: float | None

    def result(self) -> Any:
        """Waits for the result; raises what the call does."""
        return _wait(here(), self.channel, self.future, self.timeout)

    def done(self) -> bool:
        """Whether it has ended."""
        return self.future.done()

    def __repr__(self) -> str:
        return f"<{'ended' if self.done() else 'pending'}: {self.channel}>"


def later(work: Callable[[], Any], pair: tuple[int, int], timeout: float | None) -> Pending:
    """Lets something that sends messages run behind what is on the way from one to the other."""
    world = here()
    check_member(world, pair)
    channel = world.channel(pair, pair=True)
    return Pending(world.lane(channel).later(work), channel, timeout)


def in_lane(
    world: World,
    text: str,
    work: Callable[[World, Channel, Moment], Any],
    pair: tuple[int, int],
    terms: Terms,
) -> Any:
    """Runs something in the order of the messages from one rank to another, and waits for it.

    Args:
      text, work, terms: as of `engine.in_turn`.
      pair: sender and receiver.
    """
    channel = world.channel(pair, pair=True)
    lane = world.lane(channel)

    def run() -> Any:
        # A caller that gives up leaves this behind, where the other side still finds it.
        with Begun(world, channel, text, terms.timeout, gives_up=False) as call:
            return work(world, channel, call.moment)

    if lane.is_mine or (terms.timeout is None and lane.is_free and world.order.is_idle):
        return lane.here(run)
    return _wait(world, channel, lane.later(run), terms.timeout)


def _wait(world: World, channel: Channel, future: Future[Any], timeout: float | None) -> Any:
    """The result of a call in the lane's thread, which cannot be interrupted but left behind."""
    until = None if timeout is None else time.monotonic() + timeout
    try:
        return future.result(_TELL_AFTER if timeout is None else min(_TELL_AFTER, timeout))
    except NotYet:
        if future.done():
            raise
    publish(world)
    while True:
        rest = _LOOK_EVERY if until is None else until - time.monotonic()
        if rest <= 0:
            assert timeout is not None, "only a time limit passes"
            channel.given_up = True
            raise expired(world, channel, channel.moment, timeout)
        try:
            return future.result(min(_LOOK_EVERY, rest))
        except NotYet:
            if future.done():
                raise
        if gone_long(world, channel):
            raise gone(world, channel, channel.moment)
