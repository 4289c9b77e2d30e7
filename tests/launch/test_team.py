"""Who a rank is told that it is, and which devices it sees."""

import pytest

from meshpar.launch.devices import device_variables, gpus, parse_devices, platform_of, shared_out
from meshpar.launch.team import Team, rank_variables

TEAM = Team("job", 1, 3, "10.0.0.1:500", ("10.0.0.1:1", "10.0.0.2:2", "10.0.0.2:3"), (1, 2), node=1)


def test_the_variables_of_a_rank():
    assert list(TEAM.ranks) == [1, 2]
    found = rank_variables(
        TEAM, 2, (4, 5), "cpu", {"HOME": "/", "XLA_FLAGS": "--a", "PADDLE_MASTER": "old"}
    )
    assert found == {
        "HOME": "/", "PYTHONUNBUFFERED": "1",
        "PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "3", "PADDLE_GLOBAL_RANK": "2", "PADDLE_GLOBAL_SIZE": "3",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.2:2,10.0.0.2:3", "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:3",
        "PADDLE_MASTER": "10.0.0.1:500", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "500",
        "PADDLE_LOCAL_RANK": "1", "PADDLE_RANK_IN_NODE": "1", "PADDLE_LOCAL_SIZE": "2", "PADDLE_NNODES": "2",
        "PADDLE_JOB_ID": "job", "MESHPAR_JOB_ID": "job", "MESHPAR_RESTART_COUNT": "1", "MESHPAR_MAX_RESTART": "3",
        "PADDLE_LOCAL_DEVICE_IDS": "0,1", "XLA_FLAGS": "--a --xla_force_host_platform_device_count=2",
    }  # fmt: skip
    assert "XLA_FLAGS" not in rank_variables(TEAM, 1, None, "cpu", {})


def test_gpus_are_numbered_among_those_that_are_visible():
    own = {"PADDLE_LOCAL_DEVICE_IDS": "0,1"}
    assert device_variables((2, 3), "cuda", {}) == {**own, "CUDA_VISIBLE_DEVICES": "2,3"}
    environ = {"CUDA_VISIBLE_DEVICES": "4,GPU-5,6"}
    assert device_variables((1, 2), "cuda", environ) == {**own, "CUDA_VISIBLE_DEVICES": "GPU-5,6"}
    assert gpus("cuda", environ) == (0, 1, 2) and gpus("cpu", environ) is None
    assert device_variables((1,), "rocm", {})["HIP_VISIBLE_DEVICES"] == "1"
    with pytest.raises(
        ValueError, match=r"device 3 is not there: CUDA_VISIBLE_DEVICES=4,GPU-5,6 has 3"
    ):
        device_variables((3,), "cuda", environ)
    with pytest.raises(NotImplementedError, match="--devices on TPUs"):
        device_variables((0,), "tpu", {})


def test_devices_are_shared_out_equally_or_not_at_all():
    assert shared_out(parse_devices("0-3"), 2) == [(0, 1), (2, 3)]
    assert shared_out(None, 2) == [None, None]
    for devices, processes in [((0, 1, 2), 2), ((0,), 2)]:
        with pytest.raises(
            ValueError, match=rf"{len(devices)} device\(s\).* cannot be shared out equally to 2"
        ):
            shared_out(devices, processes)


def test_the_platform_is_what_jax_is_told():
    assert platform_of({"JAX_PLATFORMS": "cpu,tpu"}) == "cpu"
    assert platform_of({"JAX_PLATFORMS": "gpu"}) == "cuda"
