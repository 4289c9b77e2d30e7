"""What a schedule costs: time by two clocks, memory, communication."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from meshpar.schedules.actions import Cell, Costs, in_whole_units
from meshpar.schedules.memory import peak_activations
from meshpar.schedules.stages import rank_of_stage
from meshpar.schedules.timing import play

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Simulation:
    """The measures of one schedule under one set of costs.

    Attributes:
      makespan: from 0 to the end of the last action, each action as early as its inputs allow.
      busy: working time of each rank.
      bubble: `1 - sum(busy) / (P * makespan)`.
      bubble_span: `1 - max(busy) / s`, s the longest time from a rank's first start to its last
        end: the measure of the zero-bubble papers, whose ranks need not begin together.
      lockstep_makespan: the same table in lockstep, where a tick lasts as long as its longest cell,
        and one hop more if a value goes from it to another rank.
      lockstep_bubble: `1 - sum(busy) / (P * lockstep_makespan)`.
      peak_until_W: for each rank the most live activations, in stage activations; one lives from
        the start of its F to the end of its B or W.
      peak_until_I: the same, released at the end of the B or I already.
      messages: `((source rank, target rank), number of values)` for all pairs that talk.
      starts: when each non-idle cell of each rank starts, by the asynchronous clock.
      ends: when it ends.
    """

    makespan: float
    busy: tuple[float, ...]
    bubble: float
    bubble_span: float
    lockstep_makespan: float
    lockstep_bubble: float
    peak_until_W: tuple[int, ...]
    peak_until_I: tuple[int, ...]
    messages: tuple[tuple[tuple[int, int], int], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Simulation:  # noqa: B008 - frozen
    """Runs a schedule on paper.

    Args:
      schedule: a valid one.
      costs: time of each action and hop; computed with exactly, as decimals.

    Returns:
      All measures. Times are in the unit of `costs`.

    Raises:
      ScheduleError: the ranks would wait for each other for ever.

    Example:
      >>> from meshpar.schedules import generate
      >>> result = simulate(generate("1F1B", P=4, M=8))
      >>> result.makespan, result.peak_until_W
      (33.0, (4, 3, 2, 1))
    """
    units, unit = in_whole_units(costs)

    def duration(cell: Cell) -> int:
        return sum(units[action.op] for action in cell)

    orders = schedule.orders
    starts, ends = play(orders, schedule.stages, schedule.M, duration, units["hop"])
    makespan = max(end[-1] for end in ends)
    busy = [sum(map(duration, order)) for order in orders]
    span = max(end[-1] - start[0] for start, end in zip(starts, ends, strict=True))
    lockstep = _lockstep(schedule, [[duration(cell) for cell in row] for row in schedule.table])
    lockstep += units["hop"] * len(_sending_ticks(schedule))
    return Simulation(
        makespan=makespan / unit,
        busy=tuple(time / unit for time in busy),
        bubble=float(1 - Fraction(sum(busy), schedule.P * makespan)),
        bubble_span=float(1 - Fraction(max(busy), span)),
        lockstep_makespan=lockstep / unit,
        lockstep_bubble=float(1 - Fraction(sum(busy), schedule.P * lockstep)),
        peak_until_W=tuple(peak_activations(order, "W") for order in orders),
        peak_until_I=tuple(peak_activations(order, "I") for order in orders),
        messages=tuple(sorted(_messages(schedule).items())),
        starts=tuple(tuple(t / unit for t in row) for row in starts),
        ends=tuple(tuple(t / unit for t in row) for row in ends),
    )


def _lockstep(schedule: Schedule, durations: list[list[int]]) -> int:
    return sum(max(tick) for tick in zip(*durations, strict=True))


def _targets(schedule: Schedule, rank: int, cell: Cell) -> list[int]:
    """The other ranks to which a cell sends a value."""
    owner = rank_of_stage(schedule.stages)
    out = []
    for action in cell:
        step = {"F": 1, "B": -1, "I": -1}.get(action.op, 0)
        stage = schedule.stages[rank][action.chunk] + step
        if 0 <= stage < len(owner) and owner[stage] != rank:
            out.append(owner[stage])
    return out


def _sending_ticks(schedule: Schedule) -> set[int]:
    return {
        tick
        for rank, row in enumerate(schedule.table)
        for tick, cell in enumerate(row)
        if _targets(schedule, rank, cell)
    }


def _messages(schedule: Schedule) -> Counter[tuple[int, int]]:
    return Counter(
        (rank, target)
        for rank, row in enumerate(schedule.table)
        for cell in row
        for target in _targets(schedule, rank, cell)
    )
