"""`ProcessMesh`, the default mesh, and asking for host devices."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import meshpar as mp

MESH = mp.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], dim_names=["dp", "tp"])


def test_what_a_mesh_says_of_itself():
    assert (MESH.shape, MESH.ndim, MESH.size) == ([2, 4], 2, 8)
    assert MESH.dim_names == ["dp", "tp"]
    assert MESH.process_ids == list(range(8))
    np.testing.assert_array_equal(MESH.mesh, np.arange(8).reshape(2, 4))
    assert MESH.get_dim_size("tp") == MESH.get_dim_size(1) == MESH.dim_size(-1) == 4
    assert MESH.get_dim_size(None) == 1
    assert MESH.contains(7) and not MESH.contains(8) and not MESH.empty()
    assert MESH.get_rank_by_dim_and_process_id("tp", 6) == 2
    assert MESH.get_rank_by_dim_and_process_id("tp", 99) == -1
    assert MESH.get_rank_by_dim_and_process_id(None, 6) == 0
    assert mp.ProcessMesh([3, 1]).dim_names == ["d0"]
    assert mp.ProcessMesh(shape=[2, 2], process_ids=[3, 2, 1, 0]).mesh.tolist() == [[3, 2], [1, 0]]
    with pytest.raises(ValueError, match="read-only"):
        MESH.mesh[0, 0] = 1


def test_parts_of_a_mesh():
    assert MESH[1] == mp.ProcessMesh([4, 5, 6, 7], ["tp"])
    assert MESH[:, 1:3] == mp.ProcessMesh([[1, 2], [5, 6]], ["dp", "tp"])
    assert MESH[:, 2] == mp.ProcessMesh([2, 6], ["dp"])
    assert MESH[1, 2] == mp.ProcessMesh([6], ["d0"])
    assert MESH["dp"] == MESH.get_submesh_with_dim("dp") == mp.ProcessMesh([0, 4], ["dp"])
    assert MESH.get_mesh_with_dim("tp").shape == [4, 2]
    assert MESH.get_mesh_with_dim("tp", 1) == mp.ProcessMesh([1, 5], ["dp"])


def test_equality_hash_and_repr():
    same = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "tp"])
    assert same == MESH and hash(MESH) == hash(same) and MESH.unique_id == same.unique_id
    assert mp.ProcessMesh(np.arange(8).reshape(2, 4), ["a", "tp"]) != MESH
    assert mp.ProcessMesh(np.arange(8).reshape(4, 2), ["dp", "tp"]) != MESH
    assert eval(repr(MESH), {"ProcessMesh": mp.ProcessMesh}) == MESH
    assert "\n" not in repr(MESH) and str(MESH) == "ProcessMesh(dp=2, tp=4)"


def test_the_same_mesh_for_jax():
    assert MESH.jax_mesh.axis_names == ("dp", "tp")
    assert [d.id for d in MESH.jax_mesh.devices.ravel()] == list(range(8))
    assert all(t == jax.sharding.AxisType.Auto for t in MESH.jax_mesh.axis_types)
    assert dict(MESH.abstract_mesh.shape) == {"dp": 2, "tp": 4}
    explicit = jax.make_mesh((2, 4), ("dp", "tp"))
    auto = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert mp.ProcessMesh.from_jax(explicit) == mp.ProcessMesh.from_jax(auto)
    assert mp.ProcessMesh.create({"dp": 2, "tp": 4}).shape == [2, 4]
    assert sorted(mp.ProcessMesh.create({"dp": 8}).process_ids) == list(range(8))


def test_a_mesh_for_a_pod_fails_only_where_devices_are_needed():
    pod = mp.ProcessMesh.create({"dp": 64, "tp": 64})
    assert pod.size == 4096 and pod[0].shape == [64] and dict(pod.abstract_mesh.shape)["tp"] == 64
    with pytest.raises(
        mp.MeshError, match=r"(?s)JAX sees 8 cpu device.*set_host_device_count\(4096\)"
    ) as e:
        mp.shard_tensor(np.ones(4096), pod, [mp.Shard(0)])
    assert str(e.value).startswith("shard_tensor(data): the mesh names devices that are not there.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": [[0, 1], [2]]}, "differ in length"),
        ({"mesh": [0, 1, 1]}, "rank 1 occurs 2 times"),
        ({"mesh": [0, -1]}, "rank -1 is negative"),
        ({"mesh": "abc"}, "mesh is a str"),
        ({"mesh": [0.5, 1.5]}, "ranks must be integers"),
        ({"mesh": [0, 1], "dim_names": ["a", "b"]}, r"2 name\(s\) for a mesh of 1 axes"),
        ({"mesh": [[0, 1]], "dim_names": ["a", "a"]}, "'a' occurs twice"),
        ({"shape": [2, 2], "process_ids": [0, 1]}, "holds 4 ranks, process_ids has 2"),
        ({}, "give `mesh`, or both `shape` and `process_ids`"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_mesh_that_cannot_be(arguments, message):
    with pytest.raises(mp.MeshError, match=message):
        mp.ProcessMesh(**arguments)


def test_an_axis_that_is_not_there():
    for ask in (lambda: MESH["pp"], lambda: MESH.get_dim_size("pp"), lambda: MESH.axis_index(2)):
        with pytest.raises(mp.MeshError, match=r"is not an axis of the mesh(.|\n)*'dp', 'tp'"):
            ask()
    with pytest.raises(mp.MeshError, match="index 5 is out of bounds"):
        MESH[5]


def test_the_default_mesh_comes_back_after_an_exception():
    assert mp.get_mesh() is None
    with pytest.raises(KeyError), MESH:
        assert mp.get_mesh() == MESH
        with MESH["tp"]:
            assert mp.get_mesh() == MESH["tp"]
        assert mp.get_mesh() == MESH
        assert float(jax.numpy.ones(3).sum()) == 3  # ordinary code works beside it
        raise KeyError
    assert mp.get_mesh() is None
    with pytest.raises(TypeError, match="from_jax"):
        mp.set_mesh(MESH.jax_mesh)


def test_the_picture_names_every_rank():
    html = mp.ProcessMesh(np.arange(8).reshape(2, 2, 2), ["pp", "dp", "tp"])._repr_html_()
    assert html.count("<table") == 2 and all(f">{rank}</td>" in html for rank in range(8))
    assert "pp=1" in html and mp.ProcessMesh([5, 6])._repr_html_().count("<td") == 2


DEVICES = """
import os, sys
import meshpar as mp
assert 'flax' not in sys.modules and 'optax' not in sys.modules
{before}
try:
    mp.set_host_device_count(8)
    mp.set_host_device_count(8)
except RuntimeError as error:
    print('refused:', error)
else:
    import jax
    mp.ProcessMesh(range(8)).jax_mesh
    mp.set_host_device_count(8)
    print(jax.device_count(), os.environ['XLA_FLAGS'])
"""


@pytest.mark.parametrize(
    ("before", "flags", "expected"),
    [
        ("", "", "8 --xla_force_host_platform_device_count=8"),
        ("", "--xla_cpu_enable_fast_math=false", "8 --xla_cpu_enable_fast_math=false --xla_force"),
        ("", "--xla_force_host_platform_device_count=2", "8 --xla_force_host"),
        (
            "import jax; jax.devices()",
            "",
            "refused: set_host_device_count(8) comes too late: JAX's",
        ),
    ],
    ids=["early", "other flags kept", "another count", "late"],
)
def test_host_devices_are_asked_for_in_time_or_refused(before, flags, expected):
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", DEVICES.format(before=before)],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert out.stdout.startswith(expected)
    if "refused" in expected:
        assert "up with 1 CPU device" in out.stdout and "Restart the kernel" in out.stdout


def test_no_devices_is_no_count():
    with pytest.raises(ValueError, match="at least one device"):
        mp.set_host_device_count(0)
