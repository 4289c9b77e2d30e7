"""The MLP, whose last layer may share the first one's kernel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from meshpar.models.mlp import MLP, MLPConfig

# Eight layers; one kernel has the odd shape (7, 3).
DIMS = (4, 4, 7, 3, 4, 4, 4, 4, 4)


def inputs():
    return jnp.asarray(np.random.default_rng(0).standard_normal((5, 4), np.float32))


def test_each_layer_maps_one_dim_to_the_next():
    model = MLP(MLPConfig(dims=DIMS), rngs=nnx.Rngs(0))
    assert [layer.kernel.shape for layer in model.layers] == list(itertools.pairwise(DIMS))
    x = np.asarray(inputs())
    for layer in model.layers[:-1]:
        x = jax.nn.gelu(x @ layer.kernel[...] + layer.bias[...][None])
    expected = x @ model.layers[-1].kernel[...] + model.layers[-1].bias[...][None]
    assert_allclose(model(inputs()), expected, rtol=1e-5, atol=1e-6)


def test_a_tied_kernel_is_one_parameter_whose_gradients_add():
    model = MLP(MLPConfig(dims=DIMS, tied=True), rngs=nnx.Rngs(0))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert sum(path[-1] == "kernel" for path in paths) == 7

    # The specification: two kernels of equal value, their gradients added.
    apart = MLP(MLPConfig(dims=DIMS), rngs=nnx.Rngs(0))
    apart.layers[-1].kernel[...] = model.layers[0].kernel[...]
    for lhs, rhs in zip(apart.layers[:-1], model.layers[:-1], strict=True):
        assert_array_equal(lhs.kernel[...], rhs.kernel[...])
    grad_of = nnx.jit(nnx.grad(lambda m: (m(inputs()) ** 2).sum()))
    grad, expected = grad_of(model), grad_of(apart)
    assert_allclose(
        grad.layers[0].kernel[...],
        expected.layers[0].kernel[...] + expected.layers[7].kernel[...],
        rtol=1e-5,
        atol=1e-6,
    )


def test_dropout_is_deterministic_given_its_seed_and_off_in_evaluation():
    config = MLPConfig(dims=(4, 64, 4), dropout=0.5)
    lhs, rhs = (MLP(config, rngs=nnx.Rngs(params=0, dropout=1)) for _ in range(2))
    plain = MLP(MLPConfig(dims=(4, 64, 4)), rngs=nnx.Rngs(params=0))
    assert_array_equal(lhs(inputs()), rhs(inputs()))
    assert not np.allclose(lhs(inputs()), plain(inputs()))
    lhs.eval()
    assert_array_equal(lhs(inputs()), plain(inputs()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dims": (8,)}, r"dims=\(8,\).*needs an input and an output"),
        ({"dims": (8, 4, 8), "tied": True}, r"first kernel \(8, 4\).*last \(4, 8\)"),
        ({"dims": (8, 8), "tied": True}, r"must be two layers"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MLPConfig(**options)


def test_a_square_stack_may_be_tied():
    model = MLP(MLPConfig(dims=(4, 4, 4), tied=True), rngs=nnx.Rngs(0))
    assert model(jnp.ones((1, 4))).shape == (1, 4)
