"""The training example over processes: the same losses, Ctrl-C, and going on after a death."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import meshpar as mp
from tests.processes.launching import collect, command, environment, launch

STEPS, EVERY = 6, 2
OPTIONS = [
    *(
        "--batch-size",
        "4",
        "--seq-len",
        "8",
        "--warmup",
        "2",
        "--eval-batches",
        "1",
        "--sample",
        "2",
    ),
    *("--steps", str(STEPS), "--save-every", str(EVERY), "--losses", "losses"),
]
# Rank 1 dies in the middle of a step after the fourth, of which there is a checkpoint.
SCRIPT = """
import functools, os, pathlib, signal, sys, threading, time
from meshpar.examples import train_lm

train_lm.load_corpus = functools.partial(train_lm.load_corpus, max_bytes=300_000)

def die():
    while not pathlib.Path("losses").exists() or len(pathlib.Path("losses").read_text().splitlines()) < 4:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if "die" in sys.argv:
    train_lm.report = lambda *rest: None  # an unbroken run has shown it
if "die" in sys.argv and os.environ["PADDLE_TRAINER_ID"] == "1" and os.environ["MESHPAR_RESTART_COUNT"] == "0":
    threading.Thread(target=die, daemon=True).start()
sys.exit(train_lm.main([word for word in sys.argv[1:] if word != "die"]))
"""


def losses(folder):
    """Step -> loss; of two lines for a step the later one counts."""
    lines = (folder / "losses").read_text().splitlines()
    return {int(number): float(value) for number, value in map(str.split, lines)}


def cached(folder):
    """Most of the time is compilation, whose results the runs share."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def launched(folder, compiled, *args, options=()):
    env = cached(compiled)
    words = [*OPTIONS, *args]
    return launch(folder, SCRIPT, 2, devices=4, args=words, options=options, timeout=400, **env)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, compiled):
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, launched(folder, compiled, "--save", "run").ok()


def test_two_processes_have_the_losses_of_one(unbroken, tmp_path):
    folder, run = unbroken
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", *OPTIONS, "--save", "run"],
        cwd=tmp_path,
        env=environment(tmp_path, XLA_FLAGS=os.environ["XLA_FLAGS"]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path), losses(folder)
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-5)
    assert two[STEPS] < two[1]
    # One process prints.
    assert "validation loss" in run.stdout and run.stdout.count("checkpoint in run") == 1
    assert not re.search(r"loss|steps|ProcessMesh", run.logs[1]), run.logs[1]
    assert {path.name for path in (folder / "run").iterdir()} == {"2", "4", "6"}


def test_after_a_death_in_mid_step_the_losses_are_those_of_an_unbroken_run(
    unbroken, compiled, tmp_path
):
    auto = ["--save", "run", "--resume", "auto", "die"]
    run = launched(tmp_path, compiled, *auto, options=["--max_restart", "1"]).ok()
    assert "rank 1 failed first: killed by SIGKILL" in run.stderr
    assert "restart 1 of at most 1" in run.stderr
    begins = [int(n) for n in re.findall(r"^steps (\d+) to 6", run.logs[0], re.M)]
    assert len(begins) == 2 and begins[0] == 1 and begins[1] in (3, 5)
    folder, _ = unbroken
    assert losses(tmp_path) == losses(folder)  # bit for bit
    assert saved(tmp_path / "run") == saved(folder / "run")


def saved(path):
    """The newest checkpoint, on the host."""
    state = mp.checkpoint_contents(path)
    mp.load_state_dict(state, path)
    return {name: np.asarray(value).tolist() for name, value in state.items()}


@pytest.mark.exhaustive
def test_ctrl_c_stops_all_ranks_after_one_step(tmp_path):
    args = [*OPTIONS[:-6], "--steps", "1000000", "--losses", "losses", "--save", "run"]
    line = command(tmp_path, SCRIPT, 2, devices=4, args=args)
    with subprocess.Popen(
        line, env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        until = time.monotonic() + 200
        while not (tmp_path / "losses").exists() or len(losses(tmp_path)) < 3:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    run = collect(tmp_path, 2, process.returncode, out, err)
    assert run.code == 130, run
    done = int(re.search(r"Ctrl-C: stopped after (\d+) of 1000000 steps", run.stdout)[1])
    assert mp.checkpoint_contents(pathlib.Path(tmp_path, "run"))["done"] == done
    assert max(losses(tmp_path)) == done
