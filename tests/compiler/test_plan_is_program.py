"""What the plan lists is what the lowered module holds: kinds, axes and bytes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from benchmarks.model_steps import forward, mesh_named, placed, result_placements, train_step
from meshpar.compiler.hlo import axes_of, collectives_in_hlo, sent_bytes, touched_axes
from tests.compiler.executed import executed_collectives

MODELS = ("decoder", "gpt2", "encoder", "mlp", "resnet")
# (model, mesh, what, scanned layers); a number is a train step under that ZeRO stage.
EVERY = [
    *(
        (model, mesh, what, False)
        for model in MODELS
        for mesh in ("dp8", "tp8", "dp2tp4", "dp2tp2sp2")
        for what in (("forward", 0, 1, 2, 3) if "dp" in mesh else ("forward", 0))
    ),
    *(
        (model, mesh, what, True)
        for model in ("decoder", "gpt2", "encoder")
        for mesh, what in (("dp2tp4", 0), ("dp8", 3), ("tp8", "forward"))
    ),
]
SOME = {
    ("decoder", "dp2tp4", 0, True),
    ("decoder", "dp8", 3, False),
    ("gpt2", "dp2tp4", 1, False),
    ("encoder", "dp2tp2sp2", "forward", False),
    ("mlp", "tp8", 0, False),
    ("mlp", "dp2tp4", 2, False),
    ("resnet", "dp8", 1, False),
}


def planned(plan):
    """(Kind, axes) -> bytes that each device sends, as planned."""
    out = Counter()
    for c in plan.collectives:
        out[c.kind, frozenset(c.axes)] += c.count * c.bytes
    return {key: sent for key, sent in out.items() if sent}


def lowered(text, mesh):
    """The same, read from the lowered module, loops multiplied out."""
    out = Counter()
    for kind, one, times in executed_collectives(text):
        name = {"collective_permute": "ppermute"}.get(kind, kind)
        out[name, frozenset(axes_of(kind, one, mesh))] += times * sent_bytes(kind, one)
    return {key: sent for key, sent in out.items() if sent}


def compiled(text, mesh):
    """The same, read from the compiled module, loops counted once."""
    out = Counter()
    for kind, found in collectives_in_hlo(text).items():
        for one in found:
            name = {"collective_permute": "ppermute"}.get(kind, kind)
            out[name, frozenset(touched_axes(one.groups, mesh))] += sent_bytes(kind, one, mesh.size)
    return {key: sent for key, sent in out.items() if sent}


def program(model, mesh, what, scan):
    """The partitioned program, and its arguments on the mesh."""
    if what == "forward":
        step = forward(model, mesh, scan=scan)
        return mp.jit(step.fn, out_placements=[]), placed(step, mesh)
    step = train_step(model, mesh, zero=what, scan=scan)
    return mp.jit(step.fn, out_placements=result_placements(step, mesh)), placed(step, mesh)


@pytest.mark.parametrize(
    ("model", "mesh", "what", "scan"),
    [case if case in SOME else pytest.param(*case, marks=pytest.mark.exhaustive) for case in EVERY],
    ids=str,
)
def test_the_plan_is_the_lowered_module_and_the_compiled_one_holds_no_more(model, mesh, what, scan):
    on = mesh_named(mesh)
    f, args = program(model, on, what, scan)
    plan = planned(f.plan(*args))
    module = f.lower(*args)
    assert plan == lowered(module.as_text(), on)
    for key, sent in compiled(module.compile().as_text(), on).items():
        assert sent <= plan.get(key, 0), key


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "mesh", "what", "scan"), EVERY, ids=str)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_every_program_lowers_for_platforms_that_are_not_there(model, mesh, what, scan, platform):
    on = mesh_named(mesh)
    f, args = program(model, on, what, scan)
    text = f.lowering(*args).lowered([platform]).as_text()
    assert planned(f.plan(*args)) == lowered(text, on)


def test_loops_and_calls_are_multiplied_out():
    mesh = mp.ProcessMesh([0, 1], ["x"])

    def turn(x, _):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, None, length=3)[0], None

    f = mp.jit(lambda x: jax.lax.scan(turn, x, None, length=5)[0])
    x = mp.shard_tensor(np.ones((4, 4), np.float32), mesh, [mp.Shard(0)])
    (found,) = executed_collectives(f.lower(x).as_text())
    assert found[2] == f.plan(x).collectives[0].count == 15


@pytest.mark.parametrize(("mesh", "zero"), [("dp2tp4", 0), ("dp8", 1)], ids=str)
def test_a_partitioned_train_step_is_the_single_device_step(mesh, zero):
    on = mesh_named(mesh)
    step = train_step("gpt2", on, zero=zero)
    f = mp.jit(step.fn, out_placements=result_placements(step, on))
    *state, loss = f(*placed(step, on))
    *single, expected = jax.jit(step.fn)(*step.args)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(single), strict=True):
        if jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-4, atol=2e-5)


def test_the_same_program_lowers_for_platforms_that_are_not_there():
    on = mesh_named("dp2tp4")
    step = train_step("decoder", on, zero=1)
    f = mp.jit(step.fn, out_placements=result_placements(step, on))
    args = placed(step, on)
    for platform in ("cuda", "tpu"):
        text = f.lowering(*args).lowered([platform]).as_text()
        assert planned(f.plan(*args)) == lowered(text, on)
