"""`reshard_steps`: values and bytes by a second interpreter, least bytes by a second search."""

from __future__ import annotations

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.errors import PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps, reshard_steps
from meshpar.placements.steps import Step
from meshpar.placements.types import Partial, ReduceType, Replicate, Shard
from tests.placements import step_interpreter as interpreter
from tests.placements.all_layouts import MAX, SUM, all_layouts
from tests.placements.independent_search import Graph

R, S, P = Replicate(), Shard, Partial
MESH = ProcessMesh(np.arange(8).reshape(2, 4), ["x", "y"])
ORDERED = {SUM, MAX, ReduceType.kRedMin, ReduceType.kRedProd, ReduceType.kRedAvg}


def sizes_of(*counts):
    return dict(zip("xyz", counts, strict=False))


def run_pairs(sizes, shape, pairs, dtype="float32"):
    """Runs the steps of each pair by the interpreter; checks chain, bytes and value."""
    rng = np.random.default_rng(zlib.crc32(repr((sizes, shape)).encode()))
    if dtype == "bool":
        value = rng.random(shape) < 0.5
    else:
        value = rng.integers(1, 50, shape).astype(np.float64)
    states = {}
    for src, dst in pairs:
        if src not in states:
            states[src] = interpreter.scatter(value, src, sizes, rng)
            interpreter.check(states[src], value, src, sizes)
        state, steps = states[src], planned_steps(src, dst, shape, dtype, sizes)
        for before, after in itertools.pairwise(steps):
            assert before.dst == after.src
        for step in steps:
            state = interpreter.run(state, step, shape, sizes)
            itemsize = np.dtype(dtype).itemsize
            assert step.bytes == interpreter.sent_bytes(step, shape, itemsize, sizes), step
        interpreter.check(state, value, dst, sizes)
    return len(pairs)


def every_pair(sizes, ndim, kinds=(SUM, MAX)):
    layouts = all_layouts(list(sizes), ndim, kinds)
    return list(itertools.product(layouts, repeat=2))


def some_pairs(sizes, ndim, kinds, count, seed=0):
    pairs = every_pair(sizes, ndim, kinds)
    chosen = np.random.default_rng(seed).choice(len(pairs), min(count, len(pairs)), replace=False)
    return [pairs[i] for i in chosen]


# --- values and bytes -----------------------------------------------------------------------------

SMALL = [
    ((4,), ()), ((4,), (8,)), ((4,), (5,)), ((4,), (1,)), ((3,), (0,)),
    ((4,), (8, 4)), ((4,), (7, 3)), ((4,), (3, 0)), ((3,), (6, 3, 9)), ((3,), (5, 1, 2)),
    ((2, 4), ()), ((2, 4), (16,)), ((2, 4), (9,)), ((2, 4), (8, 16)), ((2, 4), (7, 9)),
    ((2, 2), (1, 3)), ((1, 2), (4, 3)), ((2, 3), (0, 5)), ((2, 2), (4, 8)),
    ((2, 2, 2), ()),
]  # fmt: skip
LARGE = [
    ((2, 2, 2), (8,)), ((2, 3, 2), (7,)),
    ((2, 3), (7, 9, 5)), ((2, 2), (4, 8, 4)),
    ((2, 2, 2), (8, 8)), ((2, 2, 2), (5, 3)), ((2, 3, 2), (7, 5)), ((2, 3, 2), (12, 24)),
    ((2, 2, 2), (8, 8, 8)), ((2, 3, 2), (7, 9, 5)),
]  # fmt: skip


@pytest.mark.parametrize("counts, shape", SMALL)
def test_every_pair(counts, shape):
    sizes = sizes_of(*counts)
    run_pairs(sizes, shape, every_pair(sizes, len(shape)))


@pytest.mark.parametrize("counts, shape", LARGE)
def test_some_pairs_of_larger_graphs(counts, shape):
    sizes = sizes_of(*counts)
    run_pairs(sizes, shape, some_pairs(sizes, len(shape), (SUM, MAX), 300))


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("counts, shape", LARGE)
def test_every_pair_of_larger_graphs(counts, shape):
    sizes = sizes_of(*counts)
    run_pairs(sizes, shape, every_pair(sizes, len(shape)))


@pytest.mark.parametrize("counts, shape", [((2, 3), (7, 4)), ((2, 2, 2), (8, 3))])
def test_every_kind_of_numbers_mixed(counts, shape):
    sizes = sizes_of(*counts)
    run_pairs(sizes, shape, some_pairs(sizes, len(shape), tuple(ORDERED), 400))


@pytest.mark.parametrize("counts, shape", [((4,), (5,)), ((2, 3), (7, 4)), ((2, 2, 2), (8, 3))])
def test_every_kind_of_booleans_mixed(counts, shape):
    sizes, kinds = sizes_of(*counts), (ReduceType.kRedAny, ReduceType.kRedAll)
    run_pairs(sizes, shape, some_pairs(sizes, len(shape), kinds, 400), "bool")


