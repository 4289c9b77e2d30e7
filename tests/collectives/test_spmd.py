"""Regions: what goes in and out, what they compose with, what they send."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshpar as mp
from meshpar import Partial, Replicate, Shard
from meshpar.compiler.hlo import axes_of, collectives_in_stablehlo
from tests.collectives.regions import MESH_2X4, MESHES

X = np.arange(16, dtype=np.float32)
BOTH = [Shard(0), Shard(0)]
DP, TP = MESH_2X4.group("dp"), MESH_2X4.group("tp")


def test_blocks_go_in_and_come_out_in_place():
    shapes = []

    def local(tree, y):
        shapes.append((tree["a"].shape, tree["b"].shape, y.shape))
        return {"a": tree["a"] + mp.get_rank(), "y": y}, tree["b"]

    turned = [Shard(1), Shard(0)]
    placements = {"a": turned, "b": [Shard(-1)]}
    run = mp.spmd(local, MESH_2X4, [placements, BOTH], ({"a": turned, "y": BOTH}, [Shard(0)]))
    a, b, y = np.zeros((16, 4), np.float32), X[:8], np.arange(48.0, dtype=np.float32).reshape(16, 3)
    out, out_b = run({"a": a, "b": b}, y)
    assert set(shapes) == {((4, 2), (4,), (2, 3))}
    ranks = np.repeat(np.asarray([[0, 4], [1, 5], [2, 6], [3, 7]]), 4, 0).repeat(2, 1)
    np.testing.assert_array_equal(out["a"], ranks)
    np.testing.assert_array_equal(out["y"], y)
    np.testing.assert_array_equal(out_b, b)
    assert mp.placements_of(out["a"]) == turned and mp.placements_of(out["y"]) == BOTH


def test_one_list_stands_for_all_leaves():
    run = mp.spmd(
        lambda tree: jax.tree.map(lambda x: mp.all_reduce(x, group=TP), tree),
        MESH_2X4,
        [BOTH],
        [Shard(0)],
    )
    out = run({"a": X, "b": [X.astype(np.int32)]})
    expected = X.reshape(2, 4, 2).sum(1).ravel()
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, expected), out)


def test_the_decorator_and_the_default_mesh():
    @mp.spmd(in_placements=[[Shard(0)]], out_placements=[Replicate()])
    def total(x):
        """Adds up."""
        return mp.all_reduce(x.sum())

    with MESHES[4]:
        assert float(total(X)) == X.sum()
    assert total.__name__ == "total" and total.__doc__ == "Adds up."
    with pytest.raises(mp.MeshError, match=r"mp.spmd\(total\): no mesh is known"):
        total(X)
    placed = mp.shard_tensor(X, MESHES[2], [Shard(0)])
    assert float(total(placed)) == X.sum()


def test_arguments_go_in_as_they_lie():
    placed = mp.shard_tensor(X, MESH_2X4, [Replicate(), Shard(0)])
    out = mp.spmd(
        lambda x, y: (x * y.shape[0], x.shape[0] * y),
        MESH_2X4,
        None,
        ([Replicate(), Shard(0)], None),
    )(placed, X)
    np.testing.assert_array_equal(out[0], X * 16)
    np.testing.assert_array_equal(out[1], X * 4)
    moved = mp.spmd(lambda x: x, MESH_2X4, [BOTH], BOTH)(placed)
    assert mp.placements_of(moved) == BOTH
    np.testing.assert_array_equal(moved, X)


@pytest.mark.parametrize("kind", ["sum", "max", "avg"])
def test_contributions_go_in_and_out(kind):
    placements = [Partial(kind), Shard(0)]
    pending = mp.dtensor_from_local([X[:3] * (r + 1) for r in range(8)], MESH_2X4, placements)
    run = mp.spmd(lambda x: 2 * x, MESH_2X4, [placements], placements)
    out = run(pending)
    assert out.placements == placements and out.shape == (12,)
    for rank in range(8):
        np.testing.assert_array_equal(mp.local_value(out, rank), 2 * X[:3] * (rank + 1))
    plain = np.asarray(pending)
    np.testing.assert_allclose(np.asarray(run(plain)), 2 * plain)  # a plain value is made partial
    np.testing.assert_allclose(jax.jit(run)(plain), 2 * plain)  # in traced code it is reduced
    if kind == "sum":
        np.testing.assert_array_equal(jax.grad(lambda x: run(x).sum())(plain), np.full(12, 2))


def test_dims_that_do_not_divide_are_refused_with_the_numbers():
    run = mp.spmd(lambda x, y: y, MESH_2X4, [[Replicate()], BOTH], BOTH)
    with pytest.raises(mp.CollectiveError) as error:
        run(X, {"ids": X[:15]})
    text = str(error.value)
    assert text.startswith("mp.spmd(<lambda>): dim 0 of argument 1/ids cannot be cut equally")
    assert "15 rows / 8 ranks of 'dp', 'tp' leaves 7" in text and "pad the dim to 16" in text


def test_a_result_that_differs_is_not_replicated():
    run = mp.spmd(lambda x: {"loss": x.sum()}, MESH_2X4, [[Shard(0)]], [Replicate()])
    with pytest.raises(mp.CollectiveError, match=r"result/loss may differ .* along 'dp'") as error:
        run(X)
    assert "mp.all_reduce(x, group=mesh.group('dp'))" in str(error.value)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"in_placements": [[Shard(0)]]}, "2 argument(s), and 1 entries in in_placements"),
        ({"in_placements": [[Shard(1)], None]}, "Shard(1) is out of range"),
        ({"in_placements": [Shard(0), None]}, "in_placements has Shard(0) where a list"),
        ({"axes": "pp"}, "'pp' is not an axis of the mesh"),
        ({"in_placements": [BOTH, None], "axes": ["tp"]}, "names the axis 'dp', which is not"),
        ({"out_placements": [Partial("any")]}, "any takes booleans only"),
        ({"out_placements": BOTH, "axes": ["tp"]}, "names the axis 'dp', which the region does"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_placements_that_do_not_fit(placements, message):
    with pytest.raises(mp.MeshparError) as error:
        mp.spmd(lambda x, y: x, MESH_2X4, **placements)(X, X)
    assert message in str(error.value), str(error.value)
    assert str(error.value).startswith("mp.spmd(<lambda>)")


def test_what_is_no_array_is_closed_over():
    with pytest.raises(mp.CollectiveError, match=r"(?s)holds 'mean'.*functools.partial"):
        mp.spmd(lambda x, how: x, MESH_2X4)(X, "mean")
    run = mp.spmd(functools.partial(lambda x, how: getattr(x, how)(), how="mean"), MESH_2X4)
    assert float(run(X)) == X.mean()


# --- composition ----------------------------------------------------------------------------------


def summed(x, w):
    return mp.all_reduce((x * w).sum())


SUMMED = mp.spmd(summed, MESH_2X4, [BOTH, None], [Replicate()])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: mp.jit(f, mesh=MESH_2X4)])
def test_regions_are_parts_of_programs(transform):
    fn = transform(lambda x, w: SUMMED(x, w) * 2)
    assert float(fn(X, np.float32(3))) == 6 * X.sum()


@pytest.mark.parametrize("transform", [jax.jit, lambda f: mp.jit(f, mesh=MESH_2X4)])
def test_arrays_that_a_program_closes_over_go_in(transform):
    placed = mp.shard_tensor(X, MESH_2X4, [Shard(0)])
    pending = mp.shard_tensor(X, MESH_2X4, [Partial(), Replicate()])
    add = mp.spmd(
        lambda x, w: x * w, MESH_2X4, [[Partial(), Shard(0)], None], [Partial(), Shard(0)]
    )
    fn = transform(lambda w: (SUMMED(X, w), SUMMED(placed, w), add(pending, w), add(X, w)))
    got = fn(np.float32(2))
    jax.tree.map(np.testing.assert_array_equal, list(got), [240, 240, 2 * X, 2 * X])


def test_the_plan_shows_the_collectives_of_a_region_and_their_line():
    plan = mp.jit(lambda x, w: SUMMED(x, w) * 2, mesh=MESH_2X4).plan(X, np.float32(3))
    assert plan.counts() == {"all_reduce": 1}
    assert "test_spmd.py" in str(plan)


def test_regions_differentiate_and_batch():
    gradient = jax.grad(SUMMED, argnums=(0, 1))(X, np.float32(3))
    np.testing.assert_array_equal(gradient[0], np.full(16, 3))
    assert float(gradient[1]) == X.sum()
    np.testing.assert_array_equal(
        jax.vmap(SUMMED, (0, None))(np.stack([X, 2 * X]), 3.0), [360, 720]
    )


def test_loops_hold_collectives():
    def fn(x):
        def body(carry, row):
            return carry + mp.all_reduce(row.sum()), mp.broadcast(row, 0)

        return jax.lax.scan(body, jnp.float32(0), x.reshape(2, 1))

    total, rows = mp.spmd(fn, MESH_2X4, [BOTH])(X)
    assert float(total) == X.sum()
    np.testing.assert_array_equal(rows, [[0], [1]])


def test_a_region_over_one_axis_inside_one_over_another():
    ranks = []

    def outer(x):
        ranks.append((mp.get_world_size(), mp.get_group().ranks))

        def inner(x, y):
            ranks.append((mp.get_world_size(), mp.get_world_size(TP)))
            return mp.all_reduce(x.sum(), group=TP), mp.get_rank()[None], mp.all_reduce(y)

        out = ([], [Replicate(), Shard(0)], [])
        part, rank, eight = mp.spmd(inner, None, [[Replicate(), Shard(0)], None], out)(
            x, jnp.ones(())
        )
        return part[None], mp.all_reduce(part, group=DP), rank, eight

    placements = ([Shard(0)], [Replicate()], [Shard(0)], [Replicate()])
    parts, total, rank, eight = mp.spmd(outer, MESH_2X4, [[Shard(0)]], placements, axes="dp")(X)
    np.testing.assert_array_equal(parts, X.reshape(2, 8).sum(1))
    assert float(total) == X.sum() and float(eight) == 8
    np.testing.assert_array_equal(rank, range(8))
    assert set(ranks) == {(2, (0, 4)), (8, 4)}


def test_a_region_may_leave_axes_to_xla():
    def fn(x):
        own = mp.all_reduce(x, group=mp.new_group([0, 4]))
        return own, mp.get_rank()[None], mp.broadcast(x, src=4)

    placements = ([Shard(0)], [Shard(0)], [Replicate()])
    placed = mp.shard_tensor(X, MESH_2X4, [Replicate(), Shard(0)])
    for x in (X, placed):
        total, rank, sent = mp.spmd(fn, MESH_2X4, [[Shard(0)]], placements, axes=["dp"])(x)
        np.testing.assert_array_equal(total, np.tile(X[:8] + X[8:], 2))
        np.testing.assert_array_equal(rank, [0, 4])
        np.testing.assert_array_equal(sent, X[8:])


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ({}, {}, "the region outside covers every axis already"),
        ({"axes": "dp"}, {"axes": "dp"}, "the region outside covers 'dp' already"),
        ({"axes": "dp"}, {"mesh": MESHES[4]}, "runs over the same mesh"),
    ],
    ids=["all", "same axis", "another mesh"],
)
def test_regions_that_do_not_nest(outer, inner, message):
    def fn(x):
        return mp.spmd(lambda y: y, **inner)(x)

    with pytest.raises(mp.CollectiveError, match=message):
        mp.spmd(fn, MESH_2X4, [[Shard(0)]], [Shard(0)], **outer)(X)


@pytest.mark.parametrize("where", ["in_placements", "out_placements"])
def test_contributions_do_not_cross_inner_regions(where):
    pending = [Replicate(), Partial()]
    how = {"in_placements": [pending]} if where == "in_placements" else {where: pending}

    def fn(x):
        return mp.spmd(lambda y: y, **how)(x)

    with pytest.raises(NotImplementedError, match=f"{where} of .* inside another region"):
        mp.spmd(fn, MESH_2X4, [[Shard(0)]], [Shard(0)], axes="dp")(X)


def test_collectives_in_a_shard_map_of_the_user_s_own():
    mesh = mp.ProcessMesh(MESH_2X4.mesh, ["rows", "columns"])
    run = jax.shard_map(
        lambda x: (
            mp.all_reduce(x),
            mp.all_reduce(x, group=mesh.group("columns")),
            mp.get_rank()[None],
        ),
        mesh=mesh.jax_mesh,
        in_specs=PartitionSpec(("rows", "columns")),
        out_specs=(PartitionSpec(), PartitionSpec("rows"), PartitionSpec(("rows", "columns"))),
    )
    everything, rows, rank = run(X)
    np.testing.assert_array_equal(everything, X.reshape(8, 2).sum(0))
    np.testing.assert_array_equal(rows, X.reshape(2, 4, 2).sum(1).ravel())
    np.testing.assert_array_equal(rank, range(8))


def test_outside_mp_spmd_equal_axes_of_other_ranks_are_an_error():
    """JAX tells the names of the axes only, so that ranks would be those of the wrong mesh."""
    meshes = [mp.ProcessMesh(ranks, ["twin"]) for ranks in ([0, 1], [1, 0])]
    x = np.arange(2, dtype=np.float32)
    for mesh in meshes:  # inside mp.spmd the mesh is known
        out = mp.spmd(lambda x: mp.broadcast(x, src=1), mesh, [[Shard(0)]], [Replicate()])(x)
        assert out.tolist() == [mesh.process_ids.index(1)]

    def bare(fn):
        spec = PartitionSpec("twin")
        return jax.shard_map(fn, mesh=meshes[0].jax_mesh, in_specs=spec, out_specs=spec)(x)

    with pytest.raises(mp.CollectiveError, match=r"(?s)which mesh .*\[0, 1\].*mp\.spmd"):
        bare(lambda x: mp.broadcast(x, src=1) + 0 * x)


def test_a_program_is_compiled_once_per_kind_of_argument():
    traced = []

    @mp.spmd(mesh=MESH_2X4, in_placements=[BOTH], out_placements=BOTH)
    def fn(x):
        traced.append(x.shape)
        return 2 * x

    for x in (X, X + 1, jnp.asarray(X)):
        fn(x)
    once = len(traced)
    fn(np.ones((8, 2), np.float32))
    assert traced[:once] == [(2,)] * once and len(traced) == 2 * once
    jax.grad(lambda x: fn(x).sum())(X)
    grown = len(traced)
    jax.grad(lambda x: fn(x).sum())(X)
    assert len(traced) == grown


# --- what is sent ---------------------------------------------------------------------------------


def sent(fn, x):
    """(Kind, axes) -> how many collectives a region holds, in its lowered program."""
    text = mp.spmd(fn, MESH_2X4, [BOTH], BOTH).lower(x).as_text()
    found = collectives_in_stablehlo(text)
    return Counter(
        (kind, axes_of(kind, one, MESH_2X4)) for kind, several in found.items() for one in several
    )


ALL, ROW = ("dp", "tp"), ("tp",)


@pytest.mark.parametrize(
    ("fn", "kind", "axes"),
    [
        (lambda x: mp.all_reduce(x), "all_reduce", ALL),
        (lambda x: mp.all_reduce(x, group=TP), "all_reduce", ROW),
        (lambda x: mp.all_reduce(x, mp.ReduceOp.MAX, TP), "all_reduce", ROW),
        (lambda x: mp.all_reduce(x, mp.ReduceOp.AVG), "all_reduce", ALL),
        (lambda x: mp.all_reduce(x, mp.ReduceOp.PROD), "all_gather", ALL),
        (lambda x: mp.reduce(x, 3, group=DP), "all_reduce", ("dp",)),
        (lambda x: mp.broadcast(x, 3), "all_reduce", ALL),
        (lambda x: jnp.stack(mp.all_gather(x)), "all_gather", ALL),
        (lambda x: jnp.stack(mp.gather(x, group=TP)), "all_gather", ROW),
        (lambda x: mp.scatter(None, [x] * 8), "all_to_all", ALL),
        (lambda x: mp.reduce_scatter([x] * 8), "reduce_scatter", ALL),
        (lambda x: mp.reduce_scatter([x] * 8, op=mp.ReduceOp.MIN), "all_to_all", ALL),
        (lambda x: jnp.stack(mp.alltoall([x] * 4, group=TP)), "all_to_all", ROW),
        # A group of ranks runs along the axes that it extends along.
        (lambda x: mp.all_reduce(x, group=mp.new_group([5, 6])), "all_reduce", ROW),
        (lambda x: mp.all_reduce(x, group=mp.new_group([0, 5])), "all_reduce", ALL),
        (lambda x: mp.all_reduce(x, group=mp.new_group([5])), None, ()),
    ],
)
def test_one_call_is_one_collective_along_its_axes(fn, kind, axes):
    expected = {} if kind is None else {(kind, axes): 1}
    assert sent(lambda x: fn(x).reshape(-1)[:2], X) == expected
