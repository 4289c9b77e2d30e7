"""Sampling: against a loop without windows, and compiled once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

from meshpar.models.decoder import Decoder, DecoderConfig
from meshpar.models.generate import _fill, generate
from meshpar.models.gpt2 import GPT2, GPT2Config

CONFIG = DecoderConfig(
    vocab_size=31,
    num_layers=1,
    model_dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    hidden_dim=24,
    max_seq_len=5,
    init_std=0.5,  # logits far apart: the argmax does not hang on rounding
)
PROMPT = jnp.array([[3, 1, 4], [1, 5, 9]])


def greedy(model, tokens, steps):
    """The specification: a growing input, cut to the model's maximum."""
    forward = nnx.jit(lambda model, tokens: model(tokens))
    for _ in range(steps):
        logits = forward(model, tokens[:, -model.config.max_seq_len :])[:, -1]
        tokens = jnp.concatenate([tokens, logits.argmax(axis=-1)[:, None]], axis=1)
    return tokens


@pytest.fixture(scope="module")
def greedy_five():
    return greedy(Decoder(CONFIG, rngs=nnx.Rngs(0)), PROMPT, 5)


# 2 steps fit into the model's maximum of 5; 5 make the window slide.
@pytest.mark.parametrize("steps, scan_layers", [(0, False), (2, False), (5, False), (5, True)])
def test_temperature_zero_takes_the_most_likely_token(greedy_five, steps, scan_layers):
    model = Decoder(replace(CONFIG, scan_layers=scan_layers), rngs=nnx.Rngs(0))
    actual = generate(model, PROMPT, steps, jax.random.key(0), temperature=0.0)
    assert_array_equal(actual, greedy_five[:, : 3 + steps])


def test_gpt2_generates_without_dropout_and_keeps_its_mode():
    config = GPT2Config(
        vocab_size=31,
        num_layers=1,
        model_dim=16,
        num_heads=2,
        max_seq_len=4,
        dropout=0.5,
        init_std=0.5,
    )
    model = GPT2(config, rngs=nnx.Rngs(0))
    actual = generate(model, PROMPT, 5, jax.random.key(0), temperature=0.0)
    assert not model.embed_dropout.deterministic
    model.eval()
    assert_array_equal(actual, greedy(model, PROMPT, 5))


def test_samples_depend_on_the_key_only():
    model = Decoder(replace(CONFIG, init_std=0.02), rngs=nnx.Rngs(0))
    first, again, other = (
        generate(model, PROMPT, 5, jax.random.key(seed), temperature=1.0) for seed in (0, 0, 1)
    )
    assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert_array_equal(first[:, :3], PROMPT)
    assert first.dtype == PROMPT.dtype


def test_samples_follow_the_softmax_of_the_scaled_logits():
    model = Decoder(replace(CONFIG, init_std=0.3), rngs=nnx.Rngs(0))
    many = jnp.tile(PROMPT[:1], (4000, 1))
    tokens = generate(model, many, 1, jax.random.key(0), temperature=2.0)[:, -1]
    expected = np.asarray(jax.nn.softmax(nnx.jit(lambda m: m(PROMPT[:1]))(model)[0, -1] / 2.0))
    share = np.bincount(tokens, minlength=31) / 4000
    sigma = np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(share - expected) < 5 * sigma + 1e-3).all()


def test_key_temperature_and_prompt_length_compile_nothing_new():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    generate(model, PROMPT, 5, jax.random.key(0), temperature=0.7)
    before = _fill._cache_size()
    generate(model, PROMPT, 5, jax.random.key(1), temperature=0.0)
    generate(model, PROMPT[:, :2], 6, jax.random.key(1), temperature=1.3)
    generate(nnx.clone(model), PROMPT, 5, jax.random.key(2), temperature=1.0)
    assert _fill._cache_size() == before


@pytest.mark.parametrize(
    "prompt, steps, temperature",
    [(PROMPT[:, :0], 1, 1.0), (PROMPT[0], 1, 1.0), (PROMPT, -1, 1.0), (PROMPT, 1, -0.5)],
    ids=["empty", "one dim", "steps", "temperature"],
)
def test_bad_arguments_are_refused(prompt, steps, temperature):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"generate\(prompt, steps, temperature\)"):
        generate(model, prompt, steps, jax.random.key(0), temperature)