# --- least bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts, shape, kinds",
    [
        ((4,), (8, 3), (SUM, MAX, ReduceType.kRedProd)),
        ((2, 4), (8, 16), (SUM, MAX)),
        ((2, 4), (7, 9), (SUM, MAX)),
        ((3, 3), (5, 9), (SUM, ReduceType.kRedAvg, ReduceType.kRedProd)),
        ((2, 3), (7, 9, 5), (SUM,)),
        ((2, 2, 2), (8,), (SUM, MAX)),
        ((2, 3, 2), (11,), (SUM, MAX)),
        ((2, 3, 2), (7, 5), ()),
    ],
)
def test_no_plan_is_cheaper(counts, shape, kinds):
    sizes = sizes_of(*counts)
    graph = Graph(all_layouts(list(sizes), len(shape), kinds), shape, 4, sizes)
    for src, dst in itertools.product(graph.layouts, repeat=2):
        steps = planned_steps(src, dst, shape, "float32", sizes)
        cost = sum(step.bytes for step in steps), sum(step.is_collective for step in steps)
        assert cost == graph.cheapest(src, dst), (src, dst, steps)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "counts, shape, kinds",
    [
        ((2, 2, 2), (8, 8), (SUM, MAX)),
        ((2, 3, 2), (7, 5), (SUM, MAX)),
        ((3, 2, 2), (1, 7), ()),
        ((2, 3, 2), (8, 6), ()),
    ],
)
def test_no_plan_is_cheaper_on_three_axes(counts, shape, kinds):
    test_no_plan_is_cheaper(counts, shape, kinds)


# --- plans by name --------------------------------------------------------------------------------

C14 = ProcessMesh(np.arange(8).reshape(4, 2), ["x", "y"])
SQUARE = ProcessMesh(np.arange(4).reshape(2, 2), ["x", "y"])


@pytest.mark.parametrize(
    "mesh, src, dst, shape, plan",
    [
        (MESH, [S(1), R], [R, R], (8, 8), ["all_gather over x: 128 bytes"]),
        (MESH, [R, P()], [R, R], (8, 8), ["all_reduce over y by sum: 384 bytes"]),
        (MESH, [R, P()], [R, S(0)], (8, 8), ["reduce_scatter over y by sum: 192 bytes"]),
        (MESH, [R, S(0)], [R, S(1)], (8, 8), ["all_to_all over y: 48 bytes"]),
        (MESH, [R, R], [S(0), S(0)], (8, 8), ["slice over x: 0 bytes", "slice over y: 0 bytes"]),
        (MESH, [R, S(1)], [P(), S(1)], (8, 8), ["mask over x by sum: 0 bytes"]),
        (MESH, [R, S(1)], [R, P("max")], (8, 8), ["mask over y by max: 0 bytes"]),
        (MESH, [P(), P()], [R, R], (8, 8), ["all_reduce over x, y by sum: 448 bytes"]),
        (MESH, [P(), P()], [S(0), S(1)], (8, 8), ["reduce_scatter over x, y by sum: 224 bytes"]),
        (MESH, [P("max"), R], [S(1), R], (8, 8), ["all_to_all over x by max: 128 bytes"]),
        (MESH, [P("prod"), R], [R, R], (8, 8), ["all_gather over x by prod: 256 bytes"]),
        (
            MESH,
            [R, P("prod")],
            [R, R],
            (8, 8),
            ["all_to_all over y by prod: 192 bytes", "all_gather over y: 192 bytes"],
        ),
        (MESH, [S(0), S(0)], [R, R], (8, 8), ["all_gather over x, y: 224 bytes"]),
        (
            MESH,
            [S(0), S(0)],
            [S(0, shard_order=1), S(0)],
            (8, 8),
            ["ppermute over x, y: 32 bytes"],
        ),
        (SQUARE, [S(0), S(1)], [S(1), S(0)], (8, 8), ["ppermute over x, y: 64 bytes"]),
        (SQUARE, [S(0), R], [R, S(0)], (8, 8), ["ppermute over x, y: 128 bytes"]),
        (C14, [S(2), S(0)], [S(1), S(1)], (16, 16, 16), ["all_to_all over x, y: 1792 bytes"]),
        # the later axis is reduced first, and made again
        (
            MESH,
            [P("max"), P()],
            [R, P()],
            (),
            [
                "all_reduce over y by sum: 6 bytes",
                "all_reduce over x by max: 4 bytes",
                "mask over y by sum: 0 bytes",
            ],
        ),
        # and needs not be where the reductions commute
        (MESH, [P("avg"), P()], [R, P()], (2, 2), ["all_reduce over x by avg: 16 bytes"]),
        (MESH, [P(), P("max")], [P(), R], (2, 2), ["all_reduce over y by max: 24 bytes"]),
    ],
)
def test_plan(mesh, src, dst, shape, plan):
    assert [str(step) for step in reshard_steps(src, dst, shape, "float32", mesh)] == plan


