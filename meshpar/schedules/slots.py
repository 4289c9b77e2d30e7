"""Buffer slots for what a rank must keep between ticks, for executors that run a table.

Lives are counted in ticks, both ends included; values that live at the same time get different
slots, and no allocation uses fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule

Kept = Literal["until_W", "until_I", "between_I_and_W", "activation", "gradient"]
"""What is kept: residuals of F until W, or until I only (B counts as both); what I leaves for W; a
received activation until its F; a received gradient until its B or I."""


@dataclass(frozen=True, slots=True)
class Life:
    """One value on one rank, from tick `first` to tick `last`.

    Args:
      chunk: the chunk it belongs to.
      microbatch: the microbatch it belongs to.
      first: the tick that makes or receives it.
      last: the tick of its last use.
      value: which of the values that a chunk has for a microbatch.
    """

    chunk: int
    microbatch: int
    first: int
    last: int
    value: int = 0


@dataclass(frozen=True, slots=True)
class Slots:
    """An allocation on one rank: `count` slots, and the slot of each value."""

    count: int
    slot: dict[Life, int]


When = dict[tuple[str, int, int], int]
"""The tick of each action of a rank, by op, chunk and microbatch."""


def ticks_of(schedule: Schedule) -> list[When]:
    """When each rank does what."""
    return [
        {
            (action.op, action.chunk, action.microbatch): tick
            for tick, cell in enumerate(row)
            for action in cell
        }
        for row in schedule.table
    ]


def lifetimes(schedule: Schedule, kept: Kept) -> tuple[tuple[Life, ...], ...]:
    """The lives of all values of one kind, for each rank, ordered by their first tick.

    Args:
      schedule: a valid table.
      kept: which values.

    Returns:
      A value is received in the tick after it was made, and lives from that tick on, also one that
      never leaves its rank. Stage 0 receives no activation and the last stage no gradient.
    """
    ticks = ticks_of(schedule)
    return tuple(
        tuple(sorted(_lives(schedule, ticks, rank, kept), key=lambda life: (life.first, life.last)))
        for rank in range(schedule.P)
    )


def allocate(lives: tuple[Life, ...]) -> Slots:
    """Gives each value the lowest slot that is free during its life.

    Args:
      lives: of one rank, ordered by their first tick.
    """
    count = 0
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # last tick and slot
    slot: dict[Life, int] = {}
    for life in lives:
        while taken and taken[0][0] < life.first:
            heappush(free, heappop(taken)[1])
        if not free:
            heappush(free, count)
            count += 1
        place = heappop(free)
        slot[life] = place
        heappush(taken, (life.last, place))
    return Slots(count, slot)


def _lives(schedule: Schedule, ticks: list[When], rank: int, kept: Kept) -> list[Life]:
    places = schedule.places
    lives = []
    for chunk, stage in enumerate(schedule.stages[rank]):
        for m in range(schedule.M):
            when = ticks[rank]
            forward = when["F", chunk, m]
            full = when.get(("B", chunk, m))
            for_input = when["I", chunk, m] if full is None else full
            for_weight = when["W", chunk, m] if full is None else full
            if kept == "until_W":
                lives.append(Life(chunk, m, forward, for_weight))
            elif kept == "until_I":
                lives.append(Life(chunk, m, forward, for_input))
            elif kept == "between_I_and_W":
                if full is None:
                    lives.append(Life(chunk, m, for_input, for_weight))
            else:
                step, use = (-1, forward) if kept == "activation" else (1, for_input)
                if 0 <= stage + step < len(places):
                    source, its_chunk = places[stage + step]
                    tick = made_at(ticks[source], its_chunk, m, ops="F" if step < 0 else "BI")
                    lives.append(Life(chunk, m, tick + 1, use))
    return lives


def made_at(when: When, chunk: int, m: int, ops: str) -> int:
    """The tick of the first of some ops of a chunk and microbatch that a rank has."""
    return next(when[op, chunk, m] for op in ops if (op, chunk, m) in when)
