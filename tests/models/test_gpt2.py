"""GPT-2: initial scale, causality, scanned equal to unrolled, and dropout under its keys."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from meshpar.models.gpt2 import GPT2, GPT2Config
from meshpar.models.losses import cross_entropy

CONFIG = GPT2Config(
    vocab_size=61, num_layers=2, model_dim=24, num_heads=3, max_seq_len=12, dropout=0.0
)


def model_of(config=CONFIG, dropout_seed=1, **options):
    return GPT2(replace(config, **options), rngs=nnx.Rngs(params=0, dropout=dropout_seed))


@nnx.jit
def apply(model, ids):
    return model(ids)


def tokens(shape=(2, 10), seed=0):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(CONFIG.vocab_size, size=shape, dtype=np.int32))


def test_initial_loss_is_that_of_a_uniform_guess():
    logits = apply(model_of(), tokens())
    assert logits.shape == (2, 10, 61)
    assert float(cross_entropy(logits, tokens(seed=1))) == pytest.approx(math.log(61), abs=0.1)


def test_future_tokens_do_not_change_past_logits():
    model, ids = model_of(), tokens()
    changed = ids.at[:, 6].set((ids[:, 6] + 1) % CONFIG.vocab_size)
    before, after = apply(model, ids), apply(model, changed)
    assert_array_equal(before[:, :6], after[:, :6])
    assert (np.abs(before[:, 6:] - after[:, 6:]).max(axis=(0, 2)) > 1e-6).all()


def test_positions_are_learned():
    # Without positions, equal tokens would give equal logits everywhere.
    logits = apply(model_of(), jnp.full((2, 10), 5, jnp.int32))
    assert np.abs(np.diff(logits, axis=1)).max(axis=2).min() > 1e-3


@nnx.jit
def gradients(model):
    grad = nnx.grad(lambda m: cross_entropy(m(tokens()), tokens(seed=1)))(model)
    return grad.embed.embedding[...], grad.positions.embedding[...]


@pytest.fixture(scope="module")
def unrolled_gradients():
    return gradients(model_of(dropout=0.3))


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_equal_unrolled_ones_dropout_included(unrolled_gradients, remat):
    actual = gradients(model_of(dropout=0.3, scan_layers=True, remat=remat))
    for lhs, rhs in zip(actual, unrolled_gradients, strict=True):
        assert_allclose(lhs, rhs, rtol=1e-4, atol=1e-6)


def test_dropout_is_a_function_of_its_seed_and_of_the_call():
    lhs, rhs, other = (model_of(dropout=0.3, dropout_seed=seed) for seed in (1, 1, 2))
    first = apply(lhs, tokens())
    assert_array_equal(first, apply(rhs, tokens()))
    assert not np.allclose(first, apply(other, tokens()))
    assert not np.allclose(first, apply(lhs, tokens()))  # the second call draws new masks


def test_dropout_is_off_in_evaluation():
    model, plain = model_of(dropout=0.3), model_of()
    model.eval()
    assert_array_equal(apply(model, tokens()), apply(plain, tokens()))
    assert_array_equal(apply(model, tokens()), apply(model, tokens()))
    model.train()
    assert not np.allclose(apply(model, tokens()), apply(plain, tokens()))


def test_without_dropout_the_state_is_parameters_only():
    assert not jax.tree.leaves(nnx.state(model_of(), nnx.RngState))
    assert jax.tree.leaves(nnx.state(model_of(dropout=0.1), nnx.RngState))


def test_the_defaults_are_gpt2_small():
    model = nnx.eval_shape(lambda: GPT2(GPT2Config(), rngs=nnx.Rngs(0)))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == 124_439_808


def test_uneven_heads_are_refused():
    with pytest.raises(ValueError, match=r"model_dim=24, num_heads=5.*24 % 5 = 4"):
        replace(CONFIG, num_heads=5)


def test_a_longer_input_than_max_seq_len_is_refused():
    with pytest.raises(ValueError, match=r"\(1, 13\).*max_seq_len = 12"):
        model_of()(tokens((1, 13)))
