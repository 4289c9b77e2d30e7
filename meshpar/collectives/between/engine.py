"""How a call between processes runs: in its turn, agreed on, compiled once, and within its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.collectives.between.begun import Begun, agreed, check_member
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.faults import expired
from meshpar.collectives.between.flight import Flight
from meshpar.collectives.between.lanes import in_lane
from meshpar.collectives.between.placed import placed
from meshpar.collectives.between.program import Body
from meshpar.collectives.between.programs import program_of
from meshpar.collectives.between.terms import Terms
from meshpar.collectives.between.world import World, here

__all__ = ["Action", "in_turn", "perform"]


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
    action: Action, x: Any, ranks: tuple[int, ...], terms: Terms, *, pair: bool = False
) -> Any:
    """Runs an action over some ranks, this one among them.

    It is started in the caller's thread, behind all that was started before. A call that is new to
    its ranks is agreed on first, and waits for them, on whatever terms.

    Args:
      action: the same on all ranks.
      x: an array, or a list of arrays of equal shape; of equal shapes and dtypes on all ranks.
      ranks: the group's, in its order; of two, sender and receiver, if `pair`.
      terms: whether it waits for its result, and how long.

    Raises:
      CollectiveError: the ranks make different calls.
      CollectiveTimeout: not all came in time.
      PeerError: a rank is gone.
    """
    world = here()
    check_member(world, ranks)
    x = placed(x, world)
    program = program_of(world, action.body, action.static, ranks, x)
    channel = world.channel(ranks, pair)
    waits = terms.timeout is None and terms.flights is None
    with world.order.turn:
        with Begun(world, channel, program.text(action.name), terms.timeout) as call:
            agreed(world, channel, call.moment)
            if not world.order.clear(call.moment.until):
                assert terms.timeout is not None, "only a time limit passes"
                raise expired(world, channel, call.moment, terms.timeout)
            out = world.order.start(program, x, waits=waits)
            arrays: list[jax.Array] = out if isinstance(out, list) else [out]
            if waits:
                for array in arrays:
                    array.block_until_ready()
            elif arrays:
                call.result = arrays[0]
        if waits:
            return out
    flight = Flight(world, channel, call, arrays)
    if terms.flights is None:
        flight.wait(terms.timeout)
    else:
        call.timed = False  # until somebody waits for it
        terms.flights.append(flight)
    return out


def in_turn(
    text: str,
    work: Callable[[World, Channel, Moment], Any],
    ranks: tuple[int, ...],
    terms: Terms,
    *,
    pair: bool = False,
) -> Any:
    """Runs something without arrays as the next call of a channel, and waits for it.

    Args:
      text: the call, equal on all ranks.
      work: does it; it gives up at the moment's `until`.
      ranks, pair: as of `perform`.
      terms: how long it waits.
    """
    world = here()
    check_member(world, ranks)
    if pair and world.has_lanes:
        return in_lane(world, text, work, (ranks[0], ranks[1]), terms)
    channel = world.channel(ranks, pair)
    with world.order.turn, Begun(world, channel, text, terms.timeout) as call:
        return work(world, channel, call.moment)
