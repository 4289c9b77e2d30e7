"""Which annotation a free value follows, and the conflicts that only the user can settle."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshpar as mp
from meshpar import Replicate, Shard

LINE = mp.ProcessMesh([0, 1], ["x"])
GRID = mp.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
X = np.arange(32, dtype=np.float32).reshape(4, 8)


def two_views(rows, columns, before=lambda x: x):
    """A function that annotates one value by rows and by columns, with these priorities."""

    def fn(x):
        y = before(x)
        return (
            mp.shard_tensor(y, LINE, [Shard(0)], priority=rows) + 1,
            mp.shard_tensor(y, LINE, [Shard(1)], priority=columns) * 2,
        )

    return fn


def placements_of_x(fn):
    plan = mp.jit(fn, mesh=LINE).plan(jax.ShapeDtypeStruct(X.shape, X.dtype))
    return json.loads(plan.to_json())["inputs"]["x"]


@pytest.mark.parametrize("before", [lambda x: x, jnp.sin, lambda x: (x.T * 2).T])
@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (0, 1, Shard(0)),
        (1, 0, Shard(1)),
        (-3, 7, Shard(0)),
        (5, None, Shard(0)),  # a number comes before none
        (None, 5, Shard(1)),
    ],
)
def test_a_free_argument_follows_the_lowest_number(before, rows, columns, expected):
    fn = two_views(rows, columns, before)
    assert placements_of_x(fn) == str([expected])
    # Either way the values are those of one device, and lie as each annotation says.
    first, second = mp.jit(fn, mesh=LINE)(X)
    assert (mp.placements_of(first), mp.placements_of(second)) == ([Shard(0)], [Shard(1)])
    np.testing.assert_allclose(np.asarray(first), before(X) + 1, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(second), before(X) * 2, rtol=1e-6)


def test_two_annotations_without_priority_both_hold():
    first, second = mp.jit(two_views(None, None), mesh=LINE)(X)
    np.testing.assert_array_equal(np.asarray(first), X + 1)
    np.testing.assert_array_equal(np.asarray(second), X * 2)


def test_equal_priorities_that_agree():
    fn = two_views(1, 1)

    def same(x):
        y = mp.shard_tensor(x, LINE, [Shard(0)], priority=1)
        return y, mp.shard_tensor(x, LINE, [Shard(0)], priority=1)

    assert placements_of_x(same) == "[Shard(0)]"
    with pytest.raises(mp.PlacementError):
        placements_of_x(fn)


def test_equal_priorities_that_contradict_name_both_lines():
    fn = two_views(1, 1)
    line = fn.__code__.co_firstlineno
    with pytest.raises(mp.PlacementError) as raised:
        mp.jit(fn, mesh=LINE)(X)
    assert re.search(
        rf"(?s)mp.jit\(fn\): two annotations of one value have priority=1.*float32\[4,8\].*"
        rf"\[Shard\(0\)\] at test_priorities.py:{line + 3}.*"
        rf"\[Shard\(1\)\] at test_priorities.py:{line + 4}.*priority=2",
        str(raised.value),
    )


def test_gradients_and_xla_pass_priorities_through():
    def total(x):
        rows, columns = two_views(0, 1, jnp.sin)(x)
        return (rows * columns).sum()

    expected = jax.grad(lambda x: ((jnp.sin(x) + 1) * (jnp.sin(x) * 2)).sum())(X)
    for partitioner in ("meshpar", "xla"):
        got = mp.jit(jax.grad(total), mesh=LINE, partitioner=partitioner)(X)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5)


def test_a_priority_has_no_meaning_for_arrays_and_is_an_integer():
    with pytest.raises(mp.PlacementError, match=r"(?s)shard_tensor\(data\): priority=0 orders"):
        mp.shard_tensor(X, LINE, [Shard(0)], priority=0)
    for wrong in (True, 1.5, "first"):
        with pytest.raises(TypeError, match="an integer, or None"):
            mp.jit(lambda x, p=wrong: mp.shard_tensor(x, LINE, [], priority=p), mesh=LINE)(X)


def test_in_placements_and_an_annotation_of_the_argument_are_a_reshard():
    f = mp.jit(lambda x: mp.shard_tensor(x, LINE, [Shard(1)], priority=0), [[Shard(0)]], mesh=LINE)
    plan = f.plan(X)
    assert json.loads(plan.to_json())["inputs"]["x"] == "[Shard(0)]"  # what is asked is not open
    assert plan.counts() == {"all_to_all": 1}
    y = f(X)
    assert mp.placements_of(y) == [Shard(1)]
    np.testing.assert_array_equal(np.asarray(y), X)


def test_one_axis_cannot_cut_two_dims():
    # A list of placements has one per axis, so only a PartitionSpec could say it; JAX refuses it.
    with pytest.raises(mp.PlacementError, match="3 placements"):
        mp.jit(lambda x: mp.shard_tensor(x, GRID, [Shard(0), Shard(1), Replicate()]))(
            mp.shard_tensor(X, GRID, [])
        )


def test_two_meshes_in_one_program_name_the_line():
    def fn(x):
        y = x + 1
        return mp.shard_tensor(y, LINE, [Shard(0)])

    line = fn.__code__.co_firstlineno + 2
    with pytest.raises(NotImplementedError, match=rf"over the mesh.*test_priorities.py:{line}"):
        mp.jit(fn)(mp.shard_tensor(X, GRID, [Shard(0)]))

    def constrained(x):
        sharding = NamedSharding(LINE.jax_mesh, PartitionSpec("x"))
        return jax.lax.with_sharding_constraint(x, sharding)

    line = constrained.__code__.co_firstlineno + 2
    with pytest.raises(NotImplementedError, match=rf"over the mesh.*test_priorities.py:{line}"):
        mp.jit(constrained)(mp.shard_tensor(X, GRID, [Shard(0)]))
