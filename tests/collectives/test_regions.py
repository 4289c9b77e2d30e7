"""Every collective inside a region, against numpy: on 1 to 8 devices, along axes, in all dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from tests.collectives.table import DTYPES, OPERATIONS, REGION, WIDE

MESHES = {n: mp.ProcessMesh(range(n), ["x"]) for n in (1, 2, 4, 8)}
MESH_2X4 = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "tp"])
SHUFFLED = mp.ProcessMesh([[5, 0, 3, 6], [2, 7, 4, 1]], ["dp", "tp"])


def stacked(mesh):
    """One row of dim 0 on each device, in row-major order."""
    return [mp.Shard(0)] * mesh.ndim


def per_rank(mesh, group, fn, given):
    """What `fn(what a rank gives, group)` gets on each rank, in row-major order."""

    def local(tree):
        own = jax.tree.map(lambda x: x[0], tree)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], fn(own, group))

    region = mp.spmd(local, mesh, [stacked(mesh)], stacked(mesh))
    out = region(jax.tree.map(lambda *xs: np.stack(xs), *given))
    return [jax.tree.map(lambda x, i=i: np.asarray(x)[i], out) for i in range(mesh.size)]


def lines(mesh, group):
    """The groups of the region, as lists of row-major positions."""
    positions = {rank: i for i, rank in enumerate(mesh.process_ids)}
    if group.mesh is None:
        return [[positions[r] for r in group.ranks]]
    grid = np.arange(mesh.size).reshape(mesh.shape)
    last = [mesh.axis_index(axis) for axis in group.axes]
    moved = np.moveaxis(grid, last, range(-len(last), 0))
    return moved.reshape(-1, group.nranks).tolist()


def same(got, expected):
    np.testing.assert_equal(np.asarray(got).dtype, np.asarray(expected).dtype)
    np.testing.assert_array_equal(
        np.asarray(got).astype(np.complex128), np.asarray(expected).astype(np.complex128)
    )


def check_all(mesh, group, dtype, shapes):
    """Every operation that takes the dtype, all in one region."""
    rows, given = [], []
    for operation in OPERATIONS:
        if REGION in operation.places and operation.takes_dtype(dtype):
            for shape in shapes or operation.shapes:
                rows.append((operation, shape))
                n = group.nranks
                given.append([operation.give(r, n, shape, dtype) for r in range(mesh.size)])
    got = per_rank(
        mesh,
        group,
        lambda trees, g: [op.call(tree, g) for (op, _), tree in zip(rows, trees, strict=True)],
        [list(items) for items in zip(*given, strict=True)],
    )
    for i, (operation, shape) in enumerate(rows):
        for line in lines(mesh, group):
            expected = operation.get([given[i][p] for p in line])
            for p, one in zip(line, expected, strict=True):
                try:
                    jax.tree.map(same, got[p][i], one)
                except AssertionError as error:
                    where = f"{operation.name} of {dtype}{list(shape)} on rank {p} of {mesh}"
                    raise AssertionError(f"{where}: {error}") from None
    return len(rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_of_every_dtype(dtype):
    shapes = None if dtype in ("float32", "bool") else [(3, 2)]
    check_all(MESHES[4], MESHES[4].group(), dtype, shapes)


@pytest.mark.parametrize("dtype", WIDE)
def test_every_operation_of_wide_dtypes(dtype):
    with jax.enable_x64(True):
        check_all(MESHES[4], MESHES[4].group(), dtype, [(3,)])


@pytest.mark.parametrize("n", [1, 2, 8])
def test_on_other_numbers_of_devices(n):
    check_all(MESHES[n], MESHES[n].group(), "float32", [(3,)])


@pytest.mark.parametrize("axes", ["dp", "tp", ("dp", "tp")], ids=str)
def test_along_axes_of_a_mesh(axes):
    check_all(MESH_2X4, MESH_2X4.group(axes), "int32", [(3,)])


@pytest.mark.parametrize("axes", ["dp", ("tp", "dp")], ids=str)
def test_ranks_are_those_of_the_mesh_wherever_they_stand(axes):
    check_all(SHUFFLED, SHUFFLED.group(axes), "float32", [(2,)])


@pytest.mark.parametrize(
    "ranks",
    [[0, 2], [1, 2, 7], [5], [4, 5, 6, 7], [2, 6], [0, 1, 4, 5], [3, 0, 6, 1, 2, 4, 5, 7]],
    ids=str,
)
def test_any_ranks_are_a_group(ranks):
    check_all(MESH_2X4, mp.new_group(ranks), "float32", [(2,)])
