"""Collectives between processes against numpy: one job for many checks, which saves start-up."""

import pytest

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
