"""What the plan lists is what the lowered module holds: kinds, axes and bytes."""

from collections import Counter

import jax
import numpy as np
import pytest

import meshpar as mp
from tests.compiler.steps import mesh_named, placed, result_placements, train_step
from tests.hlo_counts import axes_of, collectives_in_stablehlo, sent_bytes

EVERY = [
    (model, mesh, zero)
    for model in ("decoder", "gpt2", "mlp", "resnet")
    for mesh in ("dp8", "tp8", "dp2tp4", "dp2tp2sp2")
    for zero in ((0, 1, 3) if "dp" in mesh else (0,))
]
SOME = {
    ("decoder", "dp2tp4", 0),
    ("decoder", "dp8", 3),
    ("gpt2", "dp2tp4", 1),
    ("mlp", "tp8", 0),
    ("resnet", "dp8", 1),
}


def planned(plan):
    """(Kind, axes) -> bytes that each device sends, as planned."""
    out = Counter()
    for c in plan.collectives:
        out[c.kind, frozenset(c.axes)] += c.count * c.bytes
    return {key: sent for key, sent in out.items() if sent}


def lowered(text, mesh):
    """The same, read from the lowered module, where nothing runs in a loop."""
    out = Counter()
    for kind, found in collectives_in_stablehlo(text).items():
        for one in found:
            name = {"collective_permute": "ppermute"}.get(kind, kind)
            out[name, frozenset(axes_of(kind, one, mesh))] += sent_bytes(kind, one)
    return {key: sent for key, sent in out.items() if sent}


@pytest.mark.parametrize(
    ("model", "mesh", "zero"),
    [
        case if case in SOME else pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in EVERY
    ],
    ids=str,
)
def test_the_plan_of_a_train_step_is_its_lowered_module(model, mesh, zero):
    on = mesh_named(mesh)
    step = train_step(model, on, zero=zero)
    args = placed(step, on)
    f = mp.jit(step.fn, out_placements=result_placements(step, on))
    text = f.lower(*args).as_text()
    assert planned(f.plan(*args)) == lowered(text, on)


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
