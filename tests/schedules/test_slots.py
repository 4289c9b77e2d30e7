"""Slots for executors: no two values that live together share one, and none is wasted."""

from itertools import combinations

import pytest

from meshpar.schedules import generate, simulate
from meshpar.schedules.slots import allocate, lifetimes

CASES = [
    ("FThenB", 3, 5, 2),
    ("1F1B", 4, 8, 1),
    ("ZBH1", 4, 8, 1),
    ("VPP", 3, 7, 2),
    ("InterleavedZB", 2, 6, 3),
    ("ZBVPP", 3, 6, 2),
    ("DualPipeV", 3, 8, 2),
]
KINDS = ["until_W", "until_I", "between_I_and_W", "activation", "gradient"]


def together(one, other):
    return one.first <= other.last and other.first <= one.last


@pytest.mark.parametrize("kept", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_that_live_together_have_different_slots(case, kept):
    for lives in lifetimes(generate(*case), kept):
        slots = allocate(lives)
        place = slots.slot
        assert set(place.values()) == set(range(slots.count))
        for one, other in combinations(lives, 2):
            assert not together(one, other) or place[one] != place[other]
        ends = {tick for life in lives for tick in (life.first, life.last)}
        most = [sum(life.first <= tick <= life.last for life in lives) for tick in ends]
        assert slots.count == max(most, default=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_residuals_need_as_many_slots_as_the_simulator_counts(case):
    schedule = generate(*case)
    result = simulate(schedule)
    for kept, peaks in [("until_W", result.peak_until_W), ("until_I", result.peak_until_I)]:
        counts = tuple(allocate(lives).count for lives in lifetimes(schedule, kept))
        assert counts == peaks


def test_every_stage_but_the_ends_receives():
    schedule = generate("VPP", 3, 7, 2)
    activations = sum(map(len, lifetimes(schedule, "activation")))
    assert activations == sum(map(len, lifetimes(schedule, "gradient"))) == (3 * 2 - 1) * 7


def test_only_split_backwards_leave_something_for_w():
    assert not any(lifetimes(generate("1F1B", 3, 4), "between_I_and_W"))
    assert all(len(lives) == 4 for lives in lifetimes(generate("ZBH1", 3, 4), "between_I_and_W"))
