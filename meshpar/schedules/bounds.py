"""What no schedule of a placement can beat."""

from __future__ import annotations

from itertools import pairwise

from meshpar.schedules.greedy import Problem
from meshpar.schedules.stages import rank_of_stage


def least_makespan(problem: Problem, limit: int) -> int:
    """A bound on the makespan of every schedule within a memory limit, all backwards split.

    Some rank starts only after a microbatch has come through all stages before its own, and then
    works without a pause. And until a rank's first input gradient can be made it runs
    only forwards, no more of them than the limit holds.

    Args:
      problem: what is to be scheduled.
      limit: most live activations on a rank.
    """
    owner = rank_of_stage(problem.stages)
    steps = [0] + [problem.hop if left != right else 0 for left, right in pairwise(owner)]
    forward_at = [stage * problem.F + sum(steps[: stage + 1]) for stage in range(len(owner))]
    end = forward_at[-1] + problem.F
    gradient_at = [
        end + (len(owner) - 1 - stage) * problem.I + sum(steps[stage + 1 :])
        for stage in range(len(owner))
    ]
    bound = 0
    for row in problem.stages:
        first = min(forward_at[stage] for stage in row)
        forwards = min(limit, len(row) * problem.M) * problem.F
        turn = max(min(gradient_at[stage] for stage in row), first + forwards)
        bound = max(bound, first + problem.busy, turn + problem.busy - forwards)
    return bound
