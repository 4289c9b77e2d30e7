"""The named schedules: closed forms from their papers, and validity for all sizes."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.schedules import NAMES, auto, generate, simulate, validate, zbvpp

SIZES = [(1, 1), (1, 5), (2, 2), (2, 7), (3, 8), (4, 4), (4, 9), (5, 12), (8, 8), (8, 19), (7, 32)]
CHUNKS = {"1F1B": [1], "Eager1F1B": [1], "ZBH1": [1], "DualPipeV": [2], "ZBVPP": [2, 3, 4]}


def fits(name, V):
    return V in CHUNKS.get(name, [1, 2, 3, 4])


@pytest.mark.parametrize("P, M", SIZES)
def test_bubbles_and_peaks_of_one_wave(P, M):
    for name in ("FThenB", "1F1B", "Eager1F1B"):
        assert simulate(generate(name, P, M)).bubble == pytest.approx((P - 1) / (M + P - 1))
    ranks = range(P)
    assert simulate(generate("FThenB", P, M)).peak_until_W == (M,) * P
    assert simulate(generate("1F1B", P, M)).peak_until_W == tuple(min(M, P - r) for r in ranks)
    eager = tuple(min(M, 2 * (P - r) - 1) for r in ranks)
    assert simulate(generate("Eager1F1B", P, M)).peak_until_W == eager


@pytest.mark.parametrize("V", [1, 2, 3, 4])
@pytest.mark.parametrize("P, M", SIZES)
def test_bubbles_of_interleaved_schedules(P, M, V):
    for name in ("FThenB", "VPP"):
        bubble = simulate(generate(name, P, M, V)).bubble
        assert bubble == pytest.approx((P - 1) / (V * M + P - 1))
    bubble = simulate(generate("InterleavedZB", P, M, V)).bubble
    assert bubble == pytest.approx((P - 1) / (3 * V * M + P - 1))


@pytest.mark.parametrize("V", [2, 3, 4])
@pytest.mark.parametrize("P, M", [(2, 2), (2, 8), (3, 6), (4, 16), (8, 8), (8, 24)])
def test_peaks_of_interleaved_schedules_where_p_divides_m(P, M, V):
    expected = tuple(min(V * M, (V - 1) * P + 2 * (P - 1 - r) + 1) for r in range(P))
    assert simulate(generate("VPP", P, M, V)).peak_until_W == expected
    assert max(simulate(generate("InterleavedZB", P, M, V)).peak_until_W) == min(V * M, V * P)


@pytest.mark.parametrize("P, M", SIZES)
def test_zbh1_needs_a_third_of_the_bubble_and_no_more_memory(P, M):
    result = simulate(generate("ZBH1", P, M))
    assert result.bubble == pytest.approx((P - 1) / (3 * M + P - 1))
    assert result.peak_until_W == (min(M, P),) * P


@pytest.mark.parametrize("P, M", [(1, 3), (2, 3), (2, 8), (4, 7), (4, 16), (8, 15), (8, 20)])
def test_zbvpp_with_two_chunks_is_zbv(P, M):
    result = simulate(generate("ZBVPP", P, M, 2))
    assert result.bubble == pytest.approx((P - 1) / (6 * M + P - 1))
    assert max(result.peak_until_W) <= 2 * P


@pytest.mark.parametrize("P, M", [(2, 4), (2, 9), (3, 6), (4, 8), (4, 16), (8, 16), (8, 21)])
def test_dualpipev_idles_as_published(P, M):
    schedule = generate("DualPipeV", P, M, 2)
    result = simulate(schedule)
    assert result.bubble == pytest.approx(2 * (P - 1) / (6 * M + 2 * (P - 1)))
    assert max(result.peak_until_W) == min(2 * M, 2 * P + 1)
    assert any(len(cell) == 2 for row in schedule.table for cell in row)


@pytest.mark.parametrize(
    "name, V, other",
    [
        ("1F1B", 2, "VPP"),
        ("Eager1F1B", 3, "VPP"),
        ("ZBH1", 2, "InterleavedZB"),
        ("ZBVPP", 1, "ZBH1"),
        ("DualPipeV", 1, "ZBH1"),
        ("DualPipeV", 3, "ZBVPP"),
    ],
)
def test_another_number_of_chunks_names_the_right_schedule(name, V, other):
    with pytest.raises(ValueError, match=f"{name} is for .* generate\\('{other}'") as caught:
        generate(name, 4, 8, V)
    suggestion = re.search(r"generate\('\w+', P=4, M=8, V=\d\)(?= is)", str(caught.value))
    validate(eval(suggestion.group()))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"generate\('GPipe'\): unknown schedule; .* FThenB, 1F1B"):
        generate("GPipe", 4, 8)
    with pytest.raises(ValueError, match=r"generate\(M=0\)"):
        generate("1F1B", 4, 0)
    with pytest.raises(TypeError, match=r"auto\(P=2\.0\): P is an int"):
        auto(2.0, 4)
    with pytest.raises(ValueError, match=r"zbvpp\(V=1\)"):
        zbvpp(4, 8, 1)


def fits_and_sizes():
    sizes = st.tuples(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
    return sizes.flatmap(
        lambda s: st.tuples(st.sampled_from([n for n in NAMES if fits(n, s[2])]), st.just(s))
    )


@settings(deadline=None, max_examples=60, print_blob=True)
@given(fits_and_sizes())
def test_every_named_schedule_is_valid_for_all_sizes(case):
    name, (P, M, V) = case
    schedule = generate(name, P, M, V)
    assert (schedule.P, schedule.M, schedule.V, schedule.name) == (P, M, V, name)
    validate(schedule)
    assert V <= max(simulate(schedule).peak_until_W) <= V * M


@settings(deadline=None, max_examples=25, print_blob=True)
@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_split_and_uncombined_tables_are_valid(P, M, V, split):
    for name in NAMES:
        if fits(name, V):
            schedule = generate(name, P, M, V)
            validate(schedule.split_backward() if split else schedule.uncombined())
