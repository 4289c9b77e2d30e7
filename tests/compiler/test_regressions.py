"""Programs that went wrong once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    placed = mp.shard_tensor(x, LINE, [Shard(0)])
    y = mp.jit(lambda x: (x.T @ x).T)(placed)
    np.testing.assert_allclose(np.asarray(y), (x.T @ x).T)


def test_an_argument_that_is_gathered_forward_and_reduced_is_there_backward():
    v = mp.shard_tensor(
        np.arange(5, dtype=np.float32), mp.ProcessMesh(np.arange(8).reshape(2, 2, 2), list("abc")),
        [Replicate(), Partial("avg"), Shard(0)],
    )  # fmt: skip

    def both(v):
        return jnp.min(v), jax.grad(lambda a: (jnp.sort(a) * v).sum())(v)

    got, expected = mp.jit(both)(v), both(jnp.arange(5.0))
    for lhs, rhs in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(lhs), rhs)


def test_collectives_for_results_that_nobody_takes_are_not_planned():
    x = mp.shard_tensor(np.arange(24, dtype=np.float32).reshape(3, 8), LINE, [Shard(1)])
    f = mp.jit(lambda x: lax.top_k(x, 2)[0])
    assert planned(f.plan(x)) == lowered(f.lower(x).as_text(), LINE)
