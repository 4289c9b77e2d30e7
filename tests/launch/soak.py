"""Launches in a row, which must leave no process, port or file behind.

python -m tests.launch.soak --launches 200
"""

import argparse
import pathlib
import re
import sys
import tempfile
import time

from tests.launch.job import finish, processes_with, start

RANKS = """
import os, sys
from tests.processes.ranks import start
start()
import jax, numpy as np, meshpar as mp
mesh = mp.ProcessMesh([0, 1], ["x"])
total = mp.unshard_dtensor(mp.dtensor_from_local(np.ones(3), mesh, [mp.Partial()]))
print("total", np.asarray(total).tolist(), "at", os.environ["PADDLE_MASTER"])
if sys.argv[1] == "fail" and jax.process_index() == 1: raise ValueError("on purpose")
"""


def listening():
    """The TCP ports at which anybody listens."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def soak(launches, folder):
    """What was left behind, in words; every third job fails on purpose."""
    left = []
    for number in range(launches):
        fails = number % 3 == 2
        mark = f"{folder}/{number}"
        kept = tempfile.gettempdir()
        before = set(pathlib.Path(kept).iterdir())
        process = start(
            folder, RANKS, "--nproc_per_node", 2, "--grace", 0.5, "--log_overwrite",
            args=["fail" if fails else "go"], MARK=mark, XLA_FLAGS="",
        )  # fmt: skip
        code, out, err = finish(process, timeout=120)
        if code != fails or "total [2.0, 2.0, 2.0]" not in out:
            left.append(f"launch {number} went wrong: exit code {code}\n{out}\n{err}")
            continue
        port = int(re.search(r"at 127.0.0.1:(\d+)", out)[1])
        if processes_with(f"MARK={mark}"):
            left.append(f"launch {number}: processes {processes_with(f'MARK={mark}')}")
        if port in listening():
            left.append(f"launch {number}: somebody listens at {port}")
        own = {p for p in set(pathlib.Path(kept).iterdir()) - before if "meshpar" in p.name}
        if own:
            left.append(f"launch {number}: files {own}")
        if {p.name for p in pathlib.Path(folder).iterdir()} != {"script.py", "log"}:
            left.append(f"launch {number}: files in {folder}")
    return left


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=200)
    launches = parser.parse_args().launches
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        left = soak(launches, pathlib.Path(folder))
    print(
        f"{launches} launches in {time.monotonic() - began:.0f} s left behind: {left or 'nothing'}"
    )
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
