"""What an operation wishes of the values before it counts for what it saves, no more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import meshpar as mp
from meshpar import Shard

MESH = mp.ProcessMesh(np.arange(8), ["dp"])
BATCH, LENGTH, DIM = 32, 64, 128


def tower(tokens, table):
    """The mean of the tokens' normalized vectors, those of padding left out."""
    x, mask = table[tokens], tokens > 3
    x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return jnp.sum(x * mask[:, :, None], 1) / jnp.maximum(jnp.sum(mask, 1)[:, None], 1)


def similarities(lhs, rhs, table):
    return tower(lhs, table) @ tower(rhs, table).T


def test_a_gathered_sentence_vector_does_not_make_its_tower_run_whole_on_each_device():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (2, BATCH, LENGTH)).astype(np.int32)
    table = rng.normal(size=(64, DIM)).astype(np.float32)
    lhs, rhs = (mp.shard_tensor(x, MESH, [Shard(0)]) for x in tokens)
    f = mp.jit(similarities, out_placements=[Shard(0)])
    args = lhs, rhs, mp.shard_tensor(table, MESH, [])
    (gather,) = f.plan(*args).collectives
    assert (gather.kind, gather.bytes) == ("all_gather", BATCH * DIM * 4 * 7 // 8)
    np.testing.assert_allclose(
        np.asarray(f(*args)), similarities(*tokens, table), rtol=1e-5, atol=1e-5
    )


def layers_step(ws, x):
    """The gradient of a loop over layers, scaled by its own norm."""

    def loss(ws):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    grads = jax.grad(loss)(ws)
    return grads / jnp.sqrt(jnp.sum(grads**2))


def test_a_stack_of_gradients_that_is_wished_cut_is_scattered_turn_by_turn():
    rng = np.random.default_rng(0)
    ws = rng.normal(size=(3, 16, 16)).astype(np.float32)
    x = rng.normal(size=(16, 16)).astype(np.float32)
    args = mp.shard_tensor(ws, MESH, []), mp.shard_tensor(x, MESH, [Shard(0)])
    expected = layers_step(ws, x)
    for placement, kind, times in (
        (Shard(1), "reduce_scatter", 3),  # the stack holds an eighth
        (Shard(2), "reduce_scatter", 3),
        (mp.Replicate(), "all_reduce", 1),  # once, behind the loop
    ):
        f = mp.jit(layers_step, out_placements=[placement])
        np.testing.assert_allclose(np.asarray(f(*args)), expected, rtol=1e-5, atol=1e-6)
        (sums,) = [c for c in f.plan(*args).collectives if c.value != "float32[]"]
        assert (sums.kind, sums.count) == (kind, times)


def attended(weights, values, output, kept, residual):
    """Attention's output projection, twice as wide as what goes into it on a device."""
    return residual + jnp.where(kept, (weights @ values) @ output, 0)


def test_a_pending_value_is_reduced_before_the_product_that_makes_it_larger():
    mesh = mp.ProcessMesh(np.arange(4).reshape(2, 2), ["sp", "tp"])
    length, dim = 512, 256
    rng = np.random.default_rng(0)
    shapes = (length, length), (length, dim), (dim, dim), (length, dim), (length, dim)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays[3] = arrays[3] > 0
    rows, cols, whole = Shard(0), Shard(1), mp.Replicate()
    placements = [cols, whole], [rows, cols], [whole, rows], [whole, whole], [rows, whole]
    args = [mp.shard_tensor(x, mesh, p) for x, p in zip(arrays, placements, strict=True)]
    f = mp.jit(attended, out_placements=[rows, whole])
    before, behind = f.plan(*args).collectives
    assert (before.kind, before.axes) == ("reduce_scatter", ("sp",))
    assert before.bytes == length * (dim // 2) * 4 // 2  # of the product's blocks twice as much
    assert (behind.kind, behind.axes) == ("all_reduce", ("tp",))
    np.testing.assert_allclose(np.asarray(f(*args)), attended(*arrays), rtol=1e-4, atol=1e-2)
