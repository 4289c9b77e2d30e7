"""Which executor and schedule are chosen, by times that are known by hand."""

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar import schedules
from meshpar.schedules import Costs
from meshpar.schedules.executors import call
from meshpar.schedules.executors.choice import (
    CALL,
    DISPATCH,
    TICK,
    best_schedule,
    choose,
    predicted_seconds,
)

EVEN = Costs(F=1, I=1, W=1, B=2)
UNEVEN = Costs(F=1, I=2, W=1, B=3)


def test_the_clocks_of_the_executors():
    """1F1B with P=2, M=2: rank 0 runs F F B B, rank 1 F B F B.

    Early: rank 1 has F 1-2, B 2-5, F 5-6, B 6-9; rank 0 B 5-8, then waits for 9, B 9-12. In
    lockstep the ticks are F, F+F, B, F+B, B and B: 1 + 1 + 3 + 3 + 3 + 3.
    """
    schedule = schedules.generate("1F1B", 2, 2)
    assert predicted_seconds(schedule, UNEVEN, "mpmd") == 12 + CALL
    assert predicted_seconds(schedule, UNEVEN, "program") == 14 + 6 * TICK
    assert choose(schedule, UNEVEN) == "mpmd"


def test_what_takes_as_long_in_lockstep_is_one_program():
    schedule = schedules.generate("FThenB", 2, 4)
    assert choose(schedule, EVEN) == "program"


def test_the_host_bounds_short_actions():
    tiny = Costs(F=1e-6, I=2e-6, W=1e-6, B=3e-6)
    schedule = schedules.generate("1F1B", 2, 8)
    assert predicted_seconds(schedule, tiny, "mpmd") == pytest.approx(32 * DISPATCH + CALL)
    assert choose(schedule, tiny) == "program"


@pytest.mark.parametrize("costs", [EVEN, UNEVEN, Costs(F=3, I=1, W=1, B=2, hop=0.5)], ids=repr)
def test_the_schedule_is_no_slower_than_those_with_names(costs):
    for executors in (("program",), ("mpmd",), ("program", "mpmd")):
        schedule, executor = best_schedule(4, 6, 1, costs, executors)
        assert executor in executors
        assert best_schedule(4, 6, 1, costs, executors) == (schedule, executor)
        taken = predicted_seconds(schedule, costs, executor)
        for name in ("1F1B", "ZBH1"):
            named = schedules.generate(name, 4, 6)
            assert taken <= min(predicted_seconds(named, costs, e) for e in executors)


@pytest.mark.parametrize("costs, expected", [(EVEN, ["program"]), (UNEVEN, ["mpmd"])])
def test_a_call_takes_the_executor_that_is_chosen(costs, expected, monkeypatch):
    used = []

    def noted(name, make):
        return lambda step: (used.append(name), make(step))[1]

    monkeypatch.setattr(call, "PipelineByRank", noted("mpmd", call.PipelineByRank))
    monkeypatch.setattr(call, "PipelineProgram", noted("program", call.PipelineProgram))
    x = jnp.ones((3, 2, 4))

    def loss(w):
        return mp.pipeline(
            lambda w, x: x * w,
            w,
            x,
            "1F1B" if costs is UNEVEN else "FThenB",
            mp.ProcessMesh.create({"pp": 2}),
            loss_fn=lambda y, t: ((y - t) ** 2).mean(),
            targets=x,
            executor="auto",
            costs=costs,
        )

    gradient = jax.grad(loss)(jnp.full((2, 2, 4), 0.5))
    assert used == expected
    # y = x / 4 and x = 1, so each of 8 elements has d loss / d w = 2 (1/4 - 1) / 8 / 2 = -3 / 32.
    assert gradient.tolist() == [[[-0.09375] * 4] * 2] * 2
    used.clear()
    jax.jit(jax.grad(loss))(jnp.full((2, 2, 4), 0.5))
    assert used == ["program"]


def test_estimates_grow_with_the_work():
    """A stage of twice the width takes eight times as long, and W as long as F: one matmul each."""
    mesh = mp.ProcessMesh.create({"pp": 1})

    def estimated(width):
        seen = []
        choose = call.choose
        call.choose = lambda schedule, costs: (seen.append(costs), choose(schedule, costs))[1]
        try:
            jax.grad(
                lambda w: mp.pipeline(
                    lambda w, x: x @ w,
                    w,
                    jnp.ones((2, width, width)),
                    "1F1B",
                    mesh,
                    loss_fn=lambda y, _: y.sum(),
                    targets=None,
                    executor="auto",
                )
            )(jnp.ones((1, width, width)))
        finally:
            call.choose = choose
        return seen[0]

    small, large = estimated(64), estimated(128)
    by_hand = 2 * 64**3 / 1e10  # two operations for each product, over operations a second
    assert 0.99 * by_hand < small.F < 1.3 * by_hand  # costs have three digits
    assert 6 < large.F / small.F < 8.1
    assert 0.7 < small.W / small.F < 1.3
    assert abs(small.B - small.I - small.W) < 0.01 * small.B
