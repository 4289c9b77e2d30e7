"""A list scheduler: every rank takes, as soon as it is free, the most urgent work that is there.

What is urgent is for the caller to say, by a key for each forward and input gradient; W has none,
it fills the time in which nothing else can run. The search of `auto` tries many such rules, so this
loop is written for speed: work is a plain number, `stage` for its F and `S + stage` for its I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from meshpar.schedules.stages import Stages, rank_of_stage

NEVER = 1 << 62
"""A time after every other."""

Keys = Sequence[Sequence[int]]
"""`keys[work][microbatch]`; the smallest is the most urgent."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be scheduled, in whole time units.

    Args:
      stages: the placement.
      M: number of microbatches.
      F: time of a forward.
      I: time of an input gradient.
      W: time of a weight gradient.
      hop: time from one rank to another.
    """

    stages: Stages
    M: int
    F: int
    I: int  # noqa: E741 - the letter of the literature
    W: int
    hop: int

    @property
    def busy(self) -> int:
        """Working time of each rank."""
        return len(self.stages[0]) * self.M * (self.F + self.I + self.W)


@dataclass(frozen=True, slots=True)
class Rule:
    """How the list scheduler decides.

    Args:
      keys: urgency of each F and I.
      limit: most live activations on a rank, at least one for each of its stages.
      in_flight: most microbatches between their first F and their last I.
      patience: how long a rank waits for work that is on its way rather than start a W.
      pause: whether it also waits rather than start an F or I that is less urgent.
      make_room: whether a W goes before less urgent work to make room for an F.
    """

    keys: Keys
    limit: int
    in_flight: int
    patience: int = 0
    pause: bool = False
    make_room: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule as the search holds it.

    Args:
      makespan: when its last action ends.
      orders: for each rank `(work, microbatch)` in order; `2*S + stage` is a W.
      starts: `starts[work][microbatch]` of each F and I.
    """

    makespan: int
    orders: list[list[tuple[int, int]]]
    starts: list[list[int]]


class ListScheduler:
    """The state of one run."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        self.owner = rank_of_stage(problem.stages)
        self.S = len(self.owner)
        self.jobs = [[*row, *(self.S + stage for stage in row)] for row in problem.stages]
        # One more than there are microbatches: when all are done the next one never arrives.
        self.arrival = [[NEVER] * (problem.M + 1) for _ in range(2 * self.S)]
        self.arrival[0][: problem.M] = [0] * problem.M
        self.next = [0] * (2 * self.S)
        self.live = [0] * len(problem.stages)
        self.released = [[0] * (problem.M + 2) for _ in problem.stages]
        self.weights: list[list[tuple[int, int]]] = [[] for _ in problem.stages]
        self.weights_done = [0] * len(problem.stages)
        self.orders: list[list[tuple[int, int]]] = [[] for _ in problem.stages]
        self.starts = [[0] * problem.M for _ in range(2 * self.S)]
        self.idle = [False] * len(problem.stages)
        self.wake = [0] * len(problem.stages)
        self.events = [(0, rank) for rank in range(len(problem.stages))]

    def run(self) -> Found:
        """Runs to the end; no rule can make the ranks wait for each other."""
        makespan = 0
        while self.events:
            now, rank = heappop(self.events)
            if now != self.wake[rank]:
                continue  # it was woken earlier
            work, again = self.choose(rank, now)
            if work < 0:
                self.idle[rank] = True
                self.wake[rank] = again
                if again < NEVER:
                    heappush(self.events, (again, rank))
                continue
            end = self.start(rank, work, now)
            self.idle[rank] = False
            self.wake[rank] = end
            heappush(self.events, (end, rank))
            if end > makespan:
                makespan = end
        done = sum(map(len, self.orders))
        assert done == 3 * self.S * self.problem.M, f"{done} actions were scheduled"
        return Found(makespan, self.orders, self.starts)

    def choose(self, rank: int, now: int) -> tuple[int, int]:
        """The work to start now, or -1 and when to look again."""
        rule, S = self.rule, self.S
        horizon = now + rule.patience
        best, best_key = -1, NEVER
        soon, soon_key = NEVER, NEVER
        later = NEVER
        pending = self.weights_done[rank] < len(self.weights[rank])
        for work in self.jobs[rank]:
            m = self.next[work]
            at = self.arrival[work][m]
            if at == NEVER or (work == 0 and m - self.next[S] >= rule.in_flight):
                continue
            key = rule.keys[work][m]
            if work < S and not self.fits(rank, work, m):
                if rule.make_room and pending and at <= now and key < best_key:
                    best, best_key = 2 * S, key
                continue
            if at <= now:
                if key < best_key:
                    best, best_key = work, key
            else:
                if at < later:
                    later = at
                if at <= horizon and key < soon_key:
                    soon, soon_key = at, key
        if best >= 0:
            return (-1, soon) if rule.pause and soon_key < best_key else (best, 0)
        if pending and soon == NEVER:
            return 2 * S, 0
        return -1, later

    def fits(self, rank: int, stage: int, m: int) -> bool:
        """Whether the memory allows the F of a stage, microbatch m.

        The oldest microbatch that a rank has not finished keeps room there for all its forwards,
        and so will the next one when it becomes the oldest, since what is younger than both leaves
        V free. So the oldest of all microbatches can always go on, and nothing waits for ever.
        """
        live = self.live[rank]
        room = self.rule.limit - live
        if room <= 0:
            return False
        row = self.problem.stages[rank]
        oldest = self.next[self.S + row[0]]
        if m == oldest:
            return True
        kept = 0
        younger = live + self.released[rank][oldest] + self.released[rank][oldest + 1]
        for own in row:
            if self.next[own] <= oldest:
                kept += 1
            else:
                younger -= 1 if self.next[own] == oldest + 1 else 2
        return room > kept and (m == oldest + 1 or younger < self.rule.limit - len(row))

    def start(self, rank: int, work: int, now: int) -> int:
        """Books the work and returns its end."""
        problem, S = self.problem, self.S
        if work == 2 * S:
            stage, m = self.weights[rank][self.weights_done[rank]]
            self.weights_done[rank] += 1
            self.live[rank] -= 1
            self.released[rank][m] += 1
            self.orders[rank].append((2 * S + stage, m))
            return now + problem.W
        m = self.next[work]
        self.next[work] = m + 1
        self.orders[rank].append((work, m))
        self.starts[work][m] = now
        if work < S:
            self.live[rank] += 1
            end = now + problem.F
            # The last forward's output is its own backward's input.
            self.deliver(rank, work + 1 if work + 1 < S else S + work, m, end)
            return end
        self.weights[rank].append((work - S, m))
        end = now + problem.I
        if work > S:
            self.deliver(rank, work - 1, m, end)
        return end

    def deliver(self, rank: int, work: int, m: int, end: int) -> None:
        """Lets work that needed what ended know, and wakes its rank if that is idle."""
        target = self.owner[work % self.S]
        if target == rank:
            self.arrival[work][m] = end
            return
        at = end + self.problem.hop
        self.arrival[work][m] = at
        if self.idle[target] and at < self.wake[target]:
            self.wake[target] = at
            heappush(self.events, (at, target))
