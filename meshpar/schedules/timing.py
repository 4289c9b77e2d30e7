"""When every cell runs, if each rank works through its cells in order and as early as it can.

Layout, validator, simulator and plots are all built on this one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshpar.schedules.actions import Action, Cell
from meshpar.schedules.stages import Stages, rank_of_stage


class Deadlock(Exception):
    """No rank can go on; `waiting` has a line for each rank that has work left."""

    def __init__(self, waiting: Sequence[str]) -> None:
        super().__init__("; ".join(waiting))
        self.waiting = tuple(waiting)


class Clock:
    """Ends of everything that was delivered so far, and what a cell must wait for.

    Args:
      stages: the placement.
      microbatches: their number.
      hop: time units from one rank to another.
    """

    def __init__(self, stages: Stages, microbatches: int, hop: int) -> None:
        self._stages = stages
        self._rank = rank_of_stage(stages)
        self._microbatches = microbatches
        self._hop = hop
        size = len(self._rank) * microbatches
        # Indexed by stage * microbatches + microbatch; None: not there yet.
        self._forward: list[int | None] = [None] * size
        self._gradient: list[int | None] = [None] * size

    def earliest(self, rank: int, cell: Cell) -> int | None:
        """When the cell's inputs are all there, or None if one has no time yet."""
        latest = 0
        for action in cell:
            for source, producer in self._inputs(rank, action):
                end = source[producer * self._microbatches + action.microbatch]
                if end is None:
                    if self._made_inside(rank, cell, action, producer, source):
                        continue
                    return None
                if self._rank[producer] != rank:
                    end += self._hop
                latest = max(latest, end)
        return latest

    def deliver(self, rank: int, cell: Cell, end: int) -> None:
        """Notes that everything the cell makes is there at `end`."""
        for action in cell:
            index = self._stages[rank][action.chunk] * self._microbatches + action.microbatch
            if action.op == "F":
                self._forward[index] = end
            elif action.op != "W":
                self._gradient[index] = end

    def _inputs(self, rank: int, action: Action) -> list[tuple[list[int | None], int]]:
        stage = self._stages[rank][action.chunk]
        if action.op == "F":
            return [(self._forward, stage - 1)] if stage else []
        if action.op == "W":
            return [(self._gradient, stage)]
        own = (self._forward, stage)
        return [own, (self._gradient, stage + 1)] if stage + 1 < len(self._rank) else [own]

    def _made_inside(
        self, rank: int, cell: Cell, user: Action, producer: int, source: list[int | None]
    ) -> bool:
        """Whether an earlier part of a combined cell makes what `user` needs."""
        if len(cell) == 1 or self._rank[producer] != rank:
            return False
        ops = "F" if source is self._forward else "BI"
        chunk = self._stages[rank].index(producer)
        return any(
            part.op in ops and part.chunk == chunk and part.microbatch == user.microbatch
            for part in cell[: cell.index(user)]
        )


def play(
    orders: Sequence[Sequence[Cell]],
    stages: Stages,
    microbatches: int,
    duration: Callable[[Cell], int],
    hop: int = 0,
) -> tuple[list[list[int]], list[list[int]]]:
    """Starts and ends of all cells, rank by rank.

    Args:
      orders: each rank's cells in order; empty cells take no time.
      stages: the placement.
      microbatches: their number.
      duration: whole time units a cell takes.
      hop: time units from one rank to another.

    Raises:
      Deadlock: some cells wait for each other.
    """
    clock = Clock(stages, microbatches, hop)
    starts: list[list[int]] = [[] for _ in orders]
    ends: list[list[int]] = [[] for _ in orders]
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            free = ends[rank][-1] if ends[rank] else 0
            while len(ends[rank]) < len(order):
                cell = order[len(ends[rank])]
                ready = clock.earliest(rank, cell)
                if ready is None:
                    break
                start = max(free, ready)
                free = start + duration(cell)
                clock.deliver(rank, cell, free)
                starts[rank].append(start)
                ends[rank].append(free)
                progress = True
    waiting = [
        f"rank {rank} waits at {'+'.join(map(str, order[len(ends[rank])]))}"
        for rank, order in enumerate(orders)
        if len(ends[rank]) < len(order)
    ]
    if waiting:
        raise Deadlock(waiting)
    return starts, ends


def one_tick(_: Cell) -> int:
    """The duration by which a table is laid out: each cell takes one tick, whatever it does."""
    return 1
