"""`reshard_program`: what it computes on devices, and that it holds planned collectives only."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.compiler.hlo import axes_of, collectives_in_hlo, collectives_in_stablehlo, sent_bytes
from meshpar.errors import MeshError, PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import storage_shape, storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.reshard_program import reshard_program
from meshpar.placements.search import planned_steps
from meshpar.placements.types import Partial, ReduceType, Replicate, Shard
from tests.placements import step_interpreter as interpreter
from tests.placements.all_layouts import MAX, SUM, all_layouts
from tests.placements.storage_blocks import from_storage, to_storage

R, S, P = Replicate(), Shard, Partial
MESH = ProcessMesh(np.arange(8).reshape(2, 4), ["x", "y"])
CUBE = ProcessMesh(np.arange(8).reshape(2, 2, 2), ["x", "y", "z"])
SIX = ProcessMesh([[5, 0, 3], [1, 4, 2]], ["x", "y"])
ALL_BUT_BOOLEAN = (SUM, MAX, ReduceType.kRedMin, ReduceType.kRedProd, ReduceType.kRedAvg)
COMPILED_KINDS = {"ppermute": "collective_permute"}


def planned_collectives(steps):
    """(kind, axes, bytes) -> how often; the axes of a permutation without order."""
    return Counter(
        (COMPILED_KINDS.get(step.kind, step.kind), step.axes, step.bytes)
        for step in steps
        if step.is_collective
    )


def found_collectives(collectives, mesh):
    return Counter(
        (kind, axes_of(kind, found, mesh), sent_bytes(kind, found))
        for kind, all_found in collectives.items()
        for found in all_found
    )


def abstract_storage(shape, layout, dtype, mesh):
    sharding = storage_sharding(layout, mesh)
    stored = storage_shape(shape, layout, mesh.axis_sizes)
    return jax.ShapeDtypeStruct(stored, dtype, sharding=sharding)


def check_lowered(mesh, shape, src, dst):
    """That the lowered program holds exactly what is planned."""
    program = reshard_program(src, dst, shape, np.dtype("float32"), mesh)
    lowered = program.lower(abstract_storage(shape, src, "float32", mesh))
    steps = planned_steps(src, dst, shape, "float32", mesh.axis_sizes)
    found = found_collectives(collectives_in_stablehlo(lowered.as_text()), mesh)
    assert found == planned_collectives(steps), (src, dst, steps)
    return lowered, steps


def check_values(mesh, shape, src, targets):
    """Reshards one value to many layouts in one compiled program.

    The padding holds NaN, and the compiled program no more collectives than the plans.
    """
    sizes, rng = mesh.axis_sizes, np.random.default_rng(len(targets))
    value = rng.integers(1, 50, shape).astype(np.float32)
    state = interpreter.scatter(value, src, sizes, rng)
    programs = [reshard_program(src, dst, shape, np.dtype("float32"), mesh) for dst in targets]
    storage = to_storage(state, shape, src, mesh, padding=np.nan)
    compiled = jax.jit(lambda x: [program(x) for program in programs]).lower(storage).compile()
    for out, dst in zip(compiled(storage), targets, strict=True):
        wide = {at: b.astype(np.float64) for at, b in from_storage(out, shape, dst, mesh).items()}
        interpreter.check(wide, value, dst, sizes)
    plans = (planned_steps(src, dst, shape, "float32", sizes) for dst in targets)
    planned = sum((planned_collectives(steps) for steps in plans), Counter())
    kinds = Counter(kind for kind, _, _ in planned.elements())
    found = {k: len(v) for k, v in collectives_in_hlo(compiled.as_text()).items()}
    assert all(count <= kinds[kind] for kind, count in found.items()), (found, kinds)


# --- every pair -----------------------------------------------------------------------------------

EVEN, UNEVEN = (8, 16), (7, 9)
SOURCES = all_layouts(["x", "y"], 2)


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_each_lowered_program_holds_the_planned_collectives(shape):
    for src in SOURCES:
        for dst in SOURCES:
            check_lowered(MESH, shape, src, dst)


@pytest.mark.parametrize("src", SOURCES[::4], ids=str)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_the_values_of_some_sources_to_every_target(shape, src):
    check_values(MESH, shape, src, SOURCES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("src", SOURCES, ids=str)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_the_values_of_every_pair(shape, src):
    check_values(MESH, shape, src, SOURCES)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_each_compiled_program_holds_no_more_than_is_planned(shape):
    distinct = {}
    for src in SOURCES:
        for dst in SOURCES:
            steps = planned_steps(src, dst, shape, "float32", MESH.axis_sizes)
            key = tuple((s.kind, s.axes, s.dims, s.bytes, s.reduce) for s in steps)
            distinct.setdefault(key, (src, dst))
    for src, dst in distinct.values():
        lowered, steps = check_lowered(MESH, shape, src, dst)
        found = found_collectives(collectives_in_hlo(lowered.compile().as_text()), MESH)
        assert found.total() <= planned_collectives(steps).total()
        assert {k for k, _, _ in found} <= {k for k, _, _ in planned_collectives(steps)}


def some(layouts, count, seed):
    chosen = np.random.default_rng(seed).choice(len(layouts), count, replace=False)
    return [layouts[i] for i in chosen]


@pytest.mark.parametrize("mesh, shape, kinds, seed", [
    (CUBE, (8, 4, 8), (SUM, MAX), 0),
    (CUBE, (5, 7), (SUM, MAX), 1),
    (SIX, (7, 9, 5), ALL_BUT_BOOLEAN, 2),
    (SIX, (6, 12), ALL_BUT_BOOLEAN, 3),
    (MESH, (), ALL_BUT_BOOLEAN, 4),
    (MESH, (0, 3), (SUM, MAX), 5),
    (MESH, (1, 2), (SUM, MAX), 6),
    (MESH, (5, 3), (SUM,), 7),
])  # fmt: skip
def test_the_values_on_other_meshes_and_shapes(mesh, shape, kinds, seed):
    layouts = all_layouts(list(mesh.axis_names), len(shape), kinds)
    for src in some(layouts, 2, seed):
        check_values(mesh, shape, src, some(layouts, 12, seed + 10))


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mesh, shape, kinds", [
    (CUBE, (8, 4, 8), (SUM, MAX)),
    (CUBE, (5, 7), (SUM, MAX)),
    (SIX, (7, 9, 5), ALL_BUT_BOOLEAN),
])  # fmt: skip
def test_the_values_of_many_pairs_on_other_meshes(mesh, shape, kinds):
    layouts = all_layouts(list(mesh.axis_names), len(shape), kinds)
    for i, src in enumerate(layouts[::8]):
        check_values(mesh, shape, src, some(layouts, 12, i))


# --- dtypes ---------------------------------------------------------------------------------------

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
INTEGERS = ["int32", "uint8", "int8", "int4", "uint4", "int16"]
KINDS_OF = {
    **dict.fromkeys((*FLOATS, *INTEGERS), ("sum", "max", "min", "prod")),
    "bool": ("any", "all", "max", "min"),
    "complex64": ("sum", "prod"),
}


def sample(dtype, shape):
    """Values of both signs, zeros of both signs and the extremes, where the dtype has them."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    value = rng.integers(0, 8, shape).astype(np.float32)
    if dtype not in ("uint8", "uint4"):
        value -= 4
    if jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        value.ravel()[:2] = -0.0, 0.0
    return value.astype(jnp.dtype(dtype))


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", KINDS_OF)
def test_every_reduction_gives_back_the_bits_of_every_dtype(dtype):
    """Shard -> Partial -> Shard of another dim, and Replicate -> Partial -> Replicate."""
    shape, value = (6, 5), sample(dtype, (6, 5))
    cut, across = (Layout.of([R, S(d)], MESH, 2) for d in (0, 1))
    whole = Layout.replicated(2)

    def there_and_back(kind, before, after):
        pending = Layout.of([R, P(kind)], MESH, 2)
        make = reshard_program(before, pending, shape, jnp.dtype(dtype), MESH)
        reduce = reshard_program(pending, after, shape, jnp.dtype(dtype), MESH)
        return lambda x: reduce(make(x))

    jobs = [(k, *pair) for k in KINDS_OF[dtype] for pair in ((cut, across), (whole, whole))]
    rng, sizes = np.random.default_rng(0), MESH.axis_sizes
    inputs = {
        layout: to_storage(
            interpreter.scatter(value, layout, sizes, rng), shape, layout, MESH, value[0, 0]
        )
        for layout in (cut, whole)
    }
    run = jax.jit(lambda xs: [there_and_back(k, a, b)(xs[a == whole]) for k, a, b in jobs])
    for out, (kind, _, after) in zip(run([inputs[cut], inputs[whole]]), jobs, strict=True):
        expected = interpreter.scatter(value, after, sizes, rng)
        for at, block in from_storage(out, shape, after, MESH).items():
            rows = expected[at]
            if kind == "sum":  # XLA's sums on CPU start at 0.0, so -0.0 does not come back
                rows = rows + np.zeros((), rows.dtype)
            same = np.array_equal(bits(block), bits(rows))
            assert same, (kind, after, block, rows)


