"""Rules for the list scheduler, and what the best of them gives.

A rule ranks work by the time at which it would run if its microbatch were alone, plus a `pace` for
each microbatch before it. A small pace favours work that is deep in the pipeline, a large one old
microbatches. Input gradients are moved by a `delay`: a negative one makes them more urgent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from meshpar.schedules.bounds import least_makespan
from meshpar.schedules.greedy import Found, Keys, ListScheduler, Problem, Rule

# Pace in work of one microbatch on one rank ("step" is one F and one I), delay in forwards of all
# ranks, patience in forwards, make_room. Picked from the grid below, one by one, as what improved
# most on 252 problems (P <= 8, four sets of costs, memory from half to twice that of 1F1B).
PROVEN: tuple[tuple[float | str, float, float, bool], ...] = (
    ("step", 0, 0, False),
    ("step", 0, 0.5, False),
    (1 / 3, 0, 0.2, True),
    (1.5, 0, 0, False),
    (1 / 3, -0.5, 0, True),
    (1, -0.5, 0, True),
    (1 / 3, -1, 0.5, True),
    (1, 0.5, 0.5, False),
    ("step", -1, 0.2, True),
    ("step", 0, 0.2, True),
    (1, -1, 0.2, False),
    (1.5, 1, 0, False),
    (0.5, -1, 0.2, False),
    (2, -1, 0.2, False),
    (1, 0, 0.5, True),
    (0.5, 1, 0.2, False),
)
PACES: tuple[float | str, ...] = ("step", 1 / 3, 0.5, 1, 1.5, 2, 10)
DELAYS = (0, -0.5, -1, 0.5, 1)
PATIENCES = (0, 0.5, 0.2)


class Effort:
    """How many actions may still be placed: a measure of time that is the same on every machine."""

    def __init__(self, actions: int) -> None:
        self.left = actions

    def run(self, problem: Problem, rule: Rule) -> Found | None:
        """Runs one rule, or returns None if the effort is spent."""
        size = 3 * problem.M * len(problem.stages) * len(problem.stages[0])
        if self.left < size:
            return None
        self.left -= size
        return ListScheduler(problem, rule).run()


def sweep(
    problem: Problem, limit: int, references: Sequence[Keys], effort: Effort
) -> tuple[Found, Rule]:
    """The best that the rules find, and the rule that found it.

    Args:
      problem: what is to be scheduled.
      limit: most live activations on a rank, at least one for each of its stages.
      references: keys to try first.
      effort: is used up; the first rule is tried in any case.
    """
    bound = least_makespan(problem, limit)
    candidates = _rules(problem, limit, references)
    rule = next(candidates)
    effort.left -= 1
    best = ListScheduler(problem, rule).run(), rule
    for rule in candidates:
        if best[0].makespan <= bound:
            break
        found = effort.run(problem, rule)
        if found is None:
            break
        if found.makespan < best[0].makespan:
            best = found, rule
    return best


def _rules(problem: Problem, limit: int, references: Sequence[Keys]) -> Iterator[Rule]:
    # Where all times are equal, no work is ever on its way for less than a whole action.
    even = problem.hop == 0 and problem.F == problem.I == problem.W
    patiences = PATIENCES[:1] if even else PATIENCES
    for keys, patience, room in product(references, patiences, (False, True)):
        yield Rule(keys, limit, problem.M, int(patience * problem.F), patience > 0, room)
    whole = -(-limit // len(problem.stages[0]))
    in_flight = tuple(dict.fromkeys(min(whole + more, problem.M) for more in (1, 0, 2)))
    rest = product(PACES, DELAYS, patiences, (False, True))
    for pace, delay, patience, room in dict.fromkeys((*PROVEN, *rest)):
        if patience not in patiences:
            continue
        keys = _keys(problem, pace, delay)
        for most in in_flight:
            yield Rule(keys, limit, most, int(patience * problem.F), patience > 0, room)


def _keys(problem: Problem, pace: float | str, delay: float) -> Keys:
    P, V = len(problem.stages), len(problem.stages[0])
    step = problem.F + problem.I
    each = step if pace == "step" else int(float(pace) * V * (step + problem.W))
    forward, backward = problem.F + problem.hop, problem.I + problem.hop
    turn = P * V * forward + int(delay * P * problem.F)
    alone = [stage * forward for stage in range(P * V)]
    alone += [turn + (P * V - 1 - stage) * backward for stage in range(P * V)]
    return [[time + m * each for m in range(problem.M)] for time in alone]
