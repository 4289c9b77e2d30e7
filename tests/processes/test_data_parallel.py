"""`DataParallel`: the mean of the processes' gradients is the gradient of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import meshpar as mp

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import meshpar as mp
from tests.processes.test_data_parallel import Model, batch, loss
from tests.processes.ranks import give
mp.init_parallel_env()
rank, n = mp.get_rank(), mp.get_world_size()
ddp = mp.DataParallel(Model(nnx.Rngs(rank)), comm_buffer_size=BUFFER)  # seeds that differ
x, y = (part[rank::n] for part in batch())
flat = lambda tree: [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
eager = nnx.grad(loss)(ddp, x, y)
again = flat(nnx.state(ddp.layers, nnx.BatchStat))
with ddp.no_sync():
    own = nnx.grad(loss)(ddp, x, y)
jitted = ddp.average_gradients(nnx.jit(nnx.grad(loss))(ddp.layers, x, y))
try:
    nnx.jit(nnx.grad(loss))(ddp, x, y)
except mp.CollectiveError as error:
    refused = str(error)
give(eager=flat(eager), own=flat(own), jitted=flat(jitted), refused=refused, stats=again,
     params=flat(nnx.state(ddp.layers, nnx.Param)))
"""


class Model(nnx.Module):
    """Two layers, a running mean, and a parameter that is not used."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.second = nnx.Linear(4, 1, rngs=rngs)
        self.unused = nnx.Param(jnp.ones(2))
        self.mean = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x):
        h = jnp.tanh(self.first(x))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * h.mean(0)
        return self.second(h)


def batch():
    draw = np.random.default_rng(0)
    return draw.normal(size=(6, 3)).astype(np.float32), draw.normal(size=(6, 1)).astype(np.float32)


def loss(model, x, y):
    return ((model(x) - y) ** 2).mean()


def test_gradients_are_those_of_the_whole_batch(launched):
    run = launched(SCRIPT.replace("BUFFER", "0.00005"), 2).ok()
    model = Model(nnx.Rngs(0))
    whole = [np.asarray(g) for g in jax.tree.leaves(nnx.grad(loss)(model, *batch()))]
    zero, one = run.results
    for given in (zero, one):
        for a, b in zip(given["params"], zero["params"], strict=True):
            np.testing.assert_array_equal(a, b)
        for found in (given["eager"], given["jitted"]):
            assert len(found) == len(whole)
            for a, b in zip(found, whole, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert "average_gradients" in given["refused"]
        assert (given["stats"][0] != 0).any()
    means = [(a + b) / 2 for a, b in zip(zero["own"], one["own"], strict=True)]
    assert any((a != b).any() for a, b in zip(zero["own"], one["own"], strict=True))
    for a, b in zip(means, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_alone_it_is_the_model():
    model = Model(nnx.Rngs(0))
    ddp = mp.DataParallel(model)
    x, y = batch()
    np.testing.assert_array_equal(ddp(x), model(x))
    grads = nnx.grad(loss)(ddp, x, y)
    assert ddp.average_gradients(grads) is grads
