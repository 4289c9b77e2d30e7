"""A schedule as numbers: for each rank and tick the action, and the slots that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from meshpar.schedules.schedule import Schedule
from meshpar.schedules.slots import Life, When, allocate, made_at, ticks_of
from meshpar.schedules.stages import rank_of_stage

__all__ = ["OPS", "SlotTable", "Uses", "slot_table"]

OPS = ("idle", "F", "B", "I", "W")


@dataclass(frozen=True, slots=True)
class Uses:
    """A value that a stage keeps for each microbatch, and the actions between which it lives.

    Args:
      struct: shape and dtype of its block.
      made: `"x"`: received with the input; `"g"`: with the output's gradient; `"F"` or `"I"`: made
        by that action.
      by_input: whether I takes it.
      by_weight: whether W takes it.
    """

    struct: Any  # jax.ShapeDtypeStruct
    made: str
    by_input: bool = False
    by_weight: bool = False


@dataclass(frozen=True, slots=True)
class SlotTable:
    """What the ranks do, as an array that a program scans.

    Args:
      rows: int32 of shape (ranks, ticks, columns): op (`OPS`), chunk, microbatch, stage; one slot
        per value; then for each of `shifts` what is received in this tick (0: nothing, 1: an input,
        2: a gradient) and a slot for each of its arrays.
      pools: struct of a slot, and how many there are.
      pool: for each value the number of its pool.
      shifts: how far values travel in the ring of ranks; 0: they stay.
      ops: the ops that occur.
      received: the number of arrays of an input, which is that of a gradient.
    """

    rows: np.ndarray
    pools: tuple[tuple[Any, int], ...]
    pool: tuple[int, ...]
    shifts: tuple[int, ...]
    ops: frozenset[str]
    received: int

    @property
    def bytes(self) -> int:
        """Bytes of all slots of a device."""
        return sum(
            count * int(np.prod(struct.shape)) * np.dtype(struct.dtype).itemsize
            for struct, count in self.pools
        )


def slot_table(schedule: Schedule, uses: Sequence[Uses]) -> SlotTable:
    """Gives every value a slot.

    Values of one shape and dtype share a pool, whatever they are, so what I frees goes to what it
    leaves for W. A pool has as many slots as the rank that needs the most of it.

    Args:
      schedule: a valid table without combined cells.
      uses: the values of a stage, first those of its input, then those of its output's gradient.
    """
    ticks = ticks_of(schedule)
    pools, pool = _pools(uses)
    slots = np.full((len(uses), schedule.P, schedule.V, schedule.M), -1, np.int32)
    counts = [0] * len(pools)
    for rank in range(schedule.P):
        lives = [
            life
            for value, use in enumerate(uses)
            for life in _lives(schedule, ticks, rank, value, use)
        ]
        for number in range(len(pools)):
            mine = sorted(
                (life for life in lives if pool[life.value] == number),
                key=lambda life: (life.first, life.last),
            )
            given = allocate(tuple(mine))
            counts[number] = max(counts[number], given.count)
            for life, slot in given.slot.items():
                slots[life.value, rank, life.chunk, life.microbatch] = slot
    received = sum(use.made == "x" for use in uses)
    shifts = _shifts(schedule)
    ops = frozenset(action.op for row in schedule.table for cell in row for action in cell)
    return SlotTable(
        _rows(schedule, ticks, slots, shifts, received),
        tuple(zip(pools, counts, strict=True)),
        pool,
        shifts,
        ops,
        received,
    )


def _pools(uses: Sequence[Uses]) -> tuple[list[Any], tuple[int, ...]]:
    numbers: dict[Any, int] = {}
    structs: list[Any] = []
    pool = []
    for use in uses:
        key = use.struct.shape, use.struct.dtype
        if key not in numbers:
            numbers[key] = len(structs)
            structs.append(use.struct)
        pool.append(numbers[key])
    return structs, tuple(pool)


def _lives(schedule: Schedule, ticks: list[When], rank: int, value: int, use: Uses) -> list[Life]:
    out = []
    for chunk, stage in enumerate(schedule.stages[rank]):
        for m in range(schedule.M):
            when = ticks[rank]
            forward = when["F", chunk, m]
            full = when.get(("B", chunk, m))
            for_input = when.get(("I", chunk, m), full)
            for_weight = when.get(("W", chunk, m), full)
            if use.made in "gI" and for_input is None:
                continue  # a table of forwards only
            first = {"F": forward, "I": for_input}.get(use.made)
            if use.made == "I" and full is not None:
                continue  # what B keeps from its first half is not kept between ticks
            if first is None:
                first = _arrival(schedule, ticks, stage, m, use.made)
            last = [forward if use.made != "g" else for_input, first]
            last += [for_input] if use.by_input else []
            last += [for_weight] if use.by_weight else []
            out.append(Life(chunk, m, first, max(t for t in last if t is not None), value))
    return out


def _arrival(schedule: Schedule, ticks: list[When], stage: int, m: int, made: str) -> int:
    """The tick in which a stage gets its input (`"x"`) or its output's gradient (`"g"`)."""
    places = schedule.places
    source = stage - 1 if made == "x" else stage + 1
    if 0 <= source < len(places):
        rank, chunk = places[source]
        return made_at(ticks[rank], chunk, m, ops="F" if made == "x" else "BI") + 1
    rank, chunk = places[stage]
    # The first stage makes its input in the tick of its F, the last one its gradient too.
    return ticks[rank]["F", chunk, m] + (made == "g")


def _shifts(schedule: Schedule) -> tuple[int, ...]:
    ranks = rank_of_stage(schedule.stages)
    steps = {0}  # the gradient of the loss stays where it is made
    for source, target in pairwise(ranks):
        steps |= {(target - source) % schedule.P, (source - target) % schedule.P}
    return tuple(sorted(steps))


def _rows(
    schedule: Schedule,
    ticks: list[When],
    slots: np.ndarray,
    shifts: tuple[int, ...],
    received: int,
) -> np.ndarray:
    values = len(slots)
    width = 4 + values + len(shifts) * (1 + received)
    rows = np.full((schedule.P, schedule.ticks, width), -1, np.int32)
    rows[:, :, 0] = 0
    rows[:, :, 4 + values :: 1 + received] = 0
    ranks = rank_of_stage(schedule.stages)
    last = len(ranks) - 1
    for rank, row in enumerate(schedule.table):
        for tick, cell in enumerate(row):
            for action in cell:
                chunk, m = action.chunk, action.microbatch
                stage = schedule.stages[rank][chunk]
                rows[rank, tick, :4] = OPS.index(action.op), chunk, m, stage
                rows[rank, tick, 4 : 4 + values] = slots[:, rank, chunk, m]
                for kind, target in _sent(action.op, stage, last):
                    to, its_chunk = schedule.places[target]
                    at = 4 + values + shifts.index((to - rank) % schedule.P) * (1 + received)
                    which = slots[(kind - 1) * received : kind * received, to, its_chunk, m]
                    if tick + 1 < schedule.ticks and len(which) == received and which[0] >= 0:
                        rows[to, tick + 1, at] = kind
                        rows[to, tick + 1, at + 1 : at + 1 + received] = which
    return rows


def _sent(op: str, stage: int, last: int) -> list[tuple[int, int]]:
    """What an action sends: (1, an input, or 2, a gradient; the stage that gets it)."""
    if op == "F":
        return [(1, stage + 1)] if stage < last else [(2, stage)]
    return [(2, stage - 1)] if op in "BI" and stage > 0 else []
