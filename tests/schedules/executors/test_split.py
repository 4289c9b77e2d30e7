"""I and W together are the backward pass: the same values, and nothing computed twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.schedules.executors.evaluate import run_program
from meshpar.schedules.executors.stage import stage_programs
from tests.schedules.executors.models import (
    attention,
    attention_params,
    mlp,
    mlp_params,
    normal,
)


def scanned(params, x, extras):
    return jax.lax.scan(lambda x, layer: (mlp(layer, x), None), x, params)[0]


def scanned_with_checkpoint(params, x, extras):
    layer = jax.checkpoint(mlp)
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def scanned_twice(params, x, extras):
    """A loop in a loop, whose parameter does not change from turn to turn."""

    def outer(x, _):
        return scanned(params["layers"], x * params["scale"], extras), None

    return jax.lax.scan(outer, x, None, length=2)[0]


def with_dropout(params, x, extras):
    keep = jax.random.bernoulli(extras["key"], 0.8, x.shape)
    return jnp.where(keep, mlp(params, x), 0.0)


def with_condition(params, x, extras):
    return jax.lax.cond(x.sum() > 0, lambda: mlp(params, x), lambda: x @ params["up"][:, :8])


def cast(params, x, extras):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return mlp(half, x.astype(jnp.bfloat16)).astype(x.dtype)


def block(params, x, extras):
    return mlp(params["mlp"], attention(params["attention"], x))


def frozen(params, x, extras):
    return mlp(params["mlp"], x) + params["table"][params["index"]]


BOTH = {"attention": attention_params(), "mlp": mlp_params()}
NESTED = {"layers": mlp_params(3), "scale": 1 + normal(9, 1, 1, 8)}
FROZEN = {"mlp": mlp_params(), "table": normal(8, 5, 1, 1, 8), "index": jnp.int32(3)}
STAGES = {
    "mlp": (mlp, mlp_params(), {}),
    "attention": (attention, attention_params(), {}),
    "block": (block, BOTH, {}),
    "scanned": (scanned, mlp_params(3), {}),
    "checkpoint": (scanned_with_checkpoint, mlp_params(3), {}),
    "nested": (scanned_twice, NESTED, {}),
    "dropout": (with_dropout, mlp_params(), {"key": jax.random.key(7)}),
    "cond": (with_condition, mlp_params(), {}),
    "bfloat16": (cast, mlp_params(), {}),
    "frozen": (frozen, FROZEN, {}),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_halves_make_the_gradients(name, recompute):
    stage, params, extras = STAGES[name]
    x, gradient = normal(10, 2, 3, 8), normal(11, 2, 3, 8)
    parts = stage_programs(stage, params, x, extras, recompute=recompute)
    given = [*jax.tree.leaves(params), *jax.tree.leaves(extras)]
    y, *residuals = run_program(parts.forward, *given, x)

    def of(trained, x):
        leaves = jax.tree.leaves(params)
        for k, leaf in zip(parts.trained, trained, strict=True):
            leaves[k] = leaf
        return stage(jax.tree.unflatten(jax.tree.structure(params), leaves), x, extras)

    trained = [jax.tree.leaves(params)[k] for k in parts.trained]
    expected_y, vjp = jax.vjp(of, trained, x)
    for_params, for_x = vjp(gradient)
    tolerance = 2e-2 if name == "bfloat16" else 1e-5

    def same(got, expected):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)

    same(y, expected_y)
    whole = run_program(parts.full, *given, *residuals, gradient)
    first, *cut = run_program(parts.for_input, *given, *residuals, gradient)
    second = run_program(parts.for_weight, *given, *residuals, *cut)
    for got in (whole, [first, *second]):
        for a, b in zip(got, [for_x, *for_params], strict=True):
            same(a, b)


def matmuls(program):
    inside = (body for node in program.nodes if node.bodies for body in node.bodies.bodies)
    return sum(n.name == "dot_general" for n in program.nodes) + sum(map(matmuls, inside))


@pytest.mark.parametrize(
    "name, counts",
    # An attention's scores need both operands' gradients on the way to x: I has 8 of its 12.
    [("mlp", (2, 2, 2)), ("attention", (6, 8, 4)), ("block", (8, 10, 6)), ("scanned", (2, 2, 2))],
)
def test_nothing_is_computed_twice(name, counts):
    stage, params, extras = STAGES[name]
    parts = stage_programs(stage, params, normal(10, 2, 3, 8), extras)
    assert (matmuls(parts.forward), matmuls(parts.for_input), matmuls(parts.for_weight)) == counts
    assert matmuls(parts.full) == counts[1] + counts[2]


@pytest.mark.parametrize("name", ["mlp", "attention", "block", "scanned", "bfloat16"])
def test_parameters_are_not_kept(name):
    stage, params, extras = STAGES[name]
    parts = stage_programs(stage, params, normal(10, 2, 3, 8), extras)
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    kept = [k.aval.shape for k in (*parts.residuals, *parts.cut)]
    assert kept
    assert not shapes & set(kept)


def test_an_extra_is_not_kept():
    stage, params, extras = STAGES["dropout"]
    parts = stage_programs(stage, params, normal(10, 2, 3, 8), extras)
    assert all(k.aval.dtype != extras["key"].dtype for k in parts.residuals)


def test_recomputing_keeps_the_input_only():
    parts = stage_programs(block, BOTH, normal(10, 2, 3, 8), {}, recompute=True)
    assert [k.aval.shape for k in parts.residuals] == [(2, 3, 8)]
    assert matmuls(parts.forward) == 8
    assert matmuls(parts.full) == matmuls(parts.for_input) + matmuls(parts.for_weight)
