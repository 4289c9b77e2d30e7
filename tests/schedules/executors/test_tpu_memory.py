"""Memory by the TPU compiler, where the extra `tpu` is installed: no TPU is needed."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
# Stages of 16 MB a value: what fits into the memory on the chip is no temporary to the compiler.
PROGRAM = """
import json
from benchmarks.pipeline import compiled_step
from benchmarks.tpu_slice import tpu_slice

found = {}
with tpu_slice("v5e:2x2"):
    for name, microbatches in (("1F1B", 4), ("1F1B", 16), ("ZBH1", 16), ("FThenB", 16)):
        compiled, _, slots = compiled_step(name, microbatches, scale=4)
        taken = compiled.memory_analysis().temp_size_in_bytes
        found[f"{name} {microbatches}"] = taken, slots
print(json.dumps(found))
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the extra `tpu` is not installed"
)
def test_temporaries_do_not_grow_with_the_microbatches():
    # A process of its own: libtpu writes to standard error, and settings are of a whole process.
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    names = ("1F1B 4", "1F1B 16", "ZBH1 16", "FThenB 16")
    few, many, zero_bubble, all_forward = (found[name] for name in names)
    assert abs(many[0] - few[0]) <= 0.001 * few[0]
    assert few[1] <= few[0] <= 1.2 * few[1]
    assert zero_bubble[1] <= zero_bubble[0] <= 1.1 * many[0]
    assert all_forward[0] > 3 * many[0]
