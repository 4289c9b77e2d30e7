"""Processes that are missing, late, wrong or killed: an error that names them, and never a hang."""

import signal

import pytest

from tests.collectives.jobs import run_ranks

BEGIN = """
import os, signal, sys, threading, time
import jax.numpy as jnp, numpy as np
import meshpar as mp
from tests.processes.ranks import give
rank = int(os.environ["PADDLE_TRAINER_ID"])
def error_of(call):
    start = time.monotonic()
    try:
        call()
    except mp.CollectiveError as error:
        return type(error).__name__, str(error), time.monotonic() - start
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""
STARTED = BEGIN + "mp.init_parallel_env()\nx = jnp.arange(4.0) + rank\n"


def test_a_rank_that_never_comes_is_named(tmp_path):
    script = BEGIN + "give(error=error_of(lambda: mp.init_parallel_env(timeout=5)))"
    ranks = run_ranks(tmp_path, script, 4, missing=[1, 3])
    for rank in (0, 2):
        kind, text, seconds = ranks[rank].given["error"]
        assert kind == "CollectiveError" and "ranks 1, 3 of 4 did not come within 5 s" in text
        assert seconds < 11


def test_a_missing_rank_0_is_named(tmp_path):
    script = BEGIN + "give(error=error_of(lambda: mp.init_parallel_env(timeout=2)))"
    ranks = run_ranks(tmp_path, script, 2, missing=[0])
    assert "rank 0 of 2 did not come within 2 s" in ranks[1].given["error"][1]


def test_a_rank_killed_before_within_and_after_a_collective(tmp_path):
    """One job: rank 3 dies before a call, and its peers go on without it; then rank 2 within one."""
    script = (
        STARTED
        + """
first = mp.new_group([0, 1, 2])
if rank == 3:
    killed()
before = error_of(lambda: mp.all_reduce(x))
mp.all_reduce(x, group=first)
if rank == 2:
    threading.Timer(1.0, killed).start()
    time.sleep(30)
within = error_of(lambda: mp.all_reduce(x, group=first))
after = error_of(lambda: mp.all_reduce(x, group=first))
pair = mp.all_reduce(x, group=mp.new_group([0, 1]))
give(before=before, within=within, after=after, pair=np.asarray(pair))
if rank == 0:
    time.sleep(2)  # with rank 0 the others end, too, and have to be done by then
"""
    )
    ranks = run_ranks(tmp_path, script, 4)
    assert ranks[2].code == ranks[3].code == -signal.SIGKILL
    for rank in (0, 1):
        given = ranks[rank].given
        assert given["before"][0] == "PeerError" and "rank 3 died" in given["before"][1]
        for when in ("within", "after"):
            kind, text, seconds = given[when]
            assert kind == "PeerError" and "rank 2 died" in text and seconds < 10
            assert "all_reduce(ReduceOp.SUM) of float32[4]" in text
        assert given["pair"].tolist() == [1, 3, 5, 7]
        # A job that has lost ranks has failed, whatever the script made of it.
        assert ranks[rank].code == 1 and "rank 3 died" in ranks[rank].output


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_ends_all(tmp_path, failing):
    script = (
        STARTED
        + f"""
mp.all_reduce(x)
if rank == {failing}:
    raise KeyError("mine")
mp.all_reduce(x)
"""
    )
    ranks = run_ranks(tmp_path, script, 3)
    assert {rank.code for rank in ranks.values()} == {1}
    for rank, run in ranks.items():
        told = "KeyError: 'mine'" if rank == failing else f"rank {failing} failed: KeyError: 'mine'"
        # The first of the others may be gone before the last has heard of the cause itself.
        assert told in run.output or "PeerError" in run.output
        assert "Check failure" not in run.output


def test_the_watchdog_says_who_is_behind_and_ends_the_process(tmp_path):
    script = (
        STARTED
        + """
mp.all_reduce(x)
if rank == 1:
    mp.all_gather([], x, group=mp.new_group([1]))
    time.sleep(30)
mp.broadcast(x, 0)
"""
    )
    ranks = run_ranks(
        tmp_path,
        script,
        2,
        MESHPAR_REPORT_SECONDS="1",
        PADDLE_PG_TIMEOUT="3000",
        MESHPAR_TICK_SECONDS="0.2",
    )
    place = "rank 1 has not come; it is after call 1, all_reduce(ReduceOp.SUM) of float32[4]"
    assert (
        f"waited 1 s in call 2, broadcast(src=0) of float32[4] of ranks [0, 1]: {place}"
        in ranks[0].output
    )
    assert "rank 0 ends: it has waited 3 s in call 2, broadcast(src=0)" in ranks[0].output
    assert ranks[0].code == ranks[1].code == 1


def test_a_rank_that_ends_early_is_named(tmp_path):
    script = (
        STARTED
        + """
mp.all_reduce(x)
if rank == 1:
    sys.exit(0)
