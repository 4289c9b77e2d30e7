"""Collectives between processes against numpy: one job for many checks, which saves start-up."""

import pytest

from tests.collectives.jobs import run_ranks

SCRIPT = """
import jax
jax.config.update("jax_enable_x64", {wide})
import meshpar as mp
from tests.collectives import between
from tests.processes.ranks import give
world = mp.init_parallel_env()
between.run([*between.by_name(), *between.{rows}(world)], give)
mp.destroy_process_group()
"""


@pytest.mark.parametrize(
    "processes, devices, wide, rows, least",
    [(2, 1, True, "every_dtype", 250), (4, 2, False, "few_dtypes", 60)],
    ids=["two", "four_of_two_devices"],
)
def test_every_collective_equals_numpy(launched, processes, devices, wide, rows, least):
    run = launched(
        SCRIPT.format(wide=wide, rows=rows), processes, devices=devices, timeout=400
    ).ok()
    for rank, given in enumerate(run.results):
        assert not given["failed"], f"rank {rank}\n" + "\n".join(
            f"{name}\n{text}" for name, text in [*given["failed"].items()][:5]
        )
        assert given["count"] > least


def test_a_thousand_groups_leave_nothing_behind(launched):
    """Groups of the same ranks share their programs, and what they agreed on."""
    run = launched(
        """
        import resource
        import numpy as np
        import meshpar as mp
        from meshpar.collectives.between.world import here
        from tests.processes.ranks import give
        mp.init_parallel_env()
        x = np.ones(1000, np.float32)
        def rounds(count):
            for i in range(count):
                group = mp.new_group([0, 1])
                assert mp.all_reduce(x, group=group)[0] == 2
                mp.destroy_process_group(group)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(here().programs), len(here().channels)
        give(before=rounds(100), after=rounds(1000))
        """,
        timeout=200,
    ).ok()
    for given in run.results:
        (memory, *counts), (memory_after, *counts_after) = given["before"], given["after"]
        assert counts == counts_after == [1, 1]
        assert memory_after - memory < 20_000  # KiB


def test_a_job_can_be_left_and_joined_again(launched):
    run = launched(
        """
        import numpy as np
        import meshpar as mp
        from tests.processes.ranks import give
        assert (mp.get_rank(), mp.get_world_size(), mp.is_initialized()) == (0, 1, False)
        totals = []
        for job in range(3):
            world = mp.init_parallel_env()
            assert mp.init_parallel_env() == world
            totals.append(float(mp.all_reduce(np.float32(mp.get_rank() + job))))
            mp.destroy_process_group()
            assert not mp.is_initialized()
        try:
            mp.all_reduce(np.float32(1))
        except mp.CollectiveError as error:
            give(totals=totals, error=str(error))
        """,
    ).ok()
    for given in run.results:
        assert given["totals"] == [1, 3, 5] and "mp.init_parallel_env()" in given["error"]


def test_a_job_that_jax_distributed_has_started_is_joined(launched):
    run = launched(
        """
        import numpy as np
        import meshpar as mp
        from tests.processes.ranks import give, start
        start()
        world = mp.init_parallel_env()
        give(total=float(mp.all_reduce(np.float32(mp.get_rank()))), ranks=world.ranks)
        """,
        processes=3,
    ).ok()
    assert [given["total"] for given in run.results] == [3, 3, 3]
    assert run.results[0]["ranks"] == (0, 1, 2)


def test_the_gloo_functions_join_and_leave_a_job(tmp_path):
    """Whatever the environment says."""
    script = """
import os
import numpy as np
import meshpar as mp
from tests.processes.ranks import give
rank, master = int(os.environ["PADDLE_TRAINER_ID"]), os.environ["PADDLE_MASTER"]
for name in [name for name in os.environ if name.startswith("PADDLE")]:
    if name != "PADDLE_TRAINER_ID":
        del os.environ[name]
errors = []
def raises(call):
    try:
        call()
    except mp.CollectiveError as error:
        errors.append(str(error))
mp.gloo_release()
raises(mp.gloo_barrier)
raises(lambda: mp.gloo_init_parallel_env(rank, 1, master))
mp.gloo_init_parallel_env(rank, 2, master)
mp.gloo_barrier()
raises(lambda: mp.gloo_init_parallel_env(rank, 2, master))
total = float(mp.all_reduce(np.float32(1 + mp.get_rank())))
mp.gloo_release()
give(total=total, errors=errors, left=not mp.is_initialized())
"""
    ranks = run_ranks(tmp_path, script, 2)
    for rank in ranks.values():
        given = rank.given
        assert given, rank.output
        assert given["total"] == 3 and given["left"]
        first, second, third = given["errors"]
        assert "mp.init_parallel_env()" in first and "two processes or more" in second
        assert "mp.gloo_release() first" in third
