"""The laws a schedule must keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshpar.schedules.actions import OPS, Cell
from meshpar.schedules.timing import Deadlock, one_tick, play

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule


class ScheduleError(ValueError):
    """A schedule breaks a law; `problems` lists every break that was found.

    Args:
      schedule: how the schedule is called in the message.
      problems: one line for each.
    """

    def __init__(self, schedule: str, problems: tuple[str, ...]) -> None:
        shown = "\n".join(f"  {line}" for line in problems[:8])
        more = f"\n  ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        super().__init__(f"{schedule} is not a valid schedule:\n{shown}{more}")
        self.problems = problems


def validate(schedule: Schedule, *, slots: bool = True) -> None:
    """Checks that a schedule can run and computes what a pipeline must.

    Args:
      schedule: any table, generated or written by hand.
      slots: also check that each value is made in an earlier tick than it is used in, which the
        lockstep executor and clock rely on. `Schedule.from_orders` lays a table out so that it
        holds.

    Raises:
      ScheduleError: the placement is not one rank for each stage; an action is outside the table's
        ranges, missing or repeated (every F once, and once either B or both I and W); a backward
        comes before its forward or a W before its I; the ranks wait for each other for ever; or a
        value is used in the tick that makes it, or before.

    Example:
      >>> from meshpar.schedules import generate
      >>> validate(generate("1F1B", P=4, M=8))
    """
    problems = tuple(_placement(schedule)) or (
        tuple(_ranges(schedule)) or (*_counts(schedule), *_rank_order(schedule))
    )
    if not problems:
        problems = tuple(_deadlock(schedule))
    if not problems and slots:
        problems = tuple(_slots(schedule))
    if problems:
        raise ScheduleError(schedule.title, problems)


def _placement(schedule: Schedule) -> Iterator[str]:
    owned = Counter(stage for row in schedule.stages for stage in row)
    for stage in range(schedule.P * schedule.V):
        if owned[stage] != 1:
            yield f"stage {stage} lives on {owned[stage]} ranks; every stage has one"


def _ranges(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule.orders):
        for action in (action for cell in order for action in cell):
            known = action.op in OPS
            chunk = 0 <= action.chunk < schedule.V
            if not (known and chunk and 0 <= action.microbatch < schedule.M):
                yield (
                    f"rank {rank}: {action} is outside the configuration: ops {', '.join(OPS)}, "
                    f"{schedule.V} chunks, {schedule.M} microbatches"
                )


def _counts(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule.orders):
        seen = Counter(action for cell in order for action in cell)
        number = {(a.op, a.chunk, a.microbatch): n for a, n in seen.items()}
        for chunk in range(schedule.V):
            for m in range(schedule.M):
                f, b, i, w = (number.get((op, chunk, m), 0) for op in OPS)
                if f != 1:
                    yield f"rank {rank}: F{chunk}.{m} occurs {f} times, not once"
                if (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                    yield (
                        f"rank {rank}: the backward of chunk {chunk}, microbatch {m} is {b} B, "
                        f"{i} I and {w} W; it is one B, or one I and one W"
                    )


def _rank_order(schedule: Schedule) -> Iterator[str]:
    needs = {"B": "F", "I": "F", "W": "I"}
    for rank, order in enumerate(schedule.orders):
        seen: set[tuple[str, int, int]] = set()
        for action in (action for cell in order for action in cell):
            need = needs.get(action.op)
            if need and (need, action.chunk, action.microbatch) not in seen:
                yield f"rank {rank}: {action} comes before {need}{action.chunk}.{action.microbatch}"
            seen.add((action.op, action.chunk, action.microbatch))


def _deadlock(schedule: Schedule) -> Iterator[str]:
    try:
        play(schedule.orders, schedule.stages, schedule.M, one_tick)
    except Deadlock as stuck:
        yield from (f"deadlock: {line}" for line in stuck.waiting)


def _slots(schedule: Schedule) -> Iterator[str]:
    made: dict[tuple[str, int, int], int] = {}
    for rank, row in enumerate(schedule.table):
        for tick, cell in enumerate(row):
            for action in cell:
                kind = {"F": "F", "W": "W"}.get(action.op, "I")
                made[kind, schedule.stages[rank][action.chunk], action.microbatch] = tick
    for rank, row in enumerate(schedule.table):
        for tick, cell in enumerate(row):
            for need, stage, m in _needs_of(schedule, rank, cell):
                when = made[need, stage, m]
                if when >= tick:
                    yield (
                        f"tick {tick}: rank {rank} uses {need} of stage {stage}, microbatch {m}, "
                        f"made in tick {when}; Schedule.from_orders(...) lays orders out in ticks"
                    )


def _needs_of(schedule: Schedule, rank: int, cell: Cell) -> Iterator[tuple[str, int, int]]:
    """What a cell takes from other cells: (F or I, stage, microbatch)."""
    inside: set[tuple[str, int, int]] = set()
    for action in cell:
        stage, m = schedule.stages[rank][action.chunk], action.microbatch
        if action.op == "F":
            needs = [("F", stage - 1, m)] if stage else []
            made = ("F", stage, m)
        elif action.op == "W":
            needs, made = [("I", stage, m)], ("W", stage, m)
        else:
            last = stage + 1 == schedule.P * schedule.V
            needs = [("F", stage, m)] + ([] if last else [("I", stage + 1, m)])
            made = ("I", stage, m)
        yield from (need for need in needs if need not in inside)
        inside.add(made)
