"""Every primitive that the libraries emit has a rule, and one along which it can be cut."""

from collections import defaultdict

import jax
import pytest

from meshpar.compiler.program import program_of
from meshpar.rules import find_rule
from tests.rules.library import gradient, library

# What has no rule runs replicated, correctly, and is marked in plans. Nothing that is traced here.
WITHOUT_RULE: set[str] = set()

# All dims of these are whole on each device: XLA does not say where a number comes from.
WHOLE = {"rng_bit_generator"}

# JAX itself does not differentiate these.
WITHOUT_GRADIENT = {
    "jnp.spacing",
    "jnp.nextafter",
    "jnp.at apply",
    "special.betainc",
    "linalg.eig",
    "linalg.schur",
    "linalg.hessenberg",
    "linalg.householder_product",
    "linalg.tridiagonal",
}


def equations(program):
    for node in program.nodes:
        if node.bodies is None:
            yield program, node
        else:
            for body in node.bodies.bodies:
                yield from equations(body)


def traced_equations():
    """Every equation of the library, forward and backward; what cannot be differentiated is not."""
    for name, fn, args in library():
        yield from ((name, *one) for one in equations(program_of(jax.make_jaxpr(fn)(*args))))
        backward = gradient(fn, args)
        if backward is None:
            continue
        try:
            jaxpr = jax.make_jaxpr(backward)()
        except (NotImplementedError, ValueError) as error:
            assert name in WITHOUT_GRADIENT, f"{name}: {error}"
            continue
        yield from ((f"gradient of {name}", *one) for one in equations(program_of(jaxpr)))


@pytest.fixture(scope="module")
def census():
    """Primitive -> the functions in which it has no rule, can be cut, and cannot."""
    seen = defaultdict(lambda: {"no rule": set(), "cut": set(), "whole": set()})
    for name, program, node in traced_equations():
        avals = [program.aval(ref) for ref in node.ins]
        results = [program.avals[value] for value in node.outs]
        rule = find_rule(node.name, avals, node.params)
        if rule is None:
            seen[node.name]["no rule"].add(name)
        elif any(n > 1 for aval in (*avals, *results) for n in aval.shape):
            seen[node.name]["cut" if rule.factors else "whole"].add(name)
    return seen


def test_the_primitives_without_a_rule_are_those_written_down(census):
    without = {name: found["no rule"] for name, found in census.items() if found["no rule"]}
    assert set(without) == WITHOUT_RULE, without
    assert len(census) > 120, sorted(census)


def test_what_runs_whole_is_written_down(census):
    never = {name: f["whole"] for name, f in census.items() if f["whole"] and not f["cut"]}
    assert set(never) == WHOLE, never
