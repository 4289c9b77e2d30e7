"""Placements, layouts and their conversions."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar import Layout, Partial, Placement, ReduceType, Replicate, Shard
from meshpar.placements.blocks import block_of, is_even, local_shape, storage_shape

MESH = mp.ProcessMesh(np.arange(8).reshape(2, 2, 2), ["a", "b", "c"])
SIZES = MESH.axis_sizes


def test_placements_are_values():
    assert Shard(0) == Shard(0) != Shard(1) and hash(Partial("max")) == hash(Partial("max"))
    assert Shard(0).is_shard() and Shard(0).is_shard(0) and not Shard(0).is_shard(1)
    assert Replicate().is_replicated() and Partial().is_partial() and not Partial().is_shard()
    assert Shard(3).get_dim() == 3 and Partial("avg").reduce_type() is ReduceType.kRedAvg
    assert (Shard(1, shard_order=2).get_co_shard_order(), Shard(1).get_split_factor()) == (2, 1)
    for placement in (Shard(-1), Shard(0, shard_order=1), Replicate(), Partial(), Partial("prod")):
        scope = {n: getattr(mp, n) for n in ("Shard", "Replicate", "Partial", "ReduceType")}
        assert eval(repr(placement), scope) == placement
        assert isinstance(placement, Placement)
    assert [int(kind) for kind in ReduceType] == list(range(7))


def test_placements_that_cannot_be():
    with pytest.raises(NotImplementedError, match="split_factor=2"):
        Shard(0, split_factor=2)
    with pytest.raises(TypeError, match=r"such as Shard\(0\)"):
        Shard("0")
    with pytest.raises(ValueError, match="the reductions are 'sum', 'max'"):
        Partial("median")


def every_layout(ndim):
    """Every way of using three axes, all nestings included."""
    for choice in itertools.product(range(-2, ndim), repeat=3):
        cut = [[x for x, d in zip("abc", choice, strict=True) if d == dim] for dim in range(ndim)]
        pending = [(x, ReduceType.kRedMin) for x, d in zip("abc", choice, strict=True) if d == -2]
        for dims in itertools.product(*(itertools.permutations(axes) for axes in cut)):
            yield Layout(tuple(dims), tuple(pending))


@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
def test_placements_and_layouts_are_a_bijection(ndim):
    layouts = list(every_layout(ndim))
    assert len(set(layouts)) == len(layouts)
    placements = [tuple(layout.placements(MESH)) for layout in layouts]
    assert len(set(placements)) == len(placements)
    for layout, listed in zip(layouts, placements, strict=True):
        assert Layout.of(list(listed), MESH, ndim) == layout
        pending = [MESH.axis_index(a) for a in layout.partial_axes]
        kinds = ["min"] * len(pending)
        mapping = layout.dims_mapping(MESH)
        assert Layout.from_dims_mapping(mapping, MESH, pending, kinds) == layout
        if not layout.partial:
            assert Layout.from_spec(layout.partition_spec(), ndim) == layout


def test_conversions_by_example():
    both = Layout.of([Shard(0), Replicate(), Shard(0)], MESH, 2)
    assert both == Layout((("a", "c"), ()))
    assert both.dims_mapping(MESH) == [[0, 2], -1]
    assert both.partition_spec() == P(("a", "c"), None)
    swapped = Layout.of([Shard(0, shard_order=1), Replicate(), Shard(0, shard_order=0)], MESH, 2)
    assert swapped.dims == (("c", "a"), ())
    assert Layout.of([Shard(-1)], MESH, 3) == Layout.of([Shard(2)], MESH, 3)
    assert Layout.of([], MESH, 2) == Layout.replicated(2)
    pending = Layout.of([Partial()], MESH, 1)
    assert pending.partition_spec() == P(None, unreduced={"a"})
    assert all(t == AxisType.Explicit for t in pending.named_sharding(MESH).mesh.axis_types)
    assert both.named_sharding(MESH).mesh == MESH.jax_mesh
    for kinds in (["prod"], ["sum", "max"]):
        with pytest.raises(mp.PlacementError, match="holds one kind of reduction"):
            Layout.of([Partial(kind) for kind in kinds], MESH, 1).partition_spec()
    largest = Layout.of([Partial("max"), Shard(0)], MESH, 1)
    if hasattr(jax.sharding, "UnreducedKind"):
        assert Layout.from_spec(largest.partition_spec(), 1) == largest
    else:
        with pytest.raises(mp.PlacementError, match="maxima and minima too"):
            largest.partition_spec()


@pytest.mark.parametrize(
    ("placements", "ndim", "message"),
    [
        ([Replicate()] * 4, 2, "too many placements(.|\n)*3 axes, and there are 4"),
        ([Shard(2)], 2, r"Shard\(2\) is out of range(.|\n)*Shard takes -2 to 1"),
        ([Shard(-3)], 2, r"Shard\(-3\) is out of range"),
        ([Shard(0)], 0, "a scalar cannot be cut"),
    ],
    ids=str,
)
def test_placements_that_do_not_fit(placements, ndim, message):
    with pytest.raises(mp.PlacementError, match=message):
        Layout.of(placements, MESH, ndim)


@pytest.mark.parametrize("placements", [[Replicate], Shard(0), ["Shard(0)"]], ids=str)
def test_what_is_no_placement(placements):
    with pytest.raises(TypeError, match="placements"):
        Layout.of(placements, MESH, 2)


def test_layouts_that_do_not_fit_a_mesh():
    with pytest.raises(mp.PlacementError, match="no mesh axis 'z'"):
        Layout((("z",),)).placements(MESH)
    with pytest.raises(mp.PlacementError, match="'a' is used twice"):
        Layout((("a",), ("a",))).placements(MESH)


@pytest.mark.parametrize("size", range(12))
def test_blocks_cover_each_row_once_whatever_the_nesting(size):
    for axes in itertools.permutations("abc"):
        layout = Layout((tuple(axes),))
        rows = []
        for at in itertools.product(range(2), repeat=3):
            (block,) = block_of((size,), layout, SIZES, dict(zip(axes, at, strict=True)))
            assert block.stop - block.start <= local_shape((size,), layout, SIZES)[0]
            rows += range(size)[block]
        assert rows == list(range(size))
        assert is_even((size,), layout, SIZES) == (size % 8 == 0)
        assert storage_shape((size,), layout, SIZES) == (-(-size // 8) * 8,)


def test_giving_up_the_innermost_axis_never_moves_rows_between_blocks():
    for size in range(20):
        inner, outer = Layout((("a", "b"),)), Layout((("a",),))
        for a in range(2):
            (whole,) = block_of((size,), outer, SIZES, {"a": a})
            parts = [block_of((size,), inner, SIZES, {"a": a, "b": b})[0] for b in range(2)]
            assert [i for p in parts for i in range(size)[p]] == list(range(size)[whole])


def test_a_jax_array_of_pending_sums_is_read():
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.NamedSharding(mesh, P(None, unreduced={"x"}))
    parts = [
        jax.device_put(np.array(v, np.float32), d)
        for v, d in zip([[1, 2], [10, 20]], mesh.devices, strict=True)
    ]
    pending = jax.make_array_from_single_device_arrays((2,), sharding, parts)
    assert mp.placements_of(pending) == [Partial()]
    whole = mp.reshard(pending, mp.mesh_of(pending), [Replicate()])
    np.testing.assert_array_equal(whole, [11, 22])
