"""Gradients of collectives, against numerical ones of numpy's references; `mp.grad`, `mp.local`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar import Replicate, Shard
from tests.collectives.regions import MESH_2X4, MESHES, lines, on_ranks, region
from tests.collectives.table import OPERATIONS, REGION

DIFFERENTIABLE = [op for op in OPERATIONS if REGION in op.places and op.takes_dtype("float32")]


def distinct(form, rng):
    """Other numbers in the same form, at a distance from each other."""

    def numbers(x):
        spread = rng.permutation(np.arange(1.0, 1 + x.size)).reshape(x.shape)
        return spread + rng.random(x.shape) / 3

    return jax.tree.map(numbers, form)


def by_numpy(operation, given, groups):
    """What all ranks get, stacked."""
    out = [None] * len(given)
    for line in groups:
        for p, one in zip(line, operation.get([given[p] for p in line]), strict=True):
            out[p] = one
    return jax.tree.map(lambda *xs: np.stack(xs), *out)


def dot(weights, results):
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(results), strict=True)
    return sum((w * x).sum() for w, x in pairs)


@pytest.mark.parametrize("axes", ["tp", ("dp", "tp")], ids=str)
def test_gradients_are_the_numerical_ones(axes):
    mesh, group = MESH_2X4, MESH_2X4.group(axes)
    rng, groups, n = np.random.default_rng(0), lines(mesh, group), group.nranks
    given = [  # operation, rank
        [distinct(op.give(rank, n, (2,), "float32"), rng) for rank in range(8)]
        for op in DIFFERENTIABLE
    ]
    rows = list(zip(DIFFERENTIABLE, given, strict=True))
    weights = [
        jax.tree.map(lambda x: rng.normal(size=x.shape), by_numpy(op, g, groups)) for op, g in rows
    ]
    run = region(
        mesh,
        lambda xs: [op.call(x, group) for op, x in zip(DIFFERENTIABLE, xs, strict=True)],
    )
    with jax.enable_x64(True):
        stacked = [jax.tree.map(lambda *xs: jnp.stack(xs), *g) for g in given]
        # As one program each: XLA on CPU ends the process where many collectives wait at once.
        gradients = jax.device_get(jax.jit(jax.grad(lambda xs: dot(weights, run(xs))))(stacked))
        # Forward and reverse mode say the same of any direction.
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), stacked)
        along = jax.jit(lambda xs, vs: jax.jvp(run, (xs,), (vs,))[1])
        forward = jax.device_get(along(stacked, direction))
        np.testing.assert_allclose(dot(weights, forward), dot(gradients, direction))
    for (operation, inputs), gradient, weight in zip(rows, gradients, weights, strict=True):
        for rank in range(8):  # along one direction of what each rank gives
            step = jax.tree.map(lambda x: 1e-3 * rng.normal(size=x.shape), inputs[rank])

            def loss(sign, rank=rank, step=step, inputs=inputs, operation=operation, weight=weight):
                moved = jax.tree.map(lambda x, s: x + sign * s, inputs[rank], step)
                others = [moved if r == rank else x for r, x in enumerate(inputs)]
                return dot(weight, by_numpy(operation, others, groups))

            got = dot(jax.tree.map(lambda x, rank=rank: np.asarray(x)[rank], gradient), step)
            expected = (loss(1) - loss(-1)) / 2
            np.testing.assert_allclose(
                got, expected, rtol=1e-4, atol=1e-7, err_msg=f"{operation.name}, rank {rank}"
            )


def test_ranks_that_share_a_maximum_share_its_gradient():
    x = np.asarray([2.0, 5.0, 5.0, 1.0], np.float32)
    gradient = jax.grad(
        lambda x: region(MESHES[4], lambda x: mp.all_reduce(x, mp.ReduceOp.MAX))(x)[0]
    )
    np.testing.assert_allclose(gradient(x), [0, 0.5, 0.5, 0])
    np.testing.assert_allclose(gradient(x), jax.grad(lambda x: x.max())(x))


# --- mp.grad: what a loss means (C32) -------------------------------------------------------------

RANKS = np.asarray([0.0, 1.0], np.float32)


@pytest.mark.parametrize("grad", [mp.grad, lambda fn: lambda *a: mp.value_and_grad(fn)(*a)[1]])
def test_the_gradient_of_a_common_loss_is_summed(grad):
    def step(w, d):
        return grad(lambda w: mp.all_reduce(((w**2 + 1) * d).sum()))(w)

    got = mp.spmd(step, MESHES[2], [[Replicate()], [Shard(0)]], [Replicate()])(np.float32(1), RANKS)
    assert float(got) == 2.0


def test_the_gradient_of_a_loss_per_rank_is_its_own():
    p = np.asarray([1.0, 2.0], np.float32)
    samples = np.asarray([[0, 1], [1, 1], [1, 0], [0, 0]], np.float32)

    def per_sample(p, samples):
        by_grad = jax.vmap(lambda s: mp.grad(lambda p: p @ s)(p))(samples)
        by_local = jax.vmap(lambda s: jax.grad(lambda p: p @ s)(mp.local(p)))(samples)
        closed_over = jax.vmap(mp.grad(lambda s: (s * s) @ p))(samples)
        summed = jax.vmap(lambda s: jax.grad(lambda p: p @ s)(p))(samples)
        return by_grad, by_local, closed_over, summed

    out = ([Shard(0)], [Shard(0)], [Shard(0)], [Replicate()])
    got = mp.spmd(per_sample, MESHES[2], [[Replicate()], [Shard(0)]], out)(p, samples)
    np.testing.assert_array_equal(got[0], samples)
    np.testing.assert_array_equal(got[1], samples)
    np.testing.assert_array_equal(got[2], 2 * samples * p)
    # Plain jax.grad sums over the ranks, as its documentation says: what mp.local is for.
    np.testing.assert_array_equal(got[3], samples[:2] + samples[2:])


def test_a_loss_that_differs_along_one_axis_is_summed_along_the_other():
    data = np.arange(8, dtype=np.float32).reshape(2, 4)

    def step(w, d):
        loss = mp.value_and_grad(
            lambda w: mp.all_reduce((w["a"] * d).sum(), group=MESH_2X4.group("tp"))
        )
        value, gradient = loss(w)
        return value[None], gradient["a"][None]

    got = mp.spmd(step, MESH_2X4, [[Replicate()], [Shard(0), Shard(1)]], [Shard(0)])(
        {"a": np.float32(2)}, data
    )
    np.testing.assert_allclose(got[1], data.sum(1))
    np.testing.assert_allclose(got[0], 2 * data.sum(1))


def test_aux_and_several_arguments():
    def step(w, b, d):
        def loss(w, d, b):
            y = w * d + b
            return mp.all_reduce((y**2).sum()), {"mean": mp.all_reduce(y.mean(), mp.ReduceOp.AVG)}

        (value, aux), (dw, db) = mp.value_and_grad(loss, (0, 2), has_aux=True)(w, d, b)
        only, aux_2 = mp.grad(loss, (0, 2), has_aux=True)(w, d, b)
        return value, aux, dw, db, only, aux_2

    args = (np.float32(2), np.float32(1), np.arange(4, dtype=np.float32))
    got = mp.spmd(step, MESHES[4], [[Replicate()], [Replicate()], [Shard(0)]])(*args)
    y = 2 * args[2] + 1
    expected = ((y**2).sum(), {"mean": y.mean()}, (2 * y * args[2]).sum(), (2 * y).sum())
    jax.tree.map(np.testing.assert_allclose, got[:4], expected)
    jax.tree.map(np.testing.assert_allclose, got[4:], (expected[2:], expected[1]))


def test_outside_a_region_they_are_jax_s():
    assert float(mp.grad(lambda x, y: x * y, argnums=1)(2.0, 3.0)) == 2.0
    value, gradient = mp.value_and_grad(lambda x: (x**2).sum())(jnp.arange(3.0))
    assert float(value) == 5.0 and gradient.tolist() == [0, 2, 4]
    assert mp.local({"a": 1.0}) == {"a": 1.0}


def test_the_derivative_of_a_custom_rule_may_hold_collectives():
    """JAX runs such a rule after the region's function has returned; ranks are the mesh's still."""

    @jax.custom_vjp
    def copied(x):  # forward the value, backward the sum over tp: Megatron's f
        return x

    def backward(_, ct):
        return (mp.local(mp.all_reduce(ct, group=mp.new_group([0, 1]))),)

    copied.defvjp(lambda x: (x, None), backward)
    ranks = np.arange(4, dtype=np.float32)
    mesh = mp.ProcessMesh([3, 1, 2, 0], ["late"])
    run = mp.spmd(lambda x, d: copied(mp.local(x)) * d, mesh, [[Shard(0)], [Shard(0)]], [Shard(0)])
    gradient = jax.grad(lambda x: run(x, ranks).sum())(np.ones(4, np.float32))
    # Ranks 0 and 1 stand at positions 3 and 1, and share the sum of what these give.
    np.testing.assert_array_equal(gradient, [0, 4, 2, 4])


def test_each_rank_differentiates_what_the_others_send():
    """Training with tensor parallelism written by hand equals the step on one device."""
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=s).astype(np.float32) for s in [(4, 8), (8, 12), (12, 3)])

    def step(x, w, v):
        def loss(w, v):
            return (mp.all_reduce(jnp.tanh(x @ w) @ v) ** 2).mean()

        return mp.value_and_grad(loss, (0, 1))(w, v)

    column, row = [Shard(1)], [Shard(0)]
    got = mp.spmd(step, MESHES[4], [[Replicate()], column, row], ([Replicate()], (column, row)))
    expected = jax.value_and_grad(lambda w, v: ((jnp.tanh(x @ w) @ v) ** 2).mean(), (0, 1))(w, v)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got(x, w, v), expected
    )


def test_values_given_as_ranks_are_traced():
    got = on_ranks(MESHES[4], lambda x: mp.get_rank() * x, [np.int32(10)] * 4)
    assert [int(x) for x in got] == [0, 10, 20, 30]