@pytest.mark.parametrize("dtype", ["int4", "bool", "float8_e4m3fn", "complex64"])
def test_the_bytes_of_odd_dtypes_are_those_of_the_module(dtype):
    for target in ([S(1)], [R, S(0)], [S(0, shard_order=1), S(0)], [R]):
        src, dst = (Layout.of(placements, MESH, 2) for placements in ([S(0)], target))
        program = reshard_program(src, dst, (8, 8), jnp.dtype(dtype), MESH)
        lowered = program.lower(abstract_storage((8, 8), src, jnp.dtype(dtype), MESH))
        steps = planned_steps(src, dst, (8, 8), jnp.dtype(dtype), MESH.axis_sizes)
        found = found_collectives(collectives_in_stablehlo(lowered.as_text()), MESH)
        assert found == planned_collectives(steps)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_prng_keys_move_like_numbers(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), (8, 7))
    whole = Layout.replicated(2)
    for target in ([S(0), S(1)], [R, S(1)], [S(0), S(0)]):
        dst = Layout.of(target, MESH, 2)
        for src in (Layout.of([S(0), S(0)], MESH, 2), Layout.of([S(1)], MESH, 2)):
            x = jax.device_put(keys, storage_sharding(whole, MESH))
            for before, after in ((whole, src), (src, dst), (dst, whole)):
                x = reshard_program(before, after, (8, 7), keys.dtype, MESH)(x)
            assert x.dtype == keys.dtype
            assert (jax.random.key_data(x) == jax.random.key_data(keys)).all()


