"""Programs that went wrong once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp
from meshpar import Partial, Replicate, Shard
from tests.compiler.fuzz import lowered, planned

SQUARE = mp.ProcessMesh([[0, 1], [2, 3]], ["a", "b"])
LINE = mp.ProcessMesh([0, 1], ["x"])


def test_a_slice_beyond_its_dim_that_is_cut_afterwards():
    x = np.arange(45, dtype=np.int32).reshape(9, 5)
    f = mp.jit(
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1), out_placements=[Shard(1)], mesh=SQUARE
    )
    for begin in (-3, 1, 200):
        np.testing.assert_array_equal(f(x, np.int32(begin)), np.asarray(
            lax.dynamic_slice_in_dim(x, begin, 2, 1)))  # fmt: skip


def test_an_output_that_is_reduced_before_its_transpose():
    x = np.arange(24, dtype=np.float32).reshape(6, 4) / 8
    w = np.arange(20, dtype=np.float32).reshape(4, 5) / 16 - 0.5

    def gradients(x, w):
        return jax.grad(lambda x, w: jnp.tanh(x @ w).sum(), (0, 1))(x, w)

    rows = mp.shard_tensor(x, SQUARE, [Shard(0)])
    columns = mp.shard_tensor(w, SQUARE, [Replicate(), Shard(1)])
    for got, expected in zip(mp.jit(gradients)(rows, columns), gradients(x, w), strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5)


def test_an_argument_that_is_gathered_forward_and_reduced_is_there_backward():
    cube = mp.ProcessMesh(np.arange(8).reshape(2, 2, 2), list("abc"))
    placements = [Replicate(), Partial("avg"), Shard(0)]
    v = mp.shard_tensor(np.arange(5, dtype=np.float32), cube, placements)

    def both(v):
        first, column = jnp.min(v, axis=(0,)), 1.5 - v.reshape(5, 1)
        return first, column, jax.grad(lambda a: (jnp.sort(a, 0) * v).sum())(v)

    out = (None, [Shard(1), Shard(0), Shard(0)], [Replicate(), Replicate(), Shard(0)])
    got, expected = mp.jit(both, out_placements=out)(v), both(jnp.arange(5.0))
    for lhs, rhs in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(lhs), rhs)


def test_collectives_for_results_that_nobody_takes_are_not_planned():
    x = mp.shard_tensor(np.arange(2, dtype=np.float32), LINE, [Shard(0)])
    f = mp.jit(jax.grad(lambda x, y: jnp.square(jnp.concatenate([x, y])).sum()))
    plan, sent = f.plan(x, x), lowered(f.lower(x, x).as_text(), LINE)
    assert [op.name for op in plan.operations].count("split") == 1  # of its two parts one is taken
    assert sent
    assert planned(plan) == sent


@pytest.mark.parametrize("shape", [(0, 12), (3, 0)], ids=str)
@pytest.mark.parametrize(
    "out", [[Shard(0)], [Replicate(), Shard(1)], [Partial(), Shard(0)]], ids=str
)
def test_a_result_without_elements_lies_as_asked(shape, out):
    x = mp.shard_tensor(np.zeros(shape, np.float32), SQUARE, [Shard(1)])
    y = mp.jit(lambda x: x * 2, out_placements=out)(x)
    assert y.shape == shape
    assert mp.placements_of(y) == [*out, Replicate()][:2]
    assert mp.local_value(y, 3).size == 0


@pytest.mark.parametrize("how", ["set", "add", "multiply", "min", "max", "subtract"])
@pytest.mark.parametrize("row", [2, -1, 8, 99], ids=str)
def test_a_single_row_is_written_where_it_is_after_a_pad(how, row):
    line = mp.ProcessMesh(np.arange(8), ["x"])
    x = np.arange(25, dtype=np.float32).reshape(5, 5) - 7

    def write(x, row):
        padded = lax.pad(x, jnp.asarray(0, x.dtype), [(-1, 1, 1), (0, 0, 0)])
        return getattr(padded.at[row], how)(3)

    placed = mp.shard_tensor(x, line, [Shard(0)])
    f = mp.jit(write, out_placements=[Shard(0)], static_argnums=1)
    np.testing.assert_array_equal(np.asarray(f(placed, row)), write(x, row))
    traced = mp.jit(write, out_placements=[Shard(0)])
    np.testing.assert_array_equal(np.asarray(traced(placed, np.int32(row))), write(x, row))


def test_an_index_out_of_range_along_a_whole_dim_drops_the_write():
    line = mp.ProcessMesh(np.arange(8), ["x"])
    x = np.ones((9, 4), np.float32)
    placed = mp.shard_tensor(x, line, [Shard(0)])
    f = mp.jit(lambda x, i, j: x.at[i, j].set(0, mode="drop"), out_placements=[Shard(0)])
    for i, j in [(3, 2), (3, 7), (30, 2), (8, 3)]:
        expected = jnp.asarray(x).at[i, j].set(0, mode="drop")
        np.testing.assert_array_equal(np.asarray(f(placed, np.int32(i), np.int32(j))), expected)


def doubled(x, n, size=8):
    return lax.dynamic_slice_in_dim(x, n, size, 0) * 2


SINGLE = {  # blocks of one element, which XLA's simplifier takes from what was there before `* 2`
    "slice of a slice": lambda x, n: lax.dynamic_slice_in_dim(doubled(x, n, 12), n + 1, 8, 0),
    "update": lambda x, n: lax.dynamic_update_slice_in_dim(x[:8], doubled(x, n, 5), n, 0),
    "gather": lambda x, n: jnp.take(doubled(x, n), np.array([3, 1, 2, 0, 7, 6, 5, 4])),
    "slice": doubled,
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_blocks_of_one_integer(name, shape):
    mesh = mp.ProcessMesh(np.arange(8).reshape(shape), ["x", "y"][: len(shape)])
    x = np.arange(1, 17, dtype=np.int32)
    f = mp.jit(SINGLE[name], out_placements=[Shard(0)] * len(shape), mesh=mesh)
    for n in (0, 1, 5, 12):
        with jax.disable_jit():
            expected = SINGLE[name](jnp.asarray(x), jnp.int32(n))
        got = f(mp.shard_tensor(x, mesh, []), mp.shard_tensor(np.int32(n), mesh, []))
        np.testing.assert_array_equal(np.asarray(got), expected)


def test_what_integers_do_not_let_through_while_pending():
    mesh = mp.ProcessMesh([0, 1], ["x"])
    x = np.array([[1, 3, 5], [4, 4, 4], [1, 0, 2], [1, 2, 3]], np.int32)
    rows = mp.shard_tensor(x, mesh, [Shard(0)])
    halved = mp.jit(lambda x: lax.div(x.sum(0), jnp.int32(2)))
    np.testing.assert_array_equal(np.asarray(halved(rows)), x.sum(0) // 2)
    least = mp.reshard(mp.shard_tensor(x, mesh, [Replicate()]), mesh, [Partial("max")])
    lower = mp.jit(lambda x: (x - 4).min(0), out_placements=[Replicate()])
    np.testing.assert_array_equal(np.asarray(lower(least)), (x - 4).min(0))


def test_an_index_beyond_a_promise_is_clipped_wherever_rows_lie():
    line = mp.ProcessMesh(np.arange(4), ["x"])
    x, index = np.arange(1, 9, dtype=np.int32), np.array([0, 40, -40], np.int32)
    for there in (Shard(0), Replicate()):
        got = mp.jit(lambda x, i: x[i])(mp.shard_tensor(x, line, [there]), index)
        np.testing.assert_array_equal(np.asarray(got), jnp.asarray(x)[index])


def test_references_are_refused_by_name():
    def count(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        return ref[...]

    x = mp.shard_tensor(np.ones(8, np.float32), mp.ProcessMesh([0, 1], ["x"]), [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"new_ref inside mp\.jit, at test_regressions"):
        mp.jit(count)(x)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_rows_are_added_where_narrow_indices_say(dtype):
    """300 rows, which 8 bits do not count. XLA's older emitters are wrong on one device."""
    line = mp.ProcessMesh(np.arange(4), ["x"])
    index = np.array([[5], [100], [253], [199]], np.uint8).astype(dtype)
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    x = mp.shard_tensor(np.zeros((300, 2), np.float32), line, [Shard(0)])

    def add(x, i):
        return lax.scatter_add(x, i, jnp.ones((4, 2)), numbers, mode="drop")

    expected = np.zeros((300, 2), np.float32)
    np.add.at(expected, [i for i in index[:, 0].tolist() if i >= 0], 1)
    got = mp.jit(add, out_placements=[Shard(0)])(x, index)
    np.testing.assert_array_equal(np.asarray(got), expected)
