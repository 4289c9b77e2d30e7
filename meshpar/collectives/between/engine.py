"""How a call between processes runs: in its turn, agreed on, compiled once, and within its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.collectives.between.agreement import agree
from meshpar.collectives.between.behind import publish
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.faults import expired, gone, lost
from meshpar.collectives.between.placed import placed
from meshpar.collectives.between.programs import Body, program_of
from meshpar.collectives.between.world import World, here
from meshpar.errors import CollectiveError

__all__ = ["Action", "Pending", "in_turn", "perform", "start"]

_LOOK_EVERY = 0.05  # seconds between looks at who is gone, while a timed call waits
_TELL_AFTER = 0.01  # seconds until a timed call tells the others that it waits


Work = Callable[[World, Channel, Moment], Any]


@dataclass(frozen=True, slots=True)
class Action:
    """What the ranks of a channel do together.

    Args:
      name: the operation and what must be equal on all ranks beside shape and dtype, for messages
        and for the agreement: `all_reduce(ReduceOp.SUM)`.
      body: what each rank does.
      static: the body's other arguments.
    """

    name: str
    body: Body
    static: tuple[Any, ...] = ()


def perform(
    action: Action, x: Any, ranks: tuple[int, ...], timeout: float | None, *, pair: bool = False
) -> Any:
    """Runs an action over some ranks, this one among them, and waits for its result.

    Args:
      action: the same on all ranks.
      x: an array, or a list of arrays of equal shape; of equal shapes and dtypes on all ranks.
      ranks: the group's, in its order; of two, sender and receiver, if `pair`.
      timeout: seconds until it raises; `None` leaves it to the watchdog.
      pair: whether it is a message.

    Raises:
      CollectiveError: the ranks make different calls.
      CollectiveTimeout: not all came in time.
      PeerError: a rank is gone.
    """
    return in_turn(*_prepared(action, x, ranks, pair), ranks, timeout, pair=pair)


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


def start(
    work: Callable[[], Any], ranks: tuple[int, ...], timeout: float | None, *, pair: bool = False
) -> Pending:
    """Lets something that performs actions run behind what is on the way in its lane.

    Args:
      work: runs in the lane's thread.
      ranks: as of `perform`, and so are the others.
    """
    world = here()
    _check_member(world, ranks)
    channel = world.channel(ranks, pair)
    return Pending(world.lane(channel).later(work), channel, timeout)


def in_turn(
    text: str, work: Work, ranks: tuple[int, ...], timeout: float | None, *, pair: bool = False
) -> Any:
    """Runs something as the next call of a channel, watched and within its time.

    Args:
      text: the call, equal on all ranks.
      work: does it.
      ranks: as of `perform`, and so are the others.
    """
    world = here()
    _check_member(world, ranks)
    channel = world.channel(ranks, pair)
    lane = world.lane(channel)
    if lane.is_mine or (timeout is None and lane.is_free):
        return lane.here(lambda: _run(world, channel, text, work, timeout is not None))
    future = lane.later(lambda: _run(world, channel, text, work, timeout is not None))
    return _wait(world, channel, future, timeout)


def _check_member(world: World, ranks: tuple[int, ...]) -> None:
    if world.rank not in ranks:
        raise CollectiveError(
            f"rank {world.rank} is outside the group.",
            because=f"its ranks are {', '.join(map(str, ranks))}",
            instead="if mp.get_rank(group) >= 0: ...",
        )


def _prepared(action: Action, x: Any, ranks: tuple[int, ...], pair: bool) -> tuple[str, Work]:
    world = here()
    _check_member(world, ranks)
    x = placed(x, world)
    program = program_of(world, action.body, action.static, ranks, x)
    text = program.text(action.name)

    def work(world: World, channel: Channel, moment: Moment) -> Any:
        if world.gone(channel):
            raise gone(world, channel, moment)
        if text not in channel.agreed:
            agree(world, channel, moment)
            channel.agreed.add(text)
        return program(x)

    return text, work


def _run(world: World, channel: Channel, text: str, work: Work, timed: bool) -> Any:
    moment = Moment(channel.moment.number + 1, text, "running", time.monotonic(), timed)
    channel.moment = moment
    try:
        return work(world, channel, moment)
    except CollectiveError:
        channel.failed = moment.number
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        channel.failed = moment.number
        if len(channel.ranks) == 1:
            raise
        # XLA's collectives and the key-value store break off where a peer has gone.
        raise lost(world, channel, moment, error) from None
    finally:
        channel.moment = moment._replace(state="done")


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
            raise expired(world, channel, channel.moment, timeout)
        try:
            return future.result(min(_LOOK_EVERY, rest))
        except NotYet:
            if future.done():
                raise
        if _gone_long(world, channel):
            raise gone(world, channel, channel.moment)


def _gone_long(world: World, channel: Channel) -> bool:
    """Whether a member went so long ago that XLA would have raised if it could."""
    times = [departure.at for departure in world.gone(channel)]
    return bool(times) and time.monotonic() - min(times) > world.patience.grace
