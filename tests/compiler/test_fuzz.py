"""Random programs with random placements are what they are on one device.

`python -m tests.compiler.fuzz --cases 20000` runs many more. A failure here prints its seed, its
batch, and the program cut down, with its source.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.compiler.fuzz import cut_down, failures
from tests.compiler.programs import MESHES, random_program

SEED = int(os.environ.get("MESHPAR_FUZZ_SEED", "0"))  # `make fuzz` draws others


@pytest.mark.parametrize("mesh", ["2", "2x2", "2x3", "2x4"])
def test_random_programs(mesh):
    rng = random.Random(f"{SEED}/{mesh}")
    programs = [random_program(rng, mesh, loops=i % 3 == 0) for i in range(20)]
    found = failures(programs, plan_too=False)
    shown = [str(cut_down(failure, seconds=30)) for failure in found[:2]]
    assert not found, "\n".join([f"MESHPAR_FUZZ_SEED={SEED}, {len(found)} failures", *shown])


@settings(
    max_examples=4,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(MESHES)))
def test_a_random_program(rng, mesh):
    found = failures([random_program(rng, mesh)])
    assert not found, str(found[0])
