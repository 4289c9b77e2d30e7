"""Runs a script as several processes under the launcher, for tests."""

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
from typing import Any

from meshpar.xla_flags import with_host_devices
from tests.quick_compilation import FLAGS

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Run:
    """How a job went.

    Attributes:
      code: the launcher's exit code.
      stdout: its output, which is that of rank 0.
      stderr: what the launcher itself says.
      logs: the log of each rank, without most of gloo's lines.
      results: what each rank handed over with `give`.
    """

    code: int
    stdout: str
    stderr: str
    logs: list[str]
    results: list[dict[str, Any]]

    def ok(self) -> "Run":
        """This run, if all went well; else the test fails with all that was printed."""
        text = "\n".join([self.stdout, self.stderr, *self.logs])
        assert self.code == 0, f"exit code {self.code}\n{text}"
        return self


def command(folder, script, processes, *, devices=1, options=(), args=()):
    """The command line that launches a script, whose text goes into a file of the folder."""
    path = pathlib.Path(folder, "script.py")
    path.write_text(textwrap.dedent(script))
    own = ["--nproc_per_node", str(processes), "--devices", f"0-{processes * devices - 1}"]
    log = ["--log_dir", str(pathlib.Path(folder, "log"))]
    return [sys.executable, "-m", "meshpar.launch", *own, *log, *options, str(path), *args]


def environment(folder, **more):
    """The environment of a launcher in tests: quick compilation, and where results go."""
    results = pathlib.Path(folder, "results")
    results.mkdir(exist_ok=True)
    flags = " ".join(FLAGS)
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": with_host_devices(flags, 1),
        "MESHPAR_TEST_RESULTS": str(results),
        **more,
    }


def collect(folder, processes, code, stdout, stderr):
    """The `Run` of a job that has ended."""
    logs, results = [], []
    for rank in range(processes):
        log = pathlib.Path(folder, "log", f"workerlog.{rank}")
        lines = log.read_text().splitlines() if log.exists() else []
        logs.append("\n".join(x for x in lines if "peer ranks" not in x))
        given = pathlib.Path(folder, "results", str(rank))
        results.append(pickle.loads(given.read_bytes()) if given.exists() else {})
    return Run(code, stdout, stderr, logs, results)


def launch(folder, script, processes=2, *, devices=1, options=(), args=(), timeout=120, **env):
    """Runs the text of a script as `processes` processes of `devices` CPU devices each.

    Args:
      folder: an empty folder, for the script, the logs and the results.
      options: more options of the launcher.
      args: arguments of the script.
      timeout: seconds, after which everything is killed and the test fails.
      **env: environment variables.
    """
    line = command(folder, script, processes, devices=devices, options=options, args=args)
    done = subprocess.run(
        line,
        env=environment(folder, **env),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return collect(folder, processes, done.returncode, done.stdout, done.stderr)
