"""Every pair of placements on uneven shapes: the value stays, the placements are those asked."""

import itertools

import numpy as np
import pytest

import meshpar as mp
from meshpar import Partial, Replicate, Shard

SHAPE = (7, 9, 5)
MESHES = {
    "2x2": mp.ProcessMesh([[0, 1], [2, 3]], ["x", "y"]),
    "2x3": mp.ProcessMesh(np.arange(6).reshape(2, 3), ["x", "y"]),
}
ONE = (Shard(0), Shard(1), Shard(2), Replicate(), Partial())
ALL = list(itertools.product(ONE, repeat=2))
# 7 has no divisor in common with 25, so every placement is once a source and once a target.
SOME = [(src, ALL[(7 * i + 3) % len(ALL)]) for i, src in enumerate(ALL)]


def check_pair(mesh, src, dst):
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    placed = mp.shard_tensor(x, mesh, list(src))
    moved = mp.reshard(placed, mesh, list(dst))
    back = mp.reshard(moved, mesh, list(src))
    for value, placements in ((placed, src), (moved, dst), (back, src)):
        assert mp.placements_of(value) == list(placements)
        assert mp.mesh_of(value) == mesh
        np.testing.assert_array_equal(np.asarray(value), x)


@pytest.mark.parametrize(
    ("mesh", "src", "dst"),
    [(mesh, *pair) for mesh, pair in zip(itertools.cycle(MESHES), SOME, strict=False)],
    ids=str,
)
def test_a_reshard_and_its_round_trip(mesh, src, dst):
    check_pair(MESHES[mesh], src, dst)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("src", ALL, ids=str)
def test_every_reshard_and_its_round_trip(mesh, src):
    for dst in ALL:
        check_pair(MESHES[mesh], src, dst)


def test_reshards_inside_a_program():
    """One program that goes through all 25 placements, one after the other."""
    on = MESHES["2x3"]
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)

    def tour(x):
        for _, dst in SOME:
            x = mp.reshard(x, on, list(dst))
        return x

    last = list(SOME[-1][1])
    got = mp.jit(tour, out_placements=last)(mp.shard_tensor(x, on, list(SOME[0][0])))
    assert mp.placements_of(got) == last
    np.testing.assert_array_equal(np.asarray(got), x)
