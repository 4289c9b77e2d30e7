"""Which equal layers are found in models of various forms, and that they train like one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from meshpar.compiler.program import program_of
from meshpar.schedules.executors.layers import LayerError, find_layers
from meshpar.schedules.executors.two_pieces import cut_in_half
from tests.training.small_pipeline import Block, Net, batch, losses, piped, single


class Raw(nnx.Module):
    """Layers from the first operation to the last."""

    def __init__(self, layers=4):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(Narrow(rngs) for _ in range(layers))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Narrow(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Tied(Raw):
    """What comes before the layers comes after them too."""

    def __init__(self):
        super().__init__(3)
        self.both = nnx.Linear(4, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.both(super().__call__(self.both(x)))


class Repeated(nnx.Module):
    """One layer four times: its gradients are those of four stages."""

    def __init__(self):
        self.layer = Narrow(nnx.Rngs(0))

    def __call__(self, x):
        for _ in range(4):
            x = self.layer(x)
        return x


class Dropping(linen.Module):
    """Random keys are folded with numbers made of the modules' names."""

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(8)(x)
        for _ in range(3):
            h = jnp.tanh(linen.Dense(8)(x))
            x = x + linen.Dropout(0.3, deterministic=not train)(h)
        return linen.Dense(4)(x)


def dropping():
    module = Dropping()
    return module, module.init(jax.random.key(0), jnp.ones((2, 4)))


@pytest.mark.parametrize(
    "make, count",
    [(Raw, 4), (Tied, 3), (Repeated, 4), (Net, 5), (lambda: Net(scanned=True), 5)],
)
def test_the_layers_that_are_found(make, count):
    graph, state = nnx.split(make())
    leaves, tree = jax.tree.flatten(state)

    def forward(leaves, x):
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x).mean()

    program = program_of(jax.make_jaxpr(forward)(leaves, batch()[0]))
    found = find_layers(program, program.inputs[:-1], program.inputs[-1:], 1)
    assert found.count == count


def test_halves_of_equal_cost():
    """Products of 12 rows: 4 x 8, then 8 x 6, then 6 x 2; half of 92 is passed in the second."""

    def forward(params, x):
        for w in params:
            x = jnp.sin(x @ w)
        return x.sum()

    params = [jnp.ones(shape) for shape in ((4, 8), (8, 6), (6, 2))]
    program = program_of(jax.make_jaxpr(forward)(params, jnp.ones((12, 4))))
    found = cut_in_half(program, program.inputs[:-1], program.inputs[-1:])
    assert found is not None and found.count == 0
    assert program.avals[found.x].shape == (12, 8)
    assert program.nodes[found.last].name == "sin"


@pytest.mark.parametrize(
    "make, axes, options",
    [
        (
            lambda: Raw(9),
            {"pp": 4},
            {"accumulate_steps": 2, "schedule_mode": "DualPipeV", "vpp_degree": 2},
        ),
        (Tied, {"pp": 3}, {"schedule_mode": "ZBH1"}),
        (Repeated, {"pp": 2}, {}),
        (dropping, {"pp": 3}, {"schedule_mode": "ZBH1"}),
    ],
)
def test_they_train_like_one_device(make, axes, options):
    np.testing.assert_allclose(
        losses(piped(make(), axes, **options)), losses(single(make())), rtol=1e-5
    )


def parts(y, t):
    counts = (jnp.arange(12) < 2)[:, None] * jnp.ones_like(t)  # in the first microbatch only
    return (((y - t) ** 2) * counts).sum(), counts.sum()


def test_microbatches_in_which_nothing_counts():
    np.testing.assert_allclose(
        losses(piped(Net(), {"pp": 2}, parts)), losses(single(Net(), parts)), rtol=1e-5
    )


class Half(Net):
    """Parameters and activations in bfloat16."""

    def __init__(self):
        super().__init__(4, scanned=True)
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(self, nnx.Param))
        nnx.update(self, half)

    def __call__(self, x):
        return super().__call__(x.astype(jnp.bfloat16)).astype(jnp.float32)


def test_bfloat16_parameters():
    """Sums over microbatches round otherwise: to 1 in 256."""
    got, wanted = losses(piped(Half(), {"pp": 2, "dp": 2})), losses(single(Half()))
    np.testing.assert_allclose(got, wanted, rtol=2e-2)


class Normed(Net):
    def __init__(self):
        super().__init__(4)
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "make, axes, loss, error, message",
    [
        (Normed, {"pp": 2}, None, NotImplementedError, r"running statistics"),
        (Net, {"pp": 8}, None, LayerError, r"Strategy.pipeline: .*5 equal layers for 8[\s\S]*range\(5\)"),
        (lambda: Block(nnx.Rngs(0)), {"pp": 3}, None, LayerError, r"no run of equal layers for 3[\s\S]*x = layer\(x\)"),
        (Net, {"pp": 2}, lambda y, t: jnp.abs(y - t).max(), NotImplementedError, r"test_found_layers.py"),
    ],
)  # fmt: skip
def test_models_that_are_refused(make, axes, loss, error, message):
    dm = piped(make(), axes, loss or (lambda y, t: y.mean()))
    dm.train()
    with pytest.raises(error, match=message):
        dm(*((jnp.ones((12, 8)),) * 2 if axes == {"pp": 3} else batch()))


def test_a_model_with_two_outputs():
    class Two(Net):
        def __call__(self, x):
            y = super().__call__(x)
            return y, (y**2).mean()

    def loss(y, mean, t):
        return ((y - t) ** 2).mean() + 0.1 * mean

    got = losses(piped(Two(), {"pp": 2, "dp": 2}, loss), steps=2)
    np.testing.assert_allclose(got, losses(single(Two(), loss), steps=2), rtol=1e-5)


def test_labels_of_size_zero():
    x, labels = batch()[0], jnp.zeros((12, 0))

    def loss(y, t):
        return (y**2).mean() + t.sum()

    values = []
    for dm in (single(Net(), loss), piped(Net(), {"pp": 2}, loss)):
        dm.train()
        values.append([float(dm(x, labels)) for _ in range(2)])
    np.testing.assert_allclose(values[1], values[0], rtol=1e-5)


def test_a_pipeline_of_one_rank():
    np.testing.assert_allclose(losses(piped(Net(), {"pp": 1})), losses(single(Net())), rtol=1e-5)
