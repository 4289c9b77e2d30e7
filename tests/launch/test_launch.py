"""A job on one machine: how ranks begin, fail, are told to stop, and start again."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.launch.job import environ, finish, line, processes_with, run, start, wait_for
from tests.launch.soak import soak

WHO = """
import os, sys
rank, restart = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["MESHPAR_RESTART_COUNT"])
"""


def log(folder, rank):
    return (folder / "log" / f"workerlog.{rank}").read_text()


# --- how a rank begins ----------------------------------------------------------------------------


def test_a_script_runs_as_python_runs_it(tmp_path):
    (tmp_path / "beside.py").write_text("here = True\n")
    text = (
        WHO
        + """
import beside
print(rank, __name__, sys.argv, os.path.basename(__file__), sys.stdin.read() == "", flush=True)
print("to stderr", file=sys.stderr)
"""
    )
    code, out, err = run(tmp_path, text, "--nproc_per_node", 2, args=["--x", "y"])
    assert code == 0, err
    for rank in (0, 1):
        line = f"{rank} __main__ ['{tmp_path}/script.py', '--x', 'y'] script.py True"
        assert log(tmp_path, rank) == f"{line}\nto stderr\n"
    assert out == log(tmp_path, 0)  # rank 0 on the terminal, and nobody else
    assert re.search(r"job default: ranks 0 to 1 of 2, coordinator 127.0.0.1:\d+, logs in log", err)


def test_a_module_and_another_program(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n")
    import subprocess

    from tests.launch.job import environ

    done = subprocess.run(
        line("-m", script="pkg", args=["--rank", "7"]),
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.stdout == "__main__ pkg ['--rank', '7']\n", done.stderr
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho program $PADDLE_TRAINER_ID $1\n")
    program.chmod(0o755)
    done = subprocess.run(
        line("--nproc_per_node", 2, script="program", args=["z"]),
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.stdout, log(tmp_path, 1)) == ("program 0 z\n", "program 1 z\n")


def test_logs_are_added_to_or_overwritten(tmp_path):
    for word, overwrite in [("first", []), ("second", []), ("third", ["--log_overwrite"])]:
        run(tmp_path, f"print('{word}')", *overwrite)
        if word == "second":
            assert re.fullmatch(
                r"first\n--- job default, restart 0, \S+ \S+ ---\nsecond\n", log(tmp_path, 0)
            )
    assert log(tmp_path, 0) == "third\n"


# --- how it fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "code", "how", "tail"),
    [
        ("raise ValueError('boo')", 1, "exit code 1", "ValueError: boo"),
        ("sys.exit(7)", 7, "exit code 7", "before"),
        ("sys.exit('a text')", 1, "exit code 1", "a text"),
        ("raise KeyboardInterrupt", 130, "exit code 130", "KeyboardInterrupt"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL", "before"),
        ("os.abort()", 134, "killed by SIGABRT", "before"),
    ],
)
def test_the_first_that_fails_ends_all_and_gives_its_code(tmp_path, fails, code, how, tail):
    text = (
        WHO
        + f"print('before', flush=True)\nif rank == 1:\n    {fails}\nimport time; time.sleep(60)"
    )
    began = time.monotonic()
    found, _, err = run(tmp_path, text, "--nproc_per_node", 3)
    assert found == code and time.monotonic() - began < 10
    summary = err[err.index("rank 1 failed first") :]
    assert re.match(
        rf"rank 1 failed first: {how} after \d+\.\d s. The end of log/workerlog.1:", summary
    )
    assert f"    {tail}" in summary


def test_a_traceback_shows_the_script_only_and_exit_handlers_do_not_run(tmp_path):
    text = """
    import atexit, time
    atexit.register(time.sleep, 60)  # JAX's would wait for the other ranks
    def f():
        raise ValueError("boo")
    f()
    """
    code, _, _ = run(tmp_path, text)
    assert code == 1
    places = re.findall(r'File "(.*)", line \d+, in (\S+)', log(tmp_path, 0))
    script = str(tmp_path / "script.py")
    assert places == [(script, "<module>"), (script, "f")]


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(tmp_path):
    text = (
        WHO
        + """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"up{rank}", "w")
while not all(os.path.exists(f"up{r}") for r in (0, 1)): time.sleep(0.01)
if rank == 0: sys.exit(3)
time.sleep(60)
"""
    )
    began = time.monotonic()
    code, _, _ = run(tmp_path, text, "--nproc_per_node", 2, "--grace", 0.5)
    assert code == 3 and 0.5 < time.monotonic() - began < 10


CHILDREN = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"])
open("up" + os.environ["PADDLE_TRAINER_ID"], "w")
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(1)"])
def test_what_a_rank_started_ends_with_it(tmp_path, end):
    run(tmp_path, f"{CHILDREN}\n{end}", "--nproc_per_node", 2, MARK=str(tmp_path))
    assert not processes_with(f"MARK={tmp_path}")


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    text = f"{CHILDREN}\ntime.sleep(300)"
    process = start(tmp_path, text, "--nproc_per_node", 2, MARK=str(tmp_path))
    wait_for(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
    assert len(processes_with(f"MARK={tmp_path}")) >= 6  # launcher, guard, ranks and their children
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    wait_for(lambda: not processes_with(f"MARK={tmp_path}"), seconds=5)


# --- signals --------------------------------------------------------------------------------------

LISTENS = (
    WHO
    + """
import signal, time
got = []
def hear(number, frame):
    got.append(number)
    print("got", number, flush=True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, hear)
