"""The search behind `auto` and `zbvpp`: a sweep over rules, then small improvements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshpar.schedules.actions import Action, Costs, Op, in_whole_units
from meshpar.schedules.bounds import least_makespan
from meshpar.schedules.greedy import Found, Keys, Problem
from meshpar.schedules.polish import polish
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.simulation import simulate
from meshpar.schedules.stages import Stages
from meshpar.schedules.sweep import Effort, sweep
from meshpar.schedules.timing import play

SWEEP = 300_000
"""Actions that a sweep places in all its tries: less than a second's work."""

FINEST = 100_000
"""The search rounds costs to this part of their sum; what it finds is measured exactly."""

MOST_CHANGES = 500
"""How many changes the improvements try at most."""

OP_OF: tuple[Op, ...] = ("F", "I", "W")


def memory_limit_of(call: str, memory_limit: int | None, default: int, V: int) -> int:
    """The memory limit to keep.

    Raises:
      ValueError: no schedule is within it.
    """
    limit = default if memory_limit is None else memory_limit
    if limit < V:
        raise ValueError(
            f"{call}(memory_limit={memory_limit}): the least possible limit is {V}. A microbatch "
            f"passes all V={V} stages of a rank before its first backward, so every schedule holds "
            f"{V} stage activations at once; memory_limit={V} gives one that holds no more."
        )
    return limit


def least_bubble(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """The one with the least bubble; among equals the shortest, then that with the least peak."""

    def rank(schedule: Schedule) -> tuple[float, float, int]:
        result = simulate(schedule, costs)
        return result.bubble, result.makespan, max(result.peak_until_W)

    return min(schedules, key=rank)


def search(
    stages: Stages,
    M: int,
    limit: int,
    costs: Costs,
    references: Sequence[Schedule] = (),
    effort: int = SWEEP,
    polishing: int = 0,
) -> Schedule:
    """The best schedule with split backwards that is found within a memory limit.

    Args:
      stages: the placement.
      M: number of microbatches.
      limit: most live activations on a rank, at least one for each of its stages.
      costs: of the actions.
      references: schedules of this placement, within the limit, that are to be improved on.
      effort: how many actions the sweep may place in all its tries.
      polishing: the same for the improvements after it.
    """
    units = _rounded(costs)
    problem = Problem(stages, M, units["F"], units["I"], units["W"], units["hop"])
    bound = least_makespan(problem, limit)
    P, V = len(stages), len(stages[0])
    keys = [_starts(reference, units) for reference in references]
    # More memory can mislead a rule, so tighter limits are tried too, and first: among equals the
    # one with the lower peak stays.
    limits = sorted({min(limit, tight) for tight in (V * P, V * P + P, V * M)})
    tries = []
    for tight in limits:
        tries.append(sweep(problem, tight, keys, Effort(effort // len(limits))))
        if tries[-1][0].makespan <= bound:
            break
    found, rule = min(tries, key=lambda tried: tried[0].makespan)
    # Small problems are exhausted by then, and are often asked for.
    most = MOST_CHANGES * 3 * P * V * M
    found = polish(problem, found, rule, bound, Effort(min(polishing, most)))
    return least_bubble([_schedule(found, problem), *references], costs)


def _rounded(costs: Costs) -> dict[str, int]:
    units, _ = in_whole_units(costs)
    total = units["F"] + units["I"] + units["W"]
    if total <= FINEST:
        return units
    return {
        name: max(1, round(value * FINEST / total)) if value else 0 for name, value in units.items()
    }


def _starts(schedule: Schedule, units: dict[str, int]) -> Keys:
    """When each F and each B or I of a schedule starts."""
    starts, _ = play(
        schedule.orders,
        schedule.stages,
        schedule.M,
        lambda cell: sum(units[action.op] for action in cell),
        units["hop"],
    )
    S = schedule.P * schedule.V
    keys = [[0] * schedule.M for _ in range(2 * S)]
    for rank, order in enumerate(schedule.orders):
        for cell, start in zip(order, starts[rank], strict=True):
            for action in cell:
                work = schedule.stages[rank][action.chunk] + (0 if action.op == "F" else S)
                if action.op != "W":
                    keys[work][action.microbatch] = start
    return keys


def _schedule(found: Found, problem: Problem) -> Schedule:
    S = len(problem.stages) * len(problem.stages[0])
    orders = [
        [Action(OP_OF[work // S], row.index(work % S), m) for work, m in order]
        for row, order in zip(problem.stages, found.orders, strict=True)
    ]
    return Schedule.from_orders(orders, problem.M, problem.stages, "search")
