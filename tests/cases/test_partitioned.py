"""Behaviours that broke other tools, as programs that `mp.jit` partitions.

Each test says what a single device would give, and runs on meshes where a wrong rule would show:
uneven dims, pending reductions split unevenly, several axes on one dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar import Partial, Replicate, Shard

MESH_2 = mp.ProcessMesh([0, 1], ["x"])
MESH_4 = mp.ProcessMesh([0, 1, 2, 3], ["x"])
MESH_2X4 = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["a", "b"])


def pieces(values, mesh, placements):
    return mp.dtensor_from_local([jnp.asarray(v) for v in values], mesh, placements)


def value(x):
    return jax.tree.map(np.asarray, x)


def assert_equal_to_single(fn, args, placed, **tolerance):
    got, expected = value(mp.jit(fn)(*placed)), value(fn(*args))
    for lhs, rhs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert lhs.dtype == rhs.dtype
        if np.issubdtype(rhs.dtype, np.inexact):
            np.testing.assert_allclose(lhs, rhs, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})
        else:
            np.testing.assert_array_equal(lhs, rhs)


# --- uneven shapes (C01, C03) ---------------------------------------------------------------------


def test_a_dim_that_does_not_divide_is_really_cut():
    mesh = mp.ProcessMesh(range(8), ["x"])
    table = mp.jit(
        lambda x: mp.shard_tensor(x * 2, mesh, [Shard(0)]), out_placements=[Shard(0)], mesh=mesh
    )(np.arange(17 * 16, dtype=np.float32).reshape(17, 16))
    assert mp.placements_of(table) == [Shard(0)]
    rows = [mp.local_value(table, rank).shape[0] for rank in range(8)]
    assert rows == [3, 3, 3, 3, 3, 2, 0, 0]
    np.testing.assert_array_equal(np.asarray(table), 2 * np.arange(17 * 16).reshape(17, 16))


@pytest.mark.parametrize("length", [2, 5, 7, 8])
def test_two_axes_on_one_short_dim(length):
    x = np.arange(1, length + 1, dtype=np.float32) - 4.5
    placed = mp.shard_tensor(x, MESH_2X4, [Shard(0), Shard(0)])
    held = np.concatenate([np.asarray(mp.local_value(placed, r)) for r in range(8)])
    np.testing.assert_array_equal(held, x)  # each element once, in order

    def statistics(x):
        return x.sum(), x.max(), x.min(), x.prod(), x.mean(), jnp.argmax(x), jnp.cumsum(x)

    assert_equal_to_single(statistics, [x], [placed])


# --- pending reductions (C04, C05, C06, C07) ------------------------------------------------------


@pytest.mark.parametrize("mesh", [MESH_2, MESH_4], ids=str)
def test_a_constant_is_added_once(mesh):
    x = np.arange(10)
    placed = mp.shard_tensor(x, mesh, [Shard(0)])

    def sums(x):
        s = x.sum()
        return s + 10, 10 + s, s - 10, 10 - s, s + jnp.array(10), s / (s + 1)

    got = mp.jit(sums)(placed)
    assert [int(v) for v in got[:5]] == [55, 55, 35, -35, 55]
    assert float(got[5]) == pytest.approx(45 / 46)


def test_order_sensitive_reductions_wait_for_the_pending_sum():
    v = pieces([[5, -1], [-4, 3]], MESH_2, [Partial()])

    def order(v):
        return v.max(), v.min(), jnp.argmax(v), jnp.sqrt((v * v).sum()), (v > 4).any()

    largest, least, index, norm, any_above = mp.jit(order)(v)
    assert (int(largest), int(least), int(index), bool(any_above)) == (2, 1, 1, False)
    assert float(norm) == pytest.approx(5**0.5)


@pytest.mark.parametrize("out", [None, [Replicate()], [Shard(0)]], ids=str)
def test_a_row_parallel_linear_adds_its_bias_once(out):
    x = mp.shard_tensor(np.ones((2, 8), np.float32), MESH_4, [Shard(1)])
    w = mp.shard_tensor(np.ones((8, 3), np.float32), MESH_4, [Shard(0)])
    b = mp.shard_tensor(np.array([1.0, 2.0, 3.0], np.float32), MESH_4, [])

    def linear(x, w, b):
        return x @ w + b[None]

    y = mp.jit(linear, out_placements=out)(x, w, b)
    np.testing.assert_array_equal(np.asarray(y), [[9, 10, 11]] * 2)
    gradient = mp.jit(jax.grad(lambda b: linear(x_, w_, b).sum()))
    x_, w_ = np.ones((2, 8), np.float32), np.ones((8, 3), np.float32)
    np.testing.assert_array_equal(np.asarray(gradient(b)), [2, 2, 2])


def test_a_pending_mean_is_not_a_pending_sum():
    w = pieces([[[1.0, 2.0]], [[3.0, 6.0]]], MESH_2, [Partial("avg")])
    b = mp.shard_tensor(np.array([10.0, 10.0], np.float32), MESH_2, [])
    y = mp.jit(lambda w, b: jnp.ones((1, 1)) @ w + b[None])(w, b)
    np.testing.assert_array_equal(np.asarray(y), [[12, 14]])


def test_gradients_through_a_pending_sum():
    def loss(parts):
        y = mp.dtensor_from_local(parts, MESH_4, [Partial()])
        return mp.reshard(y, MESH_4, [Replicate()]) ** 2

    parts = [jnp.float32(r + 1) for r in range(4)]
    got = mp.jit(jax.grad(loss), mesh=MESH_4)(parts)
    np.testing.assert_array_equal(np.asarray(got), [20.0] * 4)

    def weighted(parts):
        y = mp.dtensor_from_local(parts, MESH_4, [Partial()])
        y = mp.reshard(y, MESH_4, [Shard(0)])
        return (jnp.arange(1.0, 5.0) * y).sum()

    vectors = [jnp.full(4, float(r)) for r in range(4)]
    for got in mp.jit(jax.grad(weighted), mesh=MESH_4)(vectors):
        np.testing.assert_array_equal(np.asarray(got), [1, 2, 3, 4])


def test_pieces_of_a_traced_pending_sum_are_refused():
    def round_trip(parts):
        y = mp.dtensor_from_local(parts, MESH_4, [Partial()])
        return mp.local_value(y, 0)

    with pytest.raises(mp.PlacementError, match="no pieces: the traced value is the whole one"):
        mp.jit(round_trip, mesh=MESH_4)([jnp.float32(1)] * 4)


# --- rules (C08 to C13) ---------------------------------------------------------------------------


@pytest.mark.parametrize("x", [[10, 5, 3, 8], [0, 0, 0, 0], [1, 7, 7, 2, 7]], ids=str)
def test_argmax_over_a_cut_dim_gives_the_lowest_global_index(x):
    x = np.array(x, np.float32)
    placed = mp.shard_tensor(x, MESH_2, [Shard(0)])
    assert_equal_to_single(lambda x: (jnp.argmax(x), jnp.argmin(x), x.max()), [x], [placed])


def test_argmax_on_two_axes():
    x = np.random.default_rng(0).integers(0, 3, (4, 7)).astype(np.float32)  # many ties
    placed = mp.shard_tensor(x, MESH_2X4, [Shard(0), Shard(1)])
    assert_equal_to_single(lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1)), [x], [placed])


def test_scans_along_a_cut_dim():
    mesh = mp.ProcessMesh(np.arange(8).reshape(4, 2), ["dp", "sp"])
    x = np.ones((8, 1024), np.int32)
    placed = mp.shard_tensor(x, mesh, [Shard(0), Shard(1)])

    def scans(x):
        return (
            jnp.cumsum(x, 1),
            jnp.cumprod(x, 1),
            jax.lax.cummax(x * jnp.arange(1024, dtype=jnp.int32)[None] % 7, axis=1),
            jax.lax.cumsum(x, axis=1, reverse=True),
            jax.lax.associative_scan(jnp.add, x, axis=1),
            jnp.flip(jnp.cumsum(x, 1), 1),
        )

    assert_equal_to_single(scans, [x], [placed])


@pytest.mark.parametrize(
    ("mesh", "shape", "placements", "new"),
    [
        (mp.ProcessMesh(np.arange(6).reshape(2, 3), ["a", "b"]), (4, 4, 4), [Shard(1)], (8, 8)),
        (MESH_2, (12, 8), [Shard(0)], (16, 6)),
        (MESH_2, (12, 8), [Shard(1)], (16, 6)),
        (MESH_4, (6, 256), [Shard(0)], (1536,)),
        (MESH_2X4, (2, 12, 5), [Shard(1), Shard(1)], (24, 5)),
        (MESH_2X4, (24, 5), [Shard(0), Shard(0)], (2, 12, 5)),
    ],
    ids=str,
)
def test_a_reshape_keeps_the_order_of_rows(mesh, shape, placements, new):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    placed = mp.shard_tensor(x, mesh, placements)

    def there_and_back(x):
        y = x.reshape(new)
        return y, y.reshape(shape), jax.grad(lambda x: (x.reshape(new) ** 2).sum())(x)

    assert_equal_to_single(there_and_back, [x], [placed])


@pytest.mark.parametrize("vocabulary", [10, 11])
@pytest.mark.parametrize("padding", [7, -1])
def test_a_vocabulary_parallel_embedding_with_a_padding_row(vocabulary, padding):
    table = np.random.default_rng(0).normal(size=(vocabulary, 4)).astype(np.float32)
    ids = np.array([[1, 7, 2], [9, 7, 2]], np.int32)
    placed = mp.shard_tensor(table, MESH_2, [Shard(0)])
    where = mp.shard_tensor(ids, MESH_2, [])

    def rows(table, ids):
        found = jnp.take(table, ids, axis=0)
        return jnp.where((ids == padding % vocabulary)[..., None], 0.0, found)

    assert_equal_to_single(rows, [table, ids], [placed, where])
    gradient = mp.jit(jax.grad(lambda table, ids: rows(table, ids).sum()))(placed, where)
    counts = np.zeros(vocabulary)
    for i in ids.ravel():
        counts[i] += i != padding % vocabulary
    np.testing.assert_array_equal(np.asarray(gradient), np.repeat(counts[:, None], 4, 1))


def test_a_weighted_mean_over_a_cut_batch():
    losses = mp.shard_tensor(np.array([1, 1, 1, 2], np.float32), MESH_2, [Shard(0)])
    targets = mp.shard_tensor(np.array([0, 0, 0, 1]), MESH_2, [Shard(0)])
    weights = mp.shard_tensor(np.array([1, 10], np.float32), MESH_2, [])

    def mean(losses, targets, weights):
        per_sample = weights[targets]
        return (losses * per_sample).sum() / per_sample.sum()

    assert float(mp.jit(mean)(losses, targets, weights)) == pytest.approx(23 / 13)


@pytest.mark.parametrize("batch", [10, 8])
def test_batch_statistics_are_those_of_the_whole_batch(batch):
    x = np.arange(batch, dtype=np.float32)[:, None]
    graph, state = nnx.split(nnx.BatchNorm(1, rngs=nnx.Rngs(0)))

    def normalise(state, x):
        norm = nnx.merge(graph, state, copy=True)
        y = norm(x)
        return y, nnx.to_pure_dict(nnx.state(norm, nnx.BatchStat))

    placed = mp.shard_tensor(x, MESH_4, [Shard(0)])
    got, statistics = mp.jit(normalise, mesh=MESH_4)(state, placed)
    expected, single = normalise(state, x)
    np.testing.assert_allclose(np.asarray(got), expected, atol=1e-6)
    for name, running in single.items():
        np.testing.assert_allclose(np.asarray(statistics[name]), running, rtol=1e-6)


# --- resharding and random numbers (C14, C16, C17) ------------------------------------------------


def test_resharding_never_builds_the_whole_tensor():
    mesh = mp.ProcessMesh(np.arange(8).reshape(4, 2), ["x", "y"])
    x = np.arange(16**3, dtype=np.float32).reshape(16, 16, 16)
    placed = mp.shard_tensor(x, mesh, [Shard(2), Shard(0)])

    def explicit(x):
        return mp.reshard(x, mesh, [Shard(1), Shard(1)])

    def around_an_add(x):
        return mp.shard_tensor(x + 1, mesh, [Shard(1), Shard(1)])

    for fn, expected in ((explicit, x), (around_an_add, x + 1)):
        f = mp.jit(fn)
        np.testing.assert_array_equal(np.asarray(f(placed)), expected)
        compiled = f.lower(placed).compile()
        assert "all-gather" not in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (MESH_2, [Shard(0)]),
        (MESH_4, [Shard(0)]),
        (mp.ProcessMesh(range(8), ["x"]), [Shard(0)]),
        (mp.ProcessMesh(np.arange(8).reshape(4, 2), ["x", "y"]), [Shard(0), Shard(1)]),
    ],
    ids=str,
)
def test_random_values_do_not_depend_on_placement(mesh, placements):
    def draws(key):
        return (
            jax.random.normal(key, (496, 4)),
            jax.random.uniform(key, (31, 5)),  # uneven everywhere
            jax.random.bits(key, (12, 4), "uint8"),
            jax.random.bernoulli(key, 0.3, (64, 64)),
            jax.random.randint(key, (16, 16), 0, 1000),
        )

    key = jax.random.key(7)
    f = mp.jit(draws, out_placements=placements, mesh=mesh)
    assert not any("gather" in kind for kind in f.plan(key).counts())
    for got, expected in zip(f(key), draws(key), strict=True):
        assert mp.placements_of(got) == placements
        np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(0), Shard(1)], []], ids=str)
def test_dropout_masks_are_equal_over_replicas_and_different_over_shards(placements):
    mesh = mp.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    x = np.ones((64, 64), np.float32)

    def dropped(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0)

    key = jax.random.key(0)
    f = mp.jit(dropped, out_placements=[None, placements][1])
    mask = f(key, mp.shard_tensor(x, mesh, placements))
    np.testing.assert_array_equal(np.asarray(mask), dropped(key, x))
    blocks = {np.asarray(s.data).tobytes() for s in mask.addressable_shards}
    assert len(blocks) == 2 ** len(placements)
    kept = (np.asarray(mask) != 0).mean()
    assert abs(kept - 0.5) < 3 * 0.5 / 64
    other = f(jax.random.key(1), mp.shard_tensor(x, mesh, placements))
    assert (np.asarray(other) != np.asarray(mask)).any()


# --- gradients counted once (C18) -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "for_w"),
    [(MESH_4, [Shard(0)]), (MESH_4, []), (MESH_2X4, [Replicate(), Shard(0)])],
    ids=str,
)
def test_a_global_norm_counts_each_parameter_once(mesh, for_w):
    w = mp.shard_tensor(np.ones((8, 4), np.float32), mesh, for_w)
    b = mp.shard_tensor(np.array([3.0, 4.0], np.float32), mesh, [])
    clip = optax.clip_by_global_norm(1.0)

    def clipped(grads):
        return optax.tree.norm(grads), clip.update(grads, clip.init(grads))[0]

    norm, (w_clipped, b_clipped) = mp.jit(clipped)((w, b))
    assert float(norm) == pytest.approx(57**0.5)
    np.testing.assert_allclose(np.asarray(b_clipped), np.array([3, 4]) / 57**0.5, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(w_clipped), np.full((8, 4), 57**-0.5), rtol=1e-6)
