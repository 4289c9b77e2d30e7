"""The table's slots: as many as live at once, never two values in one."""

import itertools

import jax
import numpy as np
import pytest

from meshpar.schedules import generate, simulate
from meshpar.schedules.executors.slot_table import OPS, Uses, slot_table

CASES = [
    ("FThenB", 3, 5, 2),
    ("1F1B", 4, 8, 1),
    ("Eager1F1B", 3, 6, 1),
    ("ZBH1", 4, 8, 1),
    ("VPP", 3, 7, 2),
    ("InterleavedZB", 2, 6, 3),
    ("ZBVPP", 3, 6, 2),
    ("DualPipeV", 3, 8, 2),
]


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def uses():
    """Each of its own shape, so each with a pool of its own."""
    return [
        Uses(struct(1), "x"),
        Uses(struct(2), "g", by_input=True),
        Uses(struct(3), "F", by_weight=True),
        Uses(struct(4), "F", by_input=True),
        Uses(struct(5), "I", by_weight=True),
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_residuals_need_the_peak_of_the_table(case):
    schedule = generate(*case).uncombined()
    result = simulate(schedule)
    counts = {s.shape[0]: n for s, n in slot_table(schedule, uses()).pools}
    assert counts[3] == max(result.peak_until_W)
    assert counts[4] == max(result.peak_until_I)
    assert bool(counts[5]) == any(a.op == "I" for row in schedule.table for c in row for a in c)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_slot_holds_what_is_read(case):
    """Plays the table with names in the slots."""
    schedule = generate(*case).uncombined()
    # One pool for all: values of different kinds must not meet in a slot either.
    kinds = [Uses(struct(1), u.made, u.by_input, u.by_weight) for u in uses()]
    table = slot_table(schedule, kinds)
    slots = [[None] * table.pools[0][1] for _ in range(schedule.P)]
    sent = [[None] * len(table.shifts) for _ in range(schedule.P)]
    reads = {"F": [0], "B": [1, 2, 3], "I": [1, 3], "W": [2, 4]}
    writes = {"F": [2, 3], "I": [4], "B": [], "W": []}
    done = set()
    for tick in range(schedule.ticks):
        payload = [None] * schedule.P
        for rank in range(schedule.P):
            row = table.rows[rank, tick]
            op, chunk, m, stage = row[:4]
            received = row[4 + len(kinds) :].reshape(len(table.shifts), 2)
            for k, (kind, slot) in enumerate(received):
                if kind:
                    slots[rank][slot] = sent[rank][k]
            name = OPS[op]
            if name == "idle":
                continue
            own = row[4 : 4 + len(kinds)]
            if name == "F" and stage == 0:
                slots[rank][own[0]] = (0, 0, m)
            for value in reads[name]:
                assert slots[rank][own[value]] == (value, stage, m), (name, stage, m, value)
            for value in writes[name]:
                slots[rank][own[value]] = (value, stage, m)
            last = schedule.P * schedule.V - 1
            payload[rank] = {
                "F": (0, stage + 1, m) if stage < last else (1, stage, m),
                "W": None,
            }.get(name, (1, stage - 1, m))
            done.add((name, chunk, m, rank))
        for rank, (k, shift) in itertools.product(range(schedule.P), enumerate(table.shifts)):
            sent[(rank + shift) % schedule.P][k] = payload[rank]
    assert len(done) == sum(len(c) for row in schedule.table for c in row)


def test_what_i_frees_goes_to_what_it_leaves():
    schedule = generate("ZBH1", 4, 8)
    apart = slot_table(schedule, uses()).pools
    shared = slot_table(
        schedule,
        [
            Uses(struct(1), "x"),
            Uses(struct(2), "g", by_input=True),
            Uses(struct(3), "F", by_weight=True),
            Uses(struct(4), "F", by_input=True),
            Uses(struct(4), "I", by_weight=True),
        ],
    )
    counts = {s.shape[0]: n for s, n in shared.pools}
    one_each = {s.shape[0]: n for s, n in apart}
    assert counts[4] < one_each[4] + one_each[5]


def test_a_table_of_forwards_keeps_nothing():
    schedule = generate("1F1B", 4, 8).forwards()
    table = slot_table(schedule, [Uses(struct(1), "x")])
    assert [n for _, n in table.pools] == [1]
    assert table.ops == {"F"}
    assert schedule.ticks == 8 + 3
