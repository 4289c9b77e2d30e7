"""Groups: values, their registry, and what they mean inside and outside a region."""

import datetime

import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from tests.collectives.regions import MESH_2X4, MESHES, on_ranks

CUBE = mp.ProcessMesh(np.arange(8).reshape(2, 2, 2), ["pp", "dp", "tp"])


def test_groups_of_a_mesh_follow_its_axes():
    assert MESH_2X4.group("tp") == mp.Group((0, 1, 2, 3), MESH_2X4, ("tp",))
    assert MESH_2X4.group("dp").ranks == (0, 4)
    assert CUBE.group(["tp", "pp"]) == CUBE.group(["pp", "tp"])
    assert CUBE.group(["tp", "pp"]).ranks == (0, 1, 4, 5)
    assert CUBE.group().ranks == tuple(range(8)) and CUBE.group().axes == ("pp", "dp", "tp")
    for axes in ("ep", ["dp", "dp"], []):
        with pytest.raises(mp.MeshError):
            CUBE.group(axes)


def test_a_group_is_a_value():
    group = MESH_2X4.group("tp")
    names = {"Group": mp.Group, "ProcessMesh": mp.ProcessMesh}
    for one in (group, mp.new_group([3, 1], timeout=5)):
        assert eval(repr(one), names) == one and len({one, eval(repr(one), names)}) == 1
    assert (group.nranks, group.world_size, str(group)) == (
        4,
        4,
        "4 ranks along 'tp' of ProcessMesh(dp=2, tp=4)",
    )
    assert [group.get_group_rank(r) for r in (2, 5)] == [2, -1]
    assert [group.get_global_rank(i) for i in (3, 4, -1)] == [3, -1, -1]


def test_new_groups_are_numbered_and_forgotten():
    mp.destroy_process_group()
    first, second = mp.new_group([2, 0], timeout=datetime.timedelta(minutes=1)), mp.new_group([0])
    assert first.ranks == (0, 2) and first.timeout == 60 and first.id != second.id
    assert mp.get_group(first.id) == first and mp.get_group(second.id) == second
    mp.destroy_process_group(first)
    with pytest.warns(UserWarning, match=f"get_group.{first.id}.: there is no such group"):
        assert mp.get_group(first.id) is None
    with pytest.raises(mp.CollectiveError, match="no such group"):
        mp.destroy_process_group(first)
    with pytest.raises(mp.CollectiveError, match=r"mp\.new_group did not make it"):
        mp.destroy_process_group(MESH_2X4.group())
    mp.destroy_process_group()
    with pytest.warns(UserWarning):
        assert mp.get_group(second.id) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": []}, "distinct ranks >= 0, at least one"),
        ({"ranks": [0, -1]}, "distinct ranks >= 0"),
        ({"ranks": [1, 1]}, "distinct ranks >= 0"),
        ({"ranks": [0.5]}, "distinct ranks >= 0"),
        ({"ranks": [True, False]}, "distinct ranks >= 0"),
        ({"ranks": [0], "backend": "nccl"}, "whose collectives are GLOO"),
        ({"ranks": [0], "timeout": 0}, "a number of seconds > 0"),
        ({"ranks": [0], "timeout": float("nan")}, "a number of seconds > 0"),
        ({}, "there are no ranks here"),
    ],
    ids=str,
)
def test_groups_that_cannot_be(arguments, message):
    with pytest.raises(mp.CollectiveError, match=message):
        mp.new_group(**arguments)


def test_options_of_nccl_are_xla_s():
    with pytest.raises(NotImplementedError, match="XLA sets NCCL up"):
        mp.new_group([0], nccl_comm_init_option=1)


def test_the_backend_is_jax_s():
    assert mp.get_backend() == "GLOO" and mp.is_available() and not mp.is_initialized()
    assert mp.new_group([0], backend="gloo").ranks == (0,)


def test_outside_a_process_alone_is_the_world():
    assert (mp.get_rank(), mp.get_world_size()) == (0, 1)
    assert mp.get_rank(mp.new_group([0])) == 0 and mp.get_world_size(mp.new_group([0])) == 1
    with pytest.warns(UserWarning, match="no such group"):
        assert mp.get_group(0) is None
    for ask in (mp.get_rank, mp.get_world_size):
        with pytest.raises(mp.CollectiveError, match=f"(?s){ask.__name__}.*mp.spmd"):
            ask(MESH_2X4.group("tp"))
        with pytest.raises(mp.CollectiveError, match=r"there are 1 process\(es\), ranks 0 to 0"):
            ask(mp.new_group([0, 1]))


def test_inside_ranks_are_devices():
    group = mp.new_group([1, 6])
    seen = []

    def fn(x):
        seen.append(
            (
                mp.get_world_size(),
                mp.get_world_size(group),
                mp.get_group().ranks,
                mp.new_group().ranks,
            )
        )
        tp, dp = MESH_2X4.group("tp"), MESH_2X4.group("dp")
        return jnp.stack([mp.get_rank(), mp.get_rank(group), mp.get_rank(tp), mp.get_rank(dp)])

    got = on_ranks(MESH_2X4, fn, [np.float32(0)] * 8)
    np.testing.assert_array_equal(
        got, [[r, {1: 0, 6: 1}.get(r, -1), r % 4, r // 4] for r in range(8)]
    )
    assert seen[0] == (8, 2, tuple(range(8)), tuple(range(8)))


def test_ranks_are_those_of_the_mesh():
    mesh = mp.ProcessMesh([[6, 1], [3, 4]], ["a", "b"])
    got = on_ranks(
        mesh, lambda x: jnp.stack([mp.get_rank(), mp.get_rank(mesh.group())]), [np.float32(0)] * 4
    )
    np.testing.assert_array_equal(got, [[6, 0], [1, 1], [3, 2], [4, 3]])
    sent = on_ranks(mesh, lambda x: mp.broadcast(x, src=3), [np.float32(i) for i in range(4)])
    assert [float(x) for x in sent] == [2] * 4


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (mp.new_group([0, 9]), "rank 9 is not in the region"),
        (MESHES[8].group(), "the group belongs to another mesh"),
        ([0, 1], r"group=\[0, 1\] is no group"),
    ],
    ids=["rank", "mesh", "list"],
)
def test_groups_that_are_not_in_the_region(group, message):
    for ask in (lambda x: mp.all_reduce(x, group=group), lambda x: mp.get_rank(group)):
        with pytest.raises(mp.CollectiveError, match=message):
            on_ranks(MESH_2X4, ask, [np.float32(0)] * 8)


def test_an_axis_that_the_region_leaves_out():
    with pytest.raises(mp.CollectiveError, match="the region does not cover the axis 'tp'"):
        mp.spmd(lambda x: mp.all_reduce(x, group=MESH_2X4.group("tp")), MESH_2X4, axes="dp")(1.0)
