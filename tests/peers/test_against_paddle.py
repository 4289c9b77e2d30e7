"""The same collectives in PaddlePaddle and in meshpar: same inputs, same outputs.

Each library runs in its own interpreter: `make peer` installs PaddlePaddle into one, and
`MESHPAR_PEER_PYTHON` names another.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PEER = pathlib.Path(os.environ.get("MESHPAR_PEER_PYTHON", ROOT / ".venv/peers/paddle/bin/python"))

pytestmark = pytest.mark.skipif(not PEER.exists(), reason="PaddlePaddle is not there: make peer")


def run(library, size, folder):
    """Runs all ranks of a library."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoints = [f"127.0.0.1:{port + 1 + rank}" for rank in range(size)]
    common = {
        **os.environ,
        "PADDLE_MASTER": f"127.0.0.1:{port}",
        "PADDLE_TRAINERS_NUM": str(size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "PYTHONPATH": "" if library == "paddle" else str(ROOT),
    }
    python = str(PEER) if library == "paddle" else sys.executable
    script = str(pathlib.Path(__file__).with_name("ranks.py"))
    ranks = [
        subprocess.Popen(
            [python, script, library, str(folder)],
            env={
                **common,
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(outputs)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_what_paddle_gives(tmp_path, size):
    for library in ("paddle", "meshpar"):
        run(library, size, tmp_path)
    for rank in range(size):
        theirs = np.load(tmp_path / f"paddle.{rank}.npz")
        ours = np.load(tmp_path / f"meshpar.{rank}.npz")
        assert set(ours) == set(theirs) and len(ours) > 200
        for name in theirs:
            assert ours[name].dtype == theirs[name].dtype, name
            np.testing.assert_array_equal(ours[name], theirs[name], name)
        objects = [
            json.loads((tmp_path / f"{x}.{rank}.json").read_text()) for x in ("meshpar", "paddle")
        ]
        assert objects[0] == objects[1]
