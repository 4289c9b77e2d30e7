"""What operations along a cut dim send at most, for a float32[8, 64] on 4 devices.

tests/data/no_gather.json holds the bounds, each worked out by hand from its reason.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from meshpar.compiler.decide import Decider
from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.propagate import propagate
from meshpar.placements.layout import Layout
from tests.rules.harness import Case, Job, bytes_sent, failures, traced
from tests.rules.values import eighths

BOUNDS = json.loads((Path(__file__).parents[1] / "data" / "no_gather.json").read_text())
FOUR = {"x": 4}
MODEL = DeviceModel(latency=1e-9)  # the bytes of these small arrays decide, as those of large ones

x = eighths(8, 64) / 8
image, kernel = eighths(8, 64, 4), eighths(3, 4, 4, seed=1)
labels = np.arange(8, dtype=np.int32) * 9 % 64


def conv(a, k):
    return lax.conv_general_dilated(a, k, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def pooled(a, size, stride, padding):
    return lax.reduce_window(a, -jnp.inf, lax.max, (1, size), (1, stride), padding)


def loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


FUNCTIONS = {
    "cumsum": (lambda a: lax.cumsum(a, 1), x),
    "cummax": (lambda a: lax.cummax(a, 1), x),
    "cumlogsumexp": (lambda a: lax.cumlogsumexp(a, 1), x),
    "argmax": (lambda a: jnp.argmax(a, 1), x),
    "argmin": (lambda a: jnp.argmin(a, 1), x),
    "top_k": (lambda a: tuple(lax.top_k(a, 3)), x),
    "sum": (lambda a: a.sum(1), x),
    "max": (lambda a: a.max(1), x),
    "logsumexp": (lambda a: jax.nn.logsumexp(a, 1), x),
    "softmax": (jax.nn.softmax, x),
    "log_softmax": (jax.nn.log_softmax, x),
    "cross entropy": (loss, x),
    "gradient of cross entropy": (jax.value_and_grad(loss), x),
    "vocabulary gather": (lambda a: a[np.array([5, 2])], x),
    "vocabulary scatter": (lambda a: jnp.asarray(a).at[np.array([5, 2])].add(1.0), x),
    "dynamic_slice": (lambda a, i: lax.dynamic_slice_in_dim(a, i, 2, 0), x, np.int32(3)),
    "dynamic_update_slice": (
        lambda a, i: lax.dynamic_update_slice_in_dim(a, jnp.ones((2, 64)), i, 0),
        x,
        np.int32(3),
    ),
    "random_bits": (lambda a: jnp.where(a > 0, jax.random.bits(jax.random.key(0), a.shape), 0), x),
    "iota": (lambda a: a + lax.broadcasted_iota(jnp.float32, a.shape, 1), x),
    "convolution": (conv, image, kernel),
    "gradient of convolution": (
        jax.grad(lambda a, k: jnp.square(conv(a, k)).sum(), argnums=(0, 1)),
        image,
        kernel,
    ),
    "pooling": (lambda a: pooled(a, 3, 1, ((0, 0), (1, 1))), x),
    "pooling without overlap": (lambda a: pooled(a, 2, 2, "VALID"), x),
    "shift": (lambda a: a[:, 1:], x),
    "reverse": (lambda a: a[:, ::-1], x),
    "concatenate": (lambda a: jnp.concatenate([a, a], 1), x),
    "pad": (lambda a: jnp.pad(a, ((0, 0), (1, 2))), x),
    "roll": (lambda a: jnp.roll(a, 1, 1), x),
    "dot": (lambda a: a @ np.ones((64, 2), np.float32), x),
}


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound["function"])
def test_a_cut_dim_sends_no_more_than_its_bound(bound):
    fn, *args = FUNCTIONS[bound["function"]]
    case = Case(bound["function"], fn, tuple(args))
    program = traced(case)
    layouts = [Layout.replicated(np.ndim(arg)) for arg in args]
    layouts[0] = layouts[0].with_dim(bound["dim"], ("x",))
    planned = propagate(program, layouts, [None] * len(program.outputs), Decider(FOUR, MODEL))
    job = Job(case, planned, "")
    sent = bytes_sent(job)
    assert not failures([job], FOUR)
    assert sent <= bound["bytes"], f"{sent} bytes; {bound['because']}"


def test_every_bound_has_its_function_and_says_why():
    assert {bound["function"] for bound in BOUNDS} == set(FUNCTIONS)
    assert all(bound["because"] for bound in BOUNDS)
