"""Improves a schedule by trying small changes of what is urgent."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from meshpar.schedules.greedy import Found, Problem, Rule
from meshpar.schedules.sweep import Effort


def polish(problem: Problem, found: Found, rule: Rule, bound: int, effort: Effort) -> Found:
    """Shifts the times at which a schedule starts its work, as keys for the list scheduler.

    The F or I of one stage is moved for some microbatches; what makes the schedule no longer stays.

    Args:
      problem: what is to be scheduled.
      found: where to start from.
      rule: the rule that found it.
      bound: no schedule is shorter, so the search ends there.
      effort: is used up.
    """
    random = Random(0)  # the same changes in every run
    keys = found.starts
    shifts = (max(1, problem.F // 2), problem.F, 2 * problem.F, 4 * problem.F)
    while found.makespan > bound:
        work = random.randrange(len(keys))
        first = random.randrange(problem.M)
        some = min(problem.M, first + 1 + random.randrange(4))
        last = random.choice((some, problem.M))
        shift = random.choice(shifts) * random.choice((-1, 1))
        row = [key + shift if first <= m < last else key for m, key in enumerate(keys[work])]
        moved = [*keys[:work], row, *keys[work + 1 :]]
        tried = effort.run(problem, replace(rule, keys=moved))
        if tried is None:
            break
        if tried.makespan <= found.makespan:
            found, keys = tried, moved
    return found
