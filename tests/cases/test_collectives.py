"""Behaviours that broke other tools, as regions: exchanges, and what a gradient inside one means.

The gradients of common and of per-rank losses are in `tests/collectives/test_gradients.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar import Replicate, Shard

MESH = mp.ProcessMesh(range(4), ["x"])


# --- an exchange whose dim is not the group's size (C31) ------------------------------------------


def to_columns(rows):
    """A block of rows (2, 8) becomes one of columns (8, 2)."""
    return jnp.concatenate(mp.alltoall(jnp.split(rows, mp.get_world_size(), axis=1)))


def test_rows_become_columns_and_the_value_stays():
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    exchanged = mp.spmd(to_columns, MESH, [[Shard(0)]], [Shard(1)])
    np.testing.assert_array_equal(exchanged(x), x)
    gradient = jax.grad(lambda x: (x * exchanged(x)).sum())(x)
    np.testing.assert_array_equal(gradient, 2 * x)


def test_rows_that_the_group_does_not_divide():
    with pytest.raises(mp.CollectiveError, match="6 rows / 4 ranks leaves 2"):
        mp.spmd(mp.alltoall_single, MESH, [[Replicate()]], [Shard(0)])(np.ones((6, 2), np.float32))


# --- experts with unequal loads (C33) -------------------------------------------------------------

TOKENS, EXPERTS, WIDTH = 8, 4, 3
ROUTES = np.random.default_rng(0).permutation([0] * 20 + [1] * 8 + [2] * 4).reshape(4, TOKENS)
"""The expert of each token of each rank: 20 tokens for expert 0, none for expert 3."""


def kept(limit):
    """Whether each token is within its expert's limit, in the order of all tokens."""
    flat = ROUTES.ravel()
    place = np.asarray([(flat[:i] == flat[i]).sum() for i in range(flat.size)])
    return (place < limit).reshape(ROUTES.shape)


def moe_on_one_device(x, w, limit):
    """Dropped tokens come out as zeros."""
    y = jnp.einsum("td,tde->te", x, w[ROUTES.ravel()])
    return jnp.where(kept(limit).ravel()[:, None], jnp.tanh(y), 0)


def moe_over_ranks(x, w, limit):
    """Each rank holds one expert; tokens go there and come back. Run on each rank."""
    here = kept(limit)
    table = [[int(((ROUTES[i] == e) & here[i]).sum()) for e in range(EXPERTS)] for i in range(4)]
    order = np.argsort(np.where(here, ROUTES, EXPERTS), axis=1, kind="stable")
    rank, most = mp.get_rank(), max(map(sum, table))
    mine = jnp.asarray(order)[rank]
    there, counts = mp.alltoall_single(x[mine][:most], in_split_sizes=table)
    y = jnp.tanh(there @ w[0])
    back = [list(column) for column in zip(*table, strict=True)]
    gathered, came = mp.alltoall_single(y, in_split_sizes=back)
    valid = jnp.arange(len(gathered)) < came.sum()
    rows = jnp.where(valid[:, None], gathered, 0)
    out = jnp.zeros((TOKENS, w.shape[-1]), x.dtype).at[mine[: len(rows)]].set(rows)
    return out, counts.sum()[None]


@pytest.mark.parametrize("limit", [10, 100], ids=["limited", "unlimited"])
def test_experts_with_unequal_loads(limit):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4 * TOKENS, WIDTH)).astype(np.float32)
    w = rng.normal(size=(EXPERTS, WIDTH, 5)).astype(np.float32)
    weights = rng.normal(size=(4 * TOKENS, 5)).astype(np.float32)
    shard = [Shard(0)]
    run = mp.spmd(lambda x, w: moe_over_ranks(x, w, limit), MESH, [shard, shard], shard)
    out, loads = run(x, w)
    np.testing.assert_array_equal(loads, [min(20, limit), 8, 4, 0])
    np.testing.assert_allclose(out, moe_on_one_device(x, w, limit), rtol=1e-5, atol=1e-6)
    assert (np.asarray(out).any(1) == kept(limit).ravel()).all()
    got = jax.grad(lambda x, w: (weights * run(x, w)[0]).sum(), (0, 1))(x, w)
    expected = jax.grad(lambda x, w: (weights * moe_on_one_device(x, w, limit)).sum(), (0, 1))(x, w)
    for lhs, rhs in zip(got, expected, strict=True):
        np.testing.assert_allclose(lhs, rhs, rtol=1e-4, atol=1e-5)


# --- uneven exchanges, row by row -----------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        [[1, 2, 0, 3], [0, 0, 4, 1], [2, 2, 2, 0], [0, 0, 0, 0]],
        [[0, 0, 0, 6], [0, 0, 0, 2], [0, 0, 0, 1], [0, 0, 0, 0]],
        [[0] * 4] * 4,
        [[1, 1, 1, 1]] * 4,
    ],
    ids=["mixed", "all to one", "nothing", "even"],
)
def test_an_uneven_exchange(table):
    sent, most = np.asarray(table).sum(1), int(np.asarray(table).sum(1).max())
    x = np.full((4, most, 2), np.nan, np.float32)  # what lies behind its rows does not matter
    for i in range(4):
        x[i, : sent[i]] = (100 * i + np.arange(sent[i]))[:, None]

    def local(x):
        padded, sizes = mp.alltoall_single(x[0], in_split_sizes=table)
        return padded[None], sizes[None]

    padded, sizes = mp.spmd(local, MESH, [[Shard(0)]], [Shard(0)])(x)
    np.testing.assert_array_equal(sizes, np.transpose(table))
    starts = np.cumsum(table, 1) - table
    for j in range(4):
        rows = [x[i, starts[i, j] : starts[i, j] + table[i][j]] for i in range(4)]
        expected = np.concatenate(rows)
        np.testing.assert_array_equal(padded[j][: len(expected)], expected)
        assert not np.asarray(padded[j][len(expected) :]).any()
