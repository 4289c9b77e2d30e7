"""Whole functions of the libraries on a 2x2 mesh, forward and backward, against one device."""

import jax
import pytest

from tests.rules.harness import SQUARE, Case, failures, placement_jobs, report
from tests.rules.library import gradient, library

# Signs and orders of eigenvectors, or choices between equal values, are free: XLA may choose others
# for another program of the same numbers.
UNSTABLE: set[str] = set()


def case_of(name, fn, args):
    leaves, tree = jax.tree.flatten(args)
    return Case(
        name, lambda *flat: fn(*jax.tree.unflatten(tree, flat)), tuple(leaves), tolerance=2e-4
    )


def check(functions, sizes, limit):
    jobs = [job for one in functions for job in placement_jobs(case_of(*one), sizes, limit=limit)]
    wrong = failures(jobs, sizes, batch=10)
    assert not wrong, report(wrong, len(jobs))


def functions():
    return [one for one in library() if one[0] not in UNSTABLE]


def test_a_draw_of_functions():
    check(functions()[::25], SQUARE, limit=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(16))
def test_all_functions(part):
    check(functions()[part::16], SQUARE, limit=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(16))
def test_all_gradients(part):
    derived = []
    for name, fn, args in functions()[part::16]:
        backward = gradient(fn, args)
        if backward is not None:
            derived.append((f"gradient of {name}", backward, ()))
    check(derived, SQUARE, limit=1)
