"""Launchers as processes, and what they may not leave behind."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

ROOT = pathlib.Path(__file__).parents[2]
started = []  # launchers


def line(*options, script, args=()):
    return [
        sys.executable,
        "-m",
        "meshpar.launch",
        *map(str, options),
        str(script),
        *map(str, args),
    ]


def write(folder, text, name="script.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def environ(**more):
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "MESHPAR_"))}
    return {**own, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


def start(folder, text, *options, args=(), **env):
    """A launcher that runs in a folder, in a session of its own."""
    script = write(folder, text)
    process = subprocess.Popen(
        line(*options, script=script, args=args),
        cwd=folder,
        env=environ(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def finish(process, timeout=120):
    """(exit code, stdout, stderr) of a launcher; one that hangs is killed, and the test fails."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def run(folder, text, *options, args=(), **env):
    return finish(start(folder, text, *options, args=args, **env))


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def processes_with(mark):
    """The processes alive whose environment has a variable of this value."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                alive = "State:\tZ" not in (folder / "status").read_text()
                if alive and mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it has ended meanwhile, or is another user's
                continue
    return found
