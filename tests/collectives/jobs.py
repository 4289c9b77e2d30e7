"""Processes without a launcher, which would end the others when one fails."""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import textwrap
from typing import Any

from tests.processes.launching import ROOT, environment


@dataclasses.dataclass(frozen=True)
class Rank:
    """How one process went: its exit code (negative: the signal), its output, what it gave."""

    code: int
    output: str
    given: dict[str, Any]


def run_ranks(folder, script, count, *, timeout=90, missing=(), **env):
    """Runs the text of a script as `count` ranks, but for those that are missing.

    Returns:
      Rank -> how it went.
    """
    path = pathlib.Path(folder, "script.py")
    path.write_text(textwrap.dedent(script))
    with socket.create_server(("127.0.0.1", 0)) as free:
        master = f"127.0.0.1:{free.getsockname()[1]}"
    common = environment(folder, PADDLE_MASTER=master, PADDLE_TRAINERS_NUM=str(count), **env)
    with contextlib.ExitStack() as stack:
        running = {}
        for rank in set(range(count)) - set(missing):
            log = stack.enter_context(open(pathlib.Path(folder, f"log.{rank}"), "w"))
            running[rank] = subprocess.Popen(
                [sys.executable, str(path)],
                env={**common, "PADDLE_TRAINER_ID": str(rank)},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, running[rank])
        for process in running.values():
            process.wait(timeout)
    return {rank: _collected(folder, rank, process) for rank, process in running.items()}


def _end(process):
    if process.poll() is None:
        process.kill()
        process.wait()


def _collected(folder, rank, process):
    lines = pathlib.Path(folder, f"log.{rank}").read_text().splitlines()
    given = pathlib.Path(os.fspath(folder), "results", str(rank))
    return Rank(
        process.returncode,
        "\n".join(line for line in lines if "peer ranks" not in line),
        pickle.loads(given.read_bytes()) if given.exists() else {},
    )
