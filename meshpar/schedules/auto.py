"""The schedule with the least bubble that fits into memory."""

from __future__ import annotations

from dataclasses import replace

from meshpar.schedules.actions import Costs
from meshpar.schedules.interleaved import interleaved_zb
from meshpar.schedules.memory import peak_of
from meshpar.schedules.named import named_schedules
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.search import least_bubble, memory_limit_of, search
from meshpar.schedules.sizes import check_sizes
from meshpar.schedules.stages import loop_stages, zigzag_stages
from meshpar.schedules.zigzag import v_references

POLISH = 200_000
"""Actions that the improvements of each placement place in all their tries."""


def auto(
    P: int,
    M: int,
    V: int = 1,
    memory_limit: int | None = None,
    costs: Costs = Costs(),  # noqa: B008 - frozen
) -> Schedule:
    """The schedule with the least bubble within a memory limit, by search.

    All named schedules that keep the limit are measured, and a list scheduler is run under many
    rules on loop and zigzag stages; the best is returned. Its backwards are split unless a named
    schedule with full ones wins. The same arguments always give the same schedule.

    Args:
      P: number of ranks.
      M: number of microbatches.
      V: stages on each rank.
      memory_limit: most live stage activations on any rank, each counted from its F to its B or W
        (`peak_until_W`); none where it is not given.
      costs: the times to schedule for.

    Returns:
      The schedule, by name "auto". Among equal bubbles the shortest, then the one with the lowest
      peak of those found.

    Raises:
      ValueError: a size is below 1, or no schedule keeps the limit; the message has the least one.

    Example:
      >>> from meshpar.schedules import simulate
      >>> schedule = auto(P=4, M=8, memory_limit=4)
      >>> round(simulate(schedule).bubble, 4)  # that of 1F1B is 0.2727
      0.1111
    """
    check_sizes("auto", P, M, V)
    limit = memory_limit_of("auto", memory_limit, V * M, V)
    candidates = [s for s in named_schedules(P, M, V) if peak_of(s.orders) <= limit]
    loops = [s for s in [interleaved_zb(P, M, V)] if peak_of(s.orders) <= limit]
    found = [search(loop_stages(P, V), M, limit, costs, loops, polishing=POLISH)]
    if V > 1:
        references = v_references(P, M, V, limit)
        found.append(search(zigzag_stages(P, V), M, limit, costs, references, polishing=POLISH))
    return replace(least_bubble([*found, *candidates], costs), name="auto")
