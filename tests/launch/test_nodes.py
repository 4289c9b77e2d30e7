"""A job over several nodes: launchers that meet, stop together, and start again."""

import os
import re
import signal
import time

import pytest

from meshpar.launch.ports import free_ports
from tests.launch.job import finish, start, wait_for

TEXT = """
import os, sys, time
rank, restart = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["MESHPAR_RESTART_COUNT"])
names = ["PADDLE_TRAINERS_NUM", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_NNODES"]
print("run", restart, rank, *(os.environ[n] for n in names), os.environ["PADDLE_LOCAL_RANK"], flush=True)
open(f"../up {restart} {rank}", "w")
fails, survivors = int(sys.argv[1]), int(sys.argv[2])
while not all(os.path.exists(f"../up {restart} {r}") for r in range(survivors)): time.sleep(0.01)
if restart < 1 and fails >= 0:
    if rank == fails: sys.exit(7)
    time.sleep(60)
"""


def nodes(tmp_path, *options, count=2, args=(-1, 4), each=()):
    """That many launchers, each in a folder of its own."""
    (port,) = free_ports("127.0.0.1", 1)
    jobs = []
    for i in range(count):
        folder = tmp_path / str(i)
        folder.mkdir()
        own = each[i] if each else ["--rank", i]
        jobs.append(start(folder, TEXT, "--master", f"127.0.0.1:{port}", *options, *own, args=args))
    return jobs


def runs(tmp_path):
    """Every line that a rank printed, as words."""
    found = []
    for log in sorted(tmp_path.glob("*/log/workerlog.*")):
        found += [line.split()[1:] for line in re.findall(r"^run .*", log.read_text(), re.M)]
    return sorted(found)


@pytest.mark.parametrize("numbered", [True, False], ids=["ranks", "first come"])
def test_ranks_of_all_nodes_make_one_world(tmp_path, numbered):
    each = (
        [["--rank", 0, "--nproc_per_node", 1], ["--rank", 1]]
        if numbered
        else [["--nproc_per_node", 1], []]
    )
    jobs = nodes(tmp_path, "--nnodes", 2, "--nproc_per_node", 3, each=each)
    ends = [finish(job) for job in jobs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    found = runs(tmp_path)
    assert [int(words[1]) for words in found] == [0, 1, 2, 3]
    # The same size, master, endpoints and number of nodes for all.
    assert len({tuple(words[2:6]) for words in found}) == 1
    assert found[0][2] == "4" and found[0][5] == "2" and len(set(found[0][4].split(","))) == 4
    if numbered:
        assert [words[6] for words in found] == ["0", "0", "1", "2"]
    assert (
        sum(out.count("run 0 0 ") for _, out, _ in ends) == 1
    )  # rank 0's terminal is that of node 0
    assert sum(out.count("run") for _, out, _ in ends) == 1


def test_a_failure_on_one_node_ends_all_and_starts_all_again(tmp_path):
    jobs = nodes(tmp_path, "--nnodes", 2, "--nproc_per_node", 2, "--max_restart", 1, args=(3, 4))
    for job in jobs:
        code, _, err = finish(job)
        assert (
            code == 0
            and "rank 3 failed first: exit code 7" in err
            and "restart 1 of at most 1" in err
        )
    found = runs(tmp_path)
    assert [(w[0], w[1]) for w in found] == [(str(k), str(r)) for k in (0, 1) for r in range(4)]
    assert len({w[3] for w in found}) == 2  # one coordinator a run


def test_the_exit_code_is_the_same_on_all_nodes(tmp_path):
    jobs = nodes(tmp_path, "--nnodes", 2, "--nproc_per_node", 1, args=(1, 2))
    assert [finish(job)[0] for job in jobs] == [7, 7]


def test_a_node_that_is_lost_is_left_out_where_fewer_nodes_will_do(tmp_path):
    options = ["--nnodes", "1:3", "--nproc_per_node", 1, "--max_restart", 1, "--elastic_timeout", 2]
    jobs = nodes(tmp_path, *options, count=3, args=(9, 2))
    wait_for(lambda: all((tmp_path / f"up 0 {rank}").exists() for rank in range(3)))
    os.kill(jobs[2].pid, signal.SIGKILL)
    finish(jobs[2])
    for job in jobs[:2]:
        code, _, err = finish(job)
        assert code == 0 and "node 2 has gone" in err, err
    again = [words for words in runs(tmp_path) if words[0] == "1"]
    assert [words[1:3] for words in again] == [["0", "2"], ["1", "2"]]


def test_without_node_0_there_is_no_job(tmp_path):
    jobs = nodes(tmp_path, "--nnodes", 2, "--nproc_per_node", 1, "--max_restart", 3, args=(9, 2))
    wait_for(lambda: all((tmp_path / f"up 0 {rank}").exists() for rank in range(2)))
    os.kill(jobs[0].pid, signal.SIGKILL)
    finish(jobs[0])
    code, _, err = finish(jobs[1])
    assert code == 2 and "node 0 has gone, its launcher with it" in err


def test_strangers_and_doubles_are_turned_away(tmp_path):
    each = [
        ["--rank", 0],
        ["--rank", 0, "--job_id", "other"],
        ["--rank", 1, "--job_id", "other"],
        ["--rank", 1],
    ]
    jobs = nodes(tmp_path, "--nnodes", 2, count=4, args=(-1, 2), each=each)
    ends = [finish(job) for job in jobs]
    assert sorted(code for code, _, _ in ends) == [0, 0, 2, 2]
    text = " ".join(err for _, _, err in ends)
    assert "cannot listen at --master" in text and "here meets the job" in text


def test_ctrl_c_while_waiting_for_nodes(tmp_path):
    (job,) = nodes(tmp_path, "--nnodes", 2, count=1, args=(-1, 2))
    time.sleep(1)
    job.send_signal(signal.SIGINT)
    code, _, err = finish(job)
    assert code == 130 and "SIGINT while waiting for other nodes" in err
