"""Every collective inside a region, against numpy: on 1 to 8 devices, along axes, in all dtypes."""

import jax
import numpy as np
import pytest

import meshpar as mp
from tests.collectives.regions import MESH_2X4, MESHES, lines, on_ranks
from tests.collectives.table import DTYPES, OPERATIONS, REGION, WIDE

SHUFFLED = mp.ProcessMesh([[5, 0, 3, 6], [2, 7, 4, 1]], ["dp", "tp"])


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
    got = on_ranks(
        mesh,
        lambda trees: [op.call(tree, group) for (op, _), tree in zip(rows, trees, strict=True)],
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
    assert rows, f"nothing takes {dtype}"


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mesh", "group"),
    [
        *((mesh, mesh.group()) for mesh in MESHES.values()),
        *((MESH_2X4, MESH_2X4.group(axes)) for axes in ("dp", "tp", ("dp", "tp"))),
        (MESH_2X4, mp.new_group([1, 2, 7])),
    ],
    ids=str,
)
def test_every_dtype_of_every_group(mesh, group, dtype):
    check_all(mesh, group, dtype, None)
