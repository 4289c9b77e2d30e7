"""`mp.spawn`: functions as processes, and how their failures come back."""

import os
import signal
import subprocess
import sys
import time

import pytest

import meshpar as mp
from tests.launch import spawned
from tests.launch.job import environ, processes_with, wait_for


@pytest.fixture(autouse=True)
def _few_devices(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_each_process_knows_its_rank(tmp_path):
    before = dict(os.environ)
    context = mp.spawn(spawned.write, (tmp_path, "hello"), nprocs=3, devices="0-5")
    assert [p.exitcode for p in context.processes] == [0, 0, 0]
    texts = [(tmp_path / str(rank)).read_text().splitlines() for rank in range(3)]
    assert texts[0] == texts[1] == texts[2]
    text, size, master, restart, flags = texts[0]
    assert (text, size, restart) == ("hello", "3", "0") and master.startswith("127.0.0.1:")
    assert flags == "--xla_force_host_platform_device_count=2"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "rank 1 raised ValueError: boo"),
        ("unpicklable", 1, "rank 1 raised OwnError: 3 things"),
        ("exit", 5, "rank 1 raised SystemExit: 5"),
        ("kill", -9, "rank 1 was killed: SIGKILL"),
    ],
)
def test_a_failure_ends_all_and_comes_back(how, code, words):
    began = time.monotonic()
    with pytest.raises(mp.SpawnError) as caught:
        mp.spawn(spawned.fail, (how,), nprocs=3)
    assert time.monotonic() - began < 20
    error = caught.value
    assert str(error).startswith(words) and (error.rank, error.exit_code) == (1, code)
    if how == "raise":
        assert isinstance(error.__cause__, ValueError)
        for part in (
            "KeyError: 'missing'",
            "in fail\n",
            "The above exception was the direct cause",
        ):
            assert part in error.remote and part in str(error)
        assert "in _run" not in error.remote
    elif how == "unpicklable":
        assert error.__cause__ is None and 'raise OwnError(3, "things")' in error.remote


def test_join_by_hand(tmp_path):
    context = mp.spawn(time.sleep, (1.5,), nprocs=2, join=False, daemon=True)
    assert all(p.daemon for p in context.processes)
    assert context.join(timeout=0.01) is False
    assert context.join() is True and context.join() is True


def test_nothing_outlives_a_failure_or_a_kill(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path))
    context = mp.spawn(spawned.leave_a_child, (tmp_path,), nprocs=2, join=False)
    wait_for(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
    os.kill(context.processes[0].pid, signal.SIGKILL)
    with pytest.raises(mp.SpawnError, match="rank 0 was killed: SIGKILL"):
        context.join()
    ours = {os.getpid(), os.getppid()}
    assert not [p for p in processes_with(f"MARK={tmp_path}") if p not in ours and _is_ours(p)]


def _is_ours(pid):
    """The resource tracker of `multiprocessing` lives as long as this process."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" not in file.read()


def test_processes_compute_together(tmp_path):
    mp.spawn(spawned.total, (tmp_path,), nprocs=2, devices="0-3")
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["[6, 6, 6]"] * 2


def test_functions_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, meshpar as mp\n"
        "def f(word): os.write(1, (word + os.environ['PADDLE_TRAINER_ID'] + '\\n').encode())\n"
        "if __name__ == '__main__': mp.spawn(f, ('rank ',), nprocs=2)\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=environ(), capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"nproc": 2}, ValueError, r"spawn\(nproc=...\): the options are start_method"),
        ({"start_method": "fork"}, ValueError, "JAX's threads do not survive a fork"),
        ({"backend": "nccl"}, ValueError, r"on cpu it is 'auto' or 'gloo'"),
        ({"gpus": "0,1"}, ValueError, r"spawn\(gpus='0,1'\): 3 processes need as many"),
        ({"devices": "0-3"}, ValueError, r"4 device\(s\).* cannot be shared out equally to 3"),
        ({"ips": "a,b"}, ValueError, "it starts processes on this machine"),
        ({"xpus": "0"}, ValueError, r"spawn\(xpus=...\)"),
    ],
)
def test_options_that_do_not_fit(options, error, words):
    with pytest.raises(error, match=words):
        mp.spawn(time.sleep, (0,), nprocs=3, **options)


def test_what_cannot_be_sent_or_counted():
    with pytest.raises(TypeError, match="define it at the top of a module or script"):
        mp.spawn(lambda: None, nprocs=1)
    with pytest.raises(ValueError, match=r"spawn\(nprocs=0\): at least 1, or -1"):
        mp.spawn(time.sleep, (0,), nprocs=0)


def test_forkserver(tmp_path):
    mp.spawn(spawned.write, (tmp_path, "x"), nprocs=1, start_method="forkserver")
    assert (tmp_path / "0").exists()
