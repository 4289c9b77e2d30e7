"""Small reshards that share a collective: the values, the bytes, and who may travel with whom."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar import Partial, Replicate, Shard
from tests.compiler.fuzz import lowered, planned

MESH = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "tp"])
EVEN = [(8,), (8, 8), (16, 3, 8), (8, 0, 8)]
UNEVEN = [(5,), (4, 3), (3, 9, 2), (0, 4), (1, 1)]
R, P, MEAN = Replicate(), Partial(), Partial("avg")


def terms(shape, mesh, placements, seed):
    """A value of eighths, whose pending parts are uneven."""
    x = np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32) / 8
    return x, mp.shard_tensor(x, mesh, placements)


def moved(placements, wanted, shapes=EVEN):
    made = [terms(shape, MESH, placements, i) for i, shape in enumerate(shapes)]
    f = mp.jit(lambda *xs: list(xs), out_placements=[wanted] * len(shapes), mesh=MESH)
    return f, [x for x, _ in made], [value for _, value in made]


@pytest.mark.parametrize(
    ("placements", "wanted", "kind"),
    [
        ([P, R], [R, R], "all_reduce"),
        ([R, MEAN], [R, R], "all_reduce"),
        ([P, P], [R, R], "all_reduce"),
        ([R, P], [R, Shard(0)], "reduce_scatter"),
        ([P, R], [Shard(-1), R], "reduce_scatter"),
        ([Shard(0), MEAN], [Shard(0), Shard(-1)], "reduce_scatter"),
        ([R, Shard(0)], [R, R], "all_gather"),
        ([R, Shard(-1)], [R, R], "all_gather"),
        ([Shard(-1), Shard(-1)], [Shard(-1), R], "all_gather"),
    ],
    ids=str,
)
def test_values_of_any_shape_share_a_collective(placements, wanted, kind):
    for shapes in (EVEN, UNEVEN):
        f, expected, args = moved(placements, wanted, shapes)
        for got, x in zip(f(*args), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), x)
        plan = f.plan(*args)
        assert planned(plan) == lowered(f.lower(*args).as_text(), MESH)
        if shapes is EVEN:  # the others may go by other ways, which send less
            assert plan.counts() == {kind: 1}


def test_a_bucket_sends_what_its_values_send_alone():
    f, _, args = moved([R, P], [R, Shard(0)])
    alone = sum(
        moved([R, P], [R, Shard(0)], [s])[0].plan(a).bytes for s, a in zip(EVEN, args, strict=True)
    )
    assert f.plan(*args).bytes == alone


def test_only_one_dtype_kind_and_axis_travel_together():
    def on(dtype, placements):
        return mp.shard_tensor(np.ones((4, 4), dtype), MESH, placements)

    args = [
        on(dtype, placements)
        for dtype, placements in itertools.product(
            (np.float32, np.int32), ([P, R], [R, P], [Shard(0), R])
        )
    ]
    f = mp.jit(lambda *xs: list(xs), out_placements=[[R, R]] * len(args), mesh=MESH)
    assert f.plan(*args).counts() == {"all_reduce": 4, "all_gather": 2}
    for got in f(*args):
        np.testing.assert_array_equal(np.asarray(got), np.ones((4, 4)))


def test_maxima_and_keys_travel_alone():
    maxima = [terms((4,), MESH, [Partial("max"), R], i) for i in range(2)]
    f = mp.jit(lambda *xs: list(xs), out_placements=[[R, R]] * 2, mesh=MESH)
    assert f.plan(*(v for _, v in maxima)).counts() == {"all_reduce": 2}
    keys = [
        mp.shard_tensor(jax.random.split(jax.random.key(i), 8), MESH, [Shard(0)]) for i in (0, 1)
    ]
    assert f.plan(*keys).counts() == {"all_gather": 2}


def test_large_values_travel_alone():
    large = [mp.shard_tensor(np.ones((2**16,), np.float32), MESH, [P, R]) for _ in range(3)]
    f = mp.jit(lambda *xs: list(xs), out_placements=[[R, R]] * 3, mesh=MESH)
    assert f.plan(*large).counts() == {"all_reduce": 3}


def test_what_depends_on_a_reduced_value_does_not_travel_with_it():
    x, value = terms((4, 4), MESH, [P, R], 0)
    f = mp.jit(lambda x: jnp.sum(jnp.exp(x) @ jnp.exp(x).T), mesh=MESH)
    np.testing.assert_allclose(f(value), np.sum(np.exp(x) @ np.exp(x).T), rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_of_biases_are_reduced_together(stage):
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(8, 8)).astype(np.float32), np.zeros(8, np.float32))] * 4
    x = rng.normal(size=(16, 8)).astype(np.float32)

    def step(layers, x):
        def loss(layers):
            h = x
            for w, b in layers:
                h = jnp.tanh(h @ w + b[None])
            return jnp.mean(h**2)

        grads = jax.grad(loss)(layers)
        scale = 1 / jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - scale * g, layers, grads)

    state = [Shard(0)] if stage == 3 else [R]
    new = [Shard(0)] if stage else [R]
    placed = jax.tree.map(lambda p: mp.shard_tensor(p, MESH, state), layers)
    f = mp.jit(step, out_placements=jax.tree.map(lambda _: new, layers), mesh=MESH)
    args = placed, mp.shard_tensor(x, MESH, [Shard(0)])
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6),
        f(*args),
        step(layers, x),
    )
    reductions = [
        c for c in f.plan(*args).collectives if c.kind in ("all_reduce", "reduce_scatter")
    ]
    # One for each weight, right behind its contraction, one for the scale, one for all biases.
    assert len(reductions) <= 6, f.plan(*args)
    assert planned(f.plan(*args)) == lowered(f.lower(*args).as_text(), MESH)


def scaled_step(w, x):
    """A sum over both axes that only the end needs, beside sums over one."""
    y = x @ w
    loss = jnp.mean(y**2)
    grad = x.T @ jnp.tanh(y)
    return loss, grad / jnp.sqrt(jnp.sum(grad**2))


def test_a_sum_over_both_axes_goes_axis_by_axis_with_others():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(8, 8)).astype(np.float32), rng.normal(size=(16, 8)).astype(np.float32)
    args = mp.shard_tensor(w, MESH, [R, Shard(1)]), mp.shard_tensor(x, MESH, [Shard(0)])
    f = mp.jit(scaled_step, out_placements=([R, R], [R, Shard(1)]), mesh=MESH)
    for got, want in zip(f(*args), scaled_step(w, x), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    plan = f.plan(*args)
    assert [c.axes for c in plan.collectives] == [("dp",), ("tp",)], plan
    assert planned(plan) == lowered(f.lower(*args).as_text(), MESH)


def test_a_sum_over_both_axes_goes_alone_where_one_axis_has_no_other():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)

    def both(x):
        return jnp.mean(x**2), jnp.sqrt(jnp.sum(x**2, 0))

    value = mp.shard_tensor(x, MESH, [Shard(0), Shard(1)])
    f = mp.jit(both, out_placements=([R, R], [R, Shard(0)]), mesh=MESH)
    for got, want in zip(f(value), both(x), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    assert sorted(c.axes for c in f.plan(value).collectives) == [("dp",), ("dp", "tp")]