mp.all_reduce(x)
"""
    )
    ranks = run_ranks(tmp_path, script, 2, MESHPAR_GRACE_SECONDS="1", MESHPAR_TICK_SECONDS="0.2")
    assert ranks[0].code == 1 and "rank 1 has ended its program" in ranks[0].output


def test_late_ranks_and_other_calls(tmp_path):
    """One job: a rank late by 3 s, with and without a time limit, and ranks that make other calls."""
    script = (
        STARTED
        + """
def late(seconds, call):
    mp.barrier()
    if rank == 1:
        time.sleep(seconds)
    return call()
start = time.monotonic()
late(3, lambda: mp.all_reduce(x))
waited = time.monotonic() - start
timed = late(3, lambda: error_of(lambda: mp.all_reduce(x, timeout=1)))
again = np.asarray(mp.all_reduce(x, timeout=30))
group = mp.new_group([0, 1], timeout=1)
of_group = late(3, lambda: error_of(lambda: mp.broadcast(x, 0, group)))
task = mp.all_reduce(x, sync_op=False, timeout=1) if rank == 0 else None
of_task = error_of(lambda: task.wait()) if rank == 0 else None
if rank == 1:
    time.sleep(2)
    mp.all_reduce(x)
mp.barrier()
shapes = error_of(lambda: mp.all_reduce(jnp.ones(5 + rank)))
dtypes = error_of(lambda: mp.all_gather([], jnp.ones(4, [jnp.int32, jnp.float32][rank])))
ops = error_of(lambda: mp.all_reduce(jnp.ones(7), mp.ReduceOp.MAX) if rank else mp.broadcast(jnp.ones(7), 0))
objects = error_of(lambda: mp.all_gather_object([], 1) if rank else mp.all_reduce(x[:1]))
roots = error_of(lambda: mp.broadcast(jnp.ones(8), rank))
lists = error_of(lambda: mp.broadcast_object_list([1] * (1 + rank), 0))
sizes = error_of(lambda: mp.alltoall_single(None, x, [1, 3], [3 - rank, 2]))
message = error_of(lambda: mp.send(x, 1) if rank == 0 else mp.recv(x[:3], 0))
fine = np.asarray(mp.all_reduce(x))
give(**{k: v for k, v in locals().items() if k in (
    "waited", "timed", "again", "of_group", "of_task", "shapes", "dtypes", "ops", "objects", "roots",
    "lists", "sizes", "message", "fine")})
"""
    )
    ranks = run_ranks(tmp_path, script, 2)
    zero, one = ranks[0].given, ranks[1].given
    assert zero and one, ranks[0].output + ranks[1].output
    assert 2.5 < zero["waited"] < 10
    kind, text, seconds = zero["timed"]
    assert kind == "CollectiveTimeout" and 0.9 < seconds < 2.5
    assert "rank 1 has not come; it is after call 3, barrier()" in text
    assert one["timed"] is None  # the call that rank 0 gave up was still there to meet
    assert zero["of_group"][0] == "CollectiveTimeout"
    assert zero["of_task"][0] == "CollectiveTimeout" and "all_reduce(tensor)" in zero["of_task"][1]
    for given in (zero, one):
        assert given["again"].tolist() == given["fine"].tolist() == [1, 3, 5, 7]
        for name, shown in {
            "shapes": "rank 0: all_reduce(ReduceOp.SUM) of float32[5]; rank 1: all_reduce(ReduceOp.SUM) of float32[6]",
            "dtypes": "rank 0: all_gather() of int32[4]; rank 1: all_gather() of float32[4]",
            "ops": "rank 0: broadcast(src=0) of float32[7]; rank 1: all_reduce(ReduceOp.MAX) of float32[7]",
            "roots": "rank 0: broadcast(src=0) of float32[8]; rank 1: broadcast(src=1) of float32[8]",
            "message": "rank 0: message() of float32[4]; rank 1: message() of float32[3]",
            "sizes": "rank 1 sends 1 row(s) to rank 0, which expects 2",
        }.items():
            assert given[name][0] == "CollectiveError" and shown in given[name][1], (
                name,
                given[name],
            )
    assert "rank 1 is in another call" in zero["objects"][1] or "given call" in zero["objects"][1]
    # Whoever asks second may hear that the first has raised already.
    assert "rank 0 is in another call" in one["objects"][1] or "given call" in one["objects"][1]
    assert (
        zero["lists"] is None and "rank 0 gives 1 object(s), and this list has 2" in one["lists"][1]
    )


def test_a_call_that_only_one_rank_knows_does_not_hang(tmp_path):
    """Rank 0 has made this call before and is in XLA with it; rank 1 makes a new one and raises."""
    script = (
        STARTED
        + """
