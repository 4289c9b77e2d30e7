"""The estimate of peak memory: by hand for small programs, against XLA's for train steps."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from benchmarks.model_steps import mesh_named, placed, result_placements, train_step
from meshpar import Shard

LINE = mp.ProcessMesh([0, 1], ["x"])
EIGHT = np.arange(8, dtype=np.float32)


def plan_of(fn, *args, **options):
    return mp.jit(fn, mesh=LINE, **options).plan(*args)


def cut(x):
    return mp.shard_tensor(x, LINE, [Shard(0)])


def test_an_argument_lives_to_the_end_unless_it_is_donated():
    # Blocks of 16 bytes: the argument and the result.
    assert plan_of(jnp.sin, cut(EIGHT)).peak_bytes == 32
    # A donated argument ends where the result takes its place.
    assert plan_of(jnp.sin, cut(EIGHT), donate_argnums=0).peak_bytes == 16


def test_what_a_matmul_makes_takes_no_operands_place():
    w = np.ones((8, 8), np.float32)

    def squared(w):
        return (w @ w) @ w

    # 256 bytes each: w, w @ w and the result.
    assert plan_of(squared, mp.shard_tensor(w, LINE, [])).peak_bytes == 3 * 256


def test_a_gathered_value_counts_beside_its_block():
    whole = plan_of(lambda x: x, cut(EIGHT), out_placements=[])
    assert whole.peak_bytes == 16 + 32
    assert whole.collectives[0].kind == "all_gather"


def test_a_loop_keeps_what_one_turn_needs():
    w = np.ones((8, 8), np.float32)

    def many(w, length):
        def turn(x, _):
            return jnp.sin(x @ w), None

        return jax.lax.scan(turn, w, None, length=length)[0]

    w = mp.shard_tensor(w, LINE, [])
    few, more = (plan_of(functools.partial(many, length=n), w).peak_bytes for n in (2, 200))
    assert few == more


def test_a_plan_shows_its_memory():
    plan = plan_of(lambda x: x, cut(EIGHT), out_placements=[])
    assert "about 48 B of memory per device" in repr(plan)
    assert "about 48 B of memory per device" in plan._repr_html_()
    assert json.loads(plan.to_json())["peak_bytes"] == 48


EVERY = [
    (name, mesh, zero, scan, donate)
    for name, mesh, zero, scan in (
        ("mlp", "dp8", 0, False),
        ("mlp", "tp8", 0, False),
        ("gpt2", "dp2tp4", 0, False),
        ("gpt2", "dp8", 3, False),
        ("decoder", "dp2tp4", 1, False),
        ("decoder", "dp2tp4", 0, True),
        ("decoder", "dp8", 3, True),
        ("resnet", "dp8", 0, False),
        ("resnet", "dp2tp4", 0, False),
    )
    for donate in (False, True)
]
SOME = {
    ("mlp", "dp8", 0, False, True),
    ("decoder", "dp2tp4", 0, True, True),
    ("resnet", "dp2tp4", 0, False, False),
}


@pytest.mark.parametrize(
    ("name", "mesh", "zero", "scan", "donate"),
    [case if case in SOME else pytest.param(*case, marks=pytest.mark.exhaustive) for case in EVERY],
    ids=str,
)
def test_the_estimate_is_near_what_xla_allots(name, mesh, zero, scan, donate):
    on = mesh_named(mesh)
    step = train_step(name, on, zero=zero, scan=scan)
    args = placed(step, on)
    f = mp.jit(
        step.fn,
        out_placements=result_placements(step, on),
        donate_argnums=(0, 1) if donate else (),
    )
    found = f.lower(*args).compile().memory_analysis()
    allotted = (
        found.argument_size_in_bytes
        + found.temp_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
    )
    # Measured on these 18 with jax 0.10.2: 0.85 to 1.44, the extremes being gpt2, whose gradients
    # XLA reduces together at the end, and an MLP of 14 kB.
    assert 0.75 < f.plan(*args).peak_bytes / allotted < 1.5
