"""What the compiled step takes: the table's slots and little more, whatever the microbatches."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

import meshpar as mp
from meshpar.schedules.executors import step as steps

RANKS, ROWS = 4, 2048


def block(params, x):
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


@pytest.fixture(name="traced")
def _traced(monkeypatch):
    """(schedule, microbatches) -> the traced step, its table of slots."""
    tables = []
    make = steps.slot_table

    def noted(*args):
        tables.append(make(*args))
        return tables[-1]

    monkeypatch.setattr(steps, "slot_table", noted)
    mesh = mp.ProcessMesh.create({"pp": RANKS})
    params = {
        "up": jax.ShapeDtypeStruct((RANKS, 32, 128), jnp.float32),
        "down": jax.ShapeDtypeStruct((RANKS, 128, 32), jnp.float32),
    }

    def trace_step(name, microbatches):
        x = jax.ShapeDtypeStruct((microbatches, ROWS, 32), jnp.float32)

        def loss(params, x, target):
            return mp.pipeline(
                block,
                params,
                x,
                name,
                mesh,
                loss_fn=lambda y, t: ((y - t) ** 2).mean(),
                targets=target,
            )

        return jax.jit(jax.value_and_grad(loss)).trace(params, x, x), tables[-1]

    return trace_step


@pytest.fixture(name="compiled")
def _compiled(traced):
    """(schedule, microbatches) -> temporaries, bytes of slots, instructions."""

    def compile_step(name, microbatches):
        step, table = traced(name, microbatches)
        compiled = step.lower().compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        return temporaries, table.bytes, compiled.as_text().count("\n")

    return compile_step


def test_1f1b_does_not_grow_and_fthenb_does(compiled):
    few, many, all_forward = compiled("1F1B", 8), compiled("1F1B", 32), compiled("FThenB", 32)
    assert abs(many[0] - few[0]) <= 0.01 * few[0]
    assert many[1] == few[1]
    assert all_forward[0] > 4 * many[0]
    # The program of 32 microbatches is that of 8; only the table it scans is longer.
    assert abs(many[2] - few[2]) <= 0.05 * few[2]


@pytest.mark.parametrize("name, microbatches", [("1F1B", 8), ("ZBH1", 8), ("FThenB", 4)])
def test_slots_take_most_of_the_memory(compiled, name, microbatches):
    """No pool is copied: an action never moves a value from one slot to another."""
    temporaries, slots, _ = compiled(name, microbatches)
    assert slots <= temporaries <= 1.2 * slots


def test_zero_bubble_needs_little_more(compiled):
    assert compiled("ZBH1", 8)[1] <= 1.1 * compiled("1F1B", 8)[1]


@pytest.mark.parametrize("name", ["1F1B", "ZBH1"])
def test_no_action_takes_its_slots_for_a_constant(traced, name):
    """XLA for TPUs would round all slots for the products of W in every tick."""
    step, table = traced(name, 9)  # no pool has the shape of the microbatches
    pools = {(count, *struct.shape) for struct, count in table.pools}
    carried = 0
    for eqn in equations(step.jaxpr.jaxpr):
        if eqn.primitive.name == "while":
            body, count = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"]
            read = [atom for inner in body.eqns for atom in inner.invars]
            used = [var.aval.shape for var in body.invars if any(var is atom for atom in read)]
            constant = {var.aval.shape for var in body.invars[:count]}
            assert not pools & constant & set(used)
            carried += bool(pools & set(used))
    assert carried >= 4  # what arrives, and three actions


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)