def test_swapping_dims_never_gathers():
    steps = reshard_steps([S(0), S(1)], [S(1), S(0)], (8, 8), "float32", MESH)
    assert {step.kind for step in steps} == {"all_to_all"}
    assert sum(step.bytes for step in steps) == 60  # a gather of the whole sends 224


def test_a_permutation_keeps_what_it_can():
    (step,) = reshard_steps([S(0), R], [R, S(0)], (8, 8), "float32", SQUARE)
    assert step.permutation == ((0, 0), (1, 2), (2, 1), (3, 3))


def test_a_permutation_of_blocks_that_come_in_another_order():
    """7 rows over (2, 3, 2) and over (3, 2, 2): single rows, the empty blocks at other places."""
    sizes, shape = sizes_of(2, 3, 2), (7, 5)
    src, dst = Layout((("x",), ())), Layout((("y", "z"), ()))
    steps = planned_steps(src, dst, shape, "float32", sizes)
    assert [str(step) for step in steps] == [
        "slice over y: 0 bytes",
        "slice over z: 0 bytes",
        "ppermute over x, y, z: 20 bytes",
        "all_gather over x: 20 bytes",
    ]
    run_pairs(sizes, shape, [(src, dst)])


def test_equal_layouts_and_axes_of_size_one_need_no_step():
    mesh = ProcessMesh([[0, 1]], ["one", "x"])
    assert reshard_steps([S(0), S(1)], [S(0), S(1)], (4, 4), "float32", mesh) == ()
    assert reshard_steps([P("max"), S(1)], [S(0), S(1)], (4, 4), "float32", mesh) == ()


def test_layouts_and_placements_are_the_same_to_it():
    src, dst = (Layout.of(placements, MESH, 2) for placements in ([S(0)], [R, S(0)]))
    assert reshard_steps(src, dst, (8, 8), "float32", MESH) == reshard_steps(
        [S(0)], [R, S(0)], (8, 8), "float32", MESH
    )


def test_a_step_pastes_back():
    for step in reshard_steps([P(), S(0)], [R, S(1)], (8, 8), "float32", MESH):
        assert eval(repr(step), {"Step": Step, "Layout": Layout, "ReduceType": ReduceType}) == step


def test_thousands_of_ranks_are_planned_without_devices():
    mesh = ProcessMesh(np.arange(8192).reshape(16, 64, 8), ["dp", "tp", "pp"])
    steps = reshard_steps([P(), S(0), S(1)], [S(0), S(1), R], (4096, 4100), "bfloat16", mesh)
    assert steps[-1].dst == Layout.of([S(0), S(1), R], mesh, 2)
    (swap,) = reshard_steps([R, S(0)], [R, R, S(0)], (4096,), "int8", mesh)[-1:]
    assert swap.bytes == interpreter.sent_bytes(swap, (4096,), 1, mesh.axis_sizes)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, dtype, because",
    [
        ("sum", "bool", "Partial\\('any'\\)"),
        ("avg", "bool", "Partial\\('any'\\)"),
        ("prod", "bool", "Partial\\('any'\\)"),
        ("any", "float32", "booleans only"),
        ("all", "int8", "booleans only"),
        ("avg", "int32", "mean of integers"),
        ("max", "complex64", "no order"),
        ("min", "complex64", "no order"),
        ("sum", "float8_e8m0fnu", "neither 0 nor negative"),
        ("sum", jax.random.key(0).dtype, "not numbers"),
    ],
)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_dtype_that_a_reduction_does_not_take(kind, dtype, because, side):
    dtype = jnp.dtype(dtype) if isinstance(dtype, str) else dtype
    src, dst = ([P(kind)], [R]) if side == "src" else ([R], [P(kind)])
    with pytest.raises(PlacementError, match=because) as error:
        reshard_steps(src, dst, (8, 8), dtype, MESH)
    assert f"Partial({kind!r})" in str(error.value)


@pytest.mark.parametrize("name", ["int2", "uint2"])
def test_two_bit_integers_are_refused(name):
    with pytest.raises(PlacementError, match=f"{name} cannot be placed"):
        reshard_steps([S(0)], [R], (8, 8), jnp.dtype(name), MESH)


def test_a_layout_of_another_number_of_dims():
    with pytest.raises(PlacementError, match="has 1 dims, the shape \\(8, 8\\) has 2"):
        reshard_steps(Layout((("x",),)), [R], (8, 8), "float32", MESH)


def test_a_layout_of_another_mesh():
    with pytest.raises(PlacementError, match="no mesh axis 'z'"):
        reshard_steps(Layout((("z",), ())), [R], (8, 8), "float32", MESH)