open(f"up{rank}", "w")
wanted = int(sys.argv[1])
while len(got) < wanted: time.sleep(0.01)
sys.exit(int(sys.argv[2]))
"""
)


@pytest.mark.parametrize(
    ("sends", "wanted", "code", "expected"),
    [
        ([signal.SIGINT], 1, 0, 0),
        ([signal.SIGTERM], 1, 130, 130),
        ([signal.SIGINT, signal.SIGINT], 2, 5, 5),
        ([signal.SIGINT] * 3, 9, 0, 128 + signal.SIGINT),  # the third one kills
    ],
)
def test_signals_are_passed_on_and_end_without_a_restart(tmp_path, sends, wanted, code, expected):
    process = start(
        tmp_path, LISTENS, "--nproc_per_node", 2, "--max_restart", 2, args=[wanted, code]
    )
    wait_for(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
    for i, number in enumerate(sends):
        process.send_signal(number)
        if i < 2:
            wait_for(lambda n=i + 1: all(log(tmp_path, r).count("got") >= n for r in (0, 1)))
    found, _, err = finish(process)
    assert found == expected, err
    assert "restart" not in err
    assert all(log(tmp_path, r).count("got") == min(len(sends), 2) for r in (0, 1))


# --- restarts -------------------------------------------------------------------------------------


def test_a_job_starts_again_as_a_whole_until_it_may_not(tmp_path):
    text = (
        WHO
        + """
print("run", restart, os.environ["MESHPAR_MAX_RESTART"], os.environ["PADDLE_MASTER"], flush=True)
open(f"{sys.argv[1]} {restart} {rank}", "w")
while not os.path.exists(f"{sys.argv[1]} {restart} 0"): pass
if rank == 1 and restart < int(sys.argv[2]): os.kill(os.getpid(), 9)
if restart < int(sys.argv[2]):
    import time; time.sleep(60)
"""
    )
    code, out, err = run(tmp_path, text, "--nproc_per_node", 2, "--max_restart", 2, args=["a", 2])
    assert code == 0, err
    for rank in (0, 1):
        runs = re.findall(r"^run (\d) 2 (\S+)$", log(tmp_path, rank), re.M)
        assert [r for r, _ in runs] == ["0", "1", "2"] and len({port for _, port in runs}) == 3
        assert re.search(r"^--- job default, restart 1, ", log(tmp_path, rank), re.M)
    assert out.count("run ") == 3
    assert (
        err.count("rank 1 failed first: killed by SIGKILL") == 2 and "restart 2 of at most 2" in err
    )

    code, _, err = run(tmp_path, text, "--nproc_per_node", 2, "--max_restart", 1, args=["b", 2])
    assert code == 137 and err.count("failed first") == 2


# --- ports and neighbours -------------------------------------------------------------------------


def test_a_port_that_is_taken_is_an_error_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(tmp_path, "print('never')", "--master", f"127.0.0.1:{port}")
    assert code == 2 and "Address already in use" in err and str(port) in err
    assert not (tmp_path / "log").exists()


def test_jobs_side_by_side_do_not_meet(tmp_path):
    text = (
        WHO
        + """
import socket, time
host, port = os.environ["PADDLE_MASTER"].split(":")
if rank == 0:
    with socket.create_server((host, int(port)), reuse_port=True) as server:
        other, _ = server.accept()
        print(sys.argv[1] == other.recv(9).decode())
else:
    for _ in range(500):
        try:
            other = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(0.02)
    other.sendall(sys.argv[1].encode())
"""
    )
    jobs = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        jobs.append(start(tmp_path / str(i), text, "--nproc_per_node", 2, args=[i]))
    for job in jobs:
        code, out, err = finish(job)
        assert (code, out) == (0, "True\n"), err


def test_launches_leave_nothing_behind(tmp_path):
    """`make soak` does it 200 times."""
    assert soak(launches=5, folder=tmp_path) == []


def test_the_console_command(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('up')")
    code = "import sys; from meshpar.launch.console import main; sys.exit(main())"

    def meshpar(*argv):
        return subprocess.run(
            [sys.executable, "-c", code, *argv],
            cwd=tmp_path,
            env=environ(),
            capture_output=True,
            check=False,
            text=True,
        )

    assert meshpar("launch", str(script)).stdout == "up\n"
    assert re.fullmatch(r"meshpar \d+\.\d+\.\d+\n", meshpar("--version").stdout)
    assert "launch " in meshpar().stdout and "doctor " in meshpar("-h").stdout
    wrong = meshpar("lunch")
    assert wrong.returncode == 2 and "there is no command 'lunch'" in wrong.stderr
    doctor = meshpar("doctor")
    assert doctor.returncode == 0, doctor.stderr
    for words in ("jaxlib", "JAX_PLATFORMS", "cpu", "An all-reduce over 8 device(s) is right"):
        assert words in doctor.stdout


@pytest.mark.parametrize("first", [0, 1])
def test_the_summary_names_the_cause_and_not_a_survivor(tmp_path, first):
    """A rank that fails tells the others, who may be gone before it is."""
    text = (
        WHO
        + """
import time
first, other = int(sys.argv[1]), 1 - int(sys.argv[1])
if rank == first:
    while not os.path.exists("gone"): time.sleep(0.01)
    time.sleep(0.3)
    raise ValueError("the cause")
print(f"meshpar: rank {other} ends: rank {first} failed: ValueError: the cause")
open("gone", "w")
sys.exit(1)
"""
    )
    code, _, err = run(tmp_path, text, "--nproc_per_node", 2, args=[first])
    assert code == 1 and f"rank {first} failed first" in err and "    ValueError: the cause" in err
