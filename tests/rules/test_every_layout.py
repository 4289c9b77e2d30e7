"""Every rule meets every layout: single operations on meshes of 2 and of 2x2 devices.

The default run draws layouts evenly from all; the exhaustive one takes them all.
"""

import pytest

from tests.rules.cases import FAMILIES, SHAPES, cases
from tests.rules.harness import (
    PAIR,
    SQUARE,
    Case,
    failures,
    in_other_dtypes,
    option_jobs,
    placement_jobs,
    report,
)
from tests.rules.values import eighths, with_nans


def check(jobs_of, family, shape, sizes, limit):
    jobs = [
        job for case in cases(shape, FAMILIES[family]) for job in jobs_of(case, sizes, limit=limit)
    ]
    wrong = failures(jobs, sizes)
    assert not wrong, report(wrong, len(jobs))
    assert jobs, f"{family} has no cases for {shape}"


def meetings(*shapes):
    return [
        pytest.param(family, shape, id=f"{family}-{'x'.join(map(str, shape))}")
        for family in FAMILIES
        for shape in shapes
    ]


@pytest.mark.parametrize("family, shape", meetings((5, 3), (4, 6)))
def test_options_of_a_rule_give_the_unsharded_result(family, shape):
    check(option_jobs, family, shape, PAIR, limit=3)


@pytest.mark.parametrize("family, shape", meetings((5, 3)))
def test_options_over_two_axes_give_the_unsharded_result(family, shape):
    check(option_jobs, family, shape, SQUARE, limit=2)


@pytest.mark.parametrize("family, shape", meetings((5, 3), (1, 2), (0, 3)))
def test_placements_give_the_unsharded_result(family, shape):
    check(placement_jobs, family, shape, PAIR, limit=2 if min(shape) > 1 else 1)


def check_other_dtypes(family, shape, sizes, limit):
    jobs = [
        job
        for case in cases(shape, FAMILIES[family])
        for other in in_other_dtypes(case)
        for job in option_jobs(other, sizes, limit=limit)
        if any(layout.partial for layout in job.planned.inputs)
    ]
    wrong = failures(jobs, sizes)
    assert not wrong, report(wrong, len(jobs))


@pytest.mark.parametrize("family, shape", meetings((5, 3)))
def test_what_is_pending_in_other_dtypes(family, shape):
    """What is linear or increasing in floats need not be in integers, which wrap around."""
    check_other_dtypes(family, shape, PAIR, limit=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family, shape", meetings((5, 3), (4, 6)))
def test_all_that_is_pending_in_other_dtypes(family, shape):
    for sizes in (PAIR, SQUARE):
        check_other_dtypes(family, shape, sizes, limit=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family, shape", meetings(*SHAPES))
def test_all_options_and_placements(family, shape):
    for jobs_of in (option_jobs, placement_jobs):
        check(jobs_of, family, shape, PAIR, limit=0)
        check(jobs_of, family, shape, SQUARE, limit=200)


def test_maxima_across_devices_keep_nan():
    case = Case("max of nans", lambda a: a.max(1), (with_nans(eighths(4, 6)),))
    jobs = placement_jobs(case, PAIR)
    assert not failures(jobs, PAIR)