mp.all_reduce(x)
give(error=error_of(lambda: mp.all_reduce(x if rank == 0 else x[:2])))
time.sleep(30)
"""
    )
    ranks = run_ranks(tmp_path, script, 2, MESHPAR_GRACE_SECONDS="1", MESHPAR_TICK_SECONDS="0.2")
    assert "rank 0 is in another call 2" in ranks[1].given["error"][1]
    assert "rank 0 ends: it has waited" in ranks[0].output
    assert "rank 1 has given call 2 up after an error" in ranks[0].output
    assert ranks[0].code == ranks[1].code == 1


@pytest.mark.parametrize("end", ["", "mp.destroy_process_group()"], ids=["exit", "leave"])
def test_a_process_that_ends_lets_the_late_ones_meet_its_calls(tmp_path, end):
    """Rank 1 starts calls, waits for none of them and ends; rank 0 comes to them a second later."""
    script = (
        STARTED
        + f"""
mp.all_reduce(x, sync_op=False).wait()
mp.barrier()
if rank == 0:
    time.sleep(1)
    totals = [mp.all_reduce(x + i) for i in range(5)]
    give(totals=[float(y[1]) for y in totals], got=float(mp.recv(x, 1)[1]))
else:
    for i in range(5):
        mp.all_reduce(x + i, sync_op=False)
    mp.isend(x, 0)
{end}
"""
    )
    ranks = run_ranks(tmp_path, script, 2, MESHPAR_GRACE_SECONDS="1", MESHPAR_TICK_SECONDS="0.2")
    assert ranks[0].code == ranks[1].code == 0, ranks[0].output + ranks[1].output
    assert ranks[0].given == {"totals": [3.0, 5.0, 7.0, 9.0, 11.0], "got": 2.0}


def test_a_process_that_ends_does_not_wait_for_ranks_that_have_gone(tmp_path):
    script = (
        STARTED
        + """
mp.all_reduce(x, sync_op=False).wait()
if rank == 0:
    mp.all_reduce(x, sync_op=False)
    mp.isend(x, 1)
"""
    )
    ranks = run_ranks(tmp_path, script, 2, timeout=40)
    assert ranks[0].code == ranks[1].code == 0, ranks[0].output + ranks[1].output


def test_a_process_that_ends_does_not_wait_for_a_call_that_it_gave_up(tmp_path):
    script = (
        STARTED
        + """
mp.all_reduce(x)
if rank == 0:
    given_up = error_of(lambda: mp.all_reduce(x, timeout=0.5))
    from meshpar.collectives.between.ending import finish
    from meshpar.collectives.between.world import here
    start = time.monotonic()
    finish(here())
    give(given_up=given_up, seconds=time.monotonic() - start)
else:
    time.sleep(4)
"""
    )
    ranks = run_ranks(tmp_path, script, 2)
    assert ranks[0].given["given_up"][0] == "CollectiveTimeout"
    assert ranks[0].given["seconds"] < 1
    assert ranks[0].code == ranks[1].code == 0, ranks[0].output + ranks[1].output


GOES_ON = """
for _ in range(1000):
    mp.all_reduce(x)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("when", ["going on", "at the end"])
def test_known_calls_that_ranks_mix_up_do_not_give_wrong_numbers_for_long(tmp_path, when):
    """A sum meets a maximum of the same shape: XLA cannot tell, and each rank gets something."""
    script = (
        STARTED
        + """
SUM, MAX = mp.ReduceOp.SUM, mp.ReduceOp.MAX
for op in (SUM, MAX):
    mp.all_reduce(x, op)
for _ in range(50):
    mp.all_reduce(x)
mp.all_reduce(x, MAX if rank else SUM)
mp.all_reduce(x, SUM if rank else MAX)
"""
        + GOES_ON * (when == "going on")
    )
    tick = "0.2" if when == "going on" else "60"
    ranks = run_ranks(tmp_path, script, 2, MESHPAR_TICK_SECONDS=tick)
    outputs = [ranks[rank].output for rank in (0, 1)]
    told = " ends: the ranks have not made the same calls of ranks [0, 1]: "
    if when == "going on":
        first = (
            "call 53 was all_reduce(ReduceOp.{}) of float32[4] here, and all_reduce(ReduceOp.{})"
        )
        shown = (first.format("SUM", "MAX"), first.format("MAX", "SUM"))
        assert any(told + line in output for line, output in zip(shown, outputs, strict=True))
        assert all(told.removeprefix(" ends: ") in output for output in outputs)
        assert ranks[0].code == ranks[1].code == 1
    else:  # whoever looks last can tell
        assert any(f"{rank}{told}" in outputs[rank] for rank in (0, 1)), outputs
        assert max(rank.code for rank in ranks.values()) == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_has_ended_does_not_wait_for_one_that_fails(tmp_path, failing):
    script = (
        STARTED
        + f"""
mp.all_reduce(x)
if rank == {failing}:
    time.sleep(2)
    raise KeyError("mine")
"""
    )
    ranks = run_ranks(tmp_path, script, 2, timeout=30)
    assert ranks[0].code == ranks[1].code == 1
    assert f"rank {failing} failed: KeyError: 'mine'" in ranks[1 - failing].output
