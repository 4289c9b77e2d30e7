"""Which schedule and which executor: by the two clocks of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshpar.schedules.actions import Costs
from meshpar.schedules.auto import auto
from meshpar.schedules.memory import peak_of
from meshpar.schedules.named import named_schedules
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.simulation import simulate

__all__ = ["Executor", "best_schedule", "choose", "predicted_seconds"]

Executor = Literal["program", "mpmd"]

TICK = 0.1e-3
"""Seconds that a tick of `program` takes besides its actions, as measured on CPU with two ranks."""

DISPATCH = 0.2e-3
"""Seconds of the host for an action of `mpmd` and its transfer, as measured on CPU."""

CALL = 5e-3
"""Seconds of the host for the rest of a step of `mpmd`: 2 to 6 ms were measured on CPU."""


def predicted_seconds(schedule: Schedule, costs: Costs, executor: Executor) -> float:
    """How long a step takes: `program` in lockstep, `mpmd` as early as values and the host allow.

    Args:
      schedule: what is run.
      costs: in seconds.
      executor: what runs it.
    """
    run = schedule.uncombined()
    result = simulate(run, costs)
    if executor == "program":
        return result.lockstep_makespan + run.ticks * TICK
    actions = sum(len(order) for order in run.orders)
    return max(result.makespan, actions * DISPATCH) + CALL


def choose(schedule: Schedule, costs: Costs) -> Executor:
    """The executor that is predicted to take less time; `program` if both take the same."""
    program, mpmd = (predicted_seconds(schedule, costs, e) for e in ("program", "mpmd"))
    return "mpmd" if mpmd < program else "program"


def best_schedule(
    P: int, M: int, V: int, costs: Costs, executors: Sequence[Executor]
) -> tuple[Schedule, Executor]:
    """The schedule of least predicted time, and what runs it.

    `auto` schedules for the asynchronous clock; in lockstep a named schedule may be shorter. Those
    that hold more activations than what `auto` finds are not considered.

    Args:
      P: number of ranks.
      M: number of microbatches.
      V: stages on each rank.
      costs: in seconds.
      executors: what may run it.
    """
    found = auto(P, M, V, costs=costs)
    peak = peak_of(found.orders)
    named = [s for s in named_schedules(P, M, V) if peak_of(s.orders) <= peak]
    pairs: list[tuple[Schedule, Executor]] = [
        (schedule, executor) for schedule in (found, *named) for executor in executors
    ]
    return min(pairs, key=lambda pair: predicted_seconds(pair[0], costs, pair[1]))