def test_the_mean_of_contributions():
    pending = Layout.of([P("avg"), P("avg")], MESH, 1)
    storage = np.arange(16, dtype=np.float32).reshape(2, 4, 2)
    program = reshard_program(pending, Layout.replicated(1), (2,), np.dtype("float32"), MESH)
    np.testing.assert_array_equal(program(storage), storage.mean((0, 1)))


# --- caches and errors ----------------------------------------------------------------------------


def test_programs_are_cached_and_the_cache_can_be_cleared():
    src, dst = (Layout.of(p, MESH, 1) for p in ([S(0)], [R]))
    first = reshard_program(src, dst, (8,), np.dtype("float32"), MESH)
    assert reshard_program(src, dst, (8,), np.dtype("float32"), MESH) is first
    reshard_program.cache_clear()
    assert reshard_program(src, dst, (8,), np.dtype("float32"), MESH) is not first


def test_devices_that_are_not_there():
    mesh = ProcessMesh(range(16), ["x"])
    src, dst = (Layout.of(p, mesh, 1) for p in ([S(0)], [R]))
    with pytest.raises(MeshError, match="devices that are not there"):
        reshard_program(src, dst, (8,), np.dtype("float32"), mesh)


def test_a_dtype_is_refused_before_anything_runs():
    src, dst = (Layout.of(p, MESH, 1) for p in ([P("avg")], [R]))
    with pytest.raises(PlacementError, match="mean of integers"):
        reshard_program(src, dst, (8,), np.dtype("int32"), MESH)
