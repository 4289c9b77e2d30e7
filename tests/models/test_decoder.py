"""The decoder: its initial scale, its symmetries, and scanned layers equal to unrolled ones."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from meshpar.models.attention import causal_attention
from meshpar.models.decoder import (
    Attention,
    Decoder,
    DecoderConfig,
    llama3_8b,
    llama3_70b,
    rope,
    tiny_lm,
)
from meshpar.models.losses import cross_entropy

CONFIG = DecoderConfig(
    vocab_size=97,
    num_layers=2,
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    max_seq_len=16,
)


def tokens(seed=0, shape=(2, 12), vocab=CONFIG.vocab_size):
    return jnp.asarray(np.random.default_rng(seed).integers(vocab, size=shape, dtype=np.int32))


@nnx.jit
def apply(model, *args):
    return model(*args)


def loss_and_grads(config):
    """Loss and {path: gradient}; the gradients of unrolled layers come stacked."""
    ids = tokens(shape=(2, 13))

    @nnx.jit
    def run(model):
        return nnx.value_and_grad(lambda m: cross_entropy(m(ids[:, :-1]), ids[:, 1:]))(model)

    loss, grads = run(Decoder(config, rngs=nnx.Rngs(0)))
    return loss, stacked(grads)


def stacked(state):
    groups = {}
    for path, leaf in nnx.to_flat_state(state):
        layer = [part for part in path if isinstance(part, int)]
        name = ".".join(part for part in path if isinstance(part, str))
        groups.setdefault(name, []).append((layer, np.asarray(leaf[...])))
    return {
        name: np.stack([leaf for _, leaf in sorted(leaves, key=lambda pair: pair[0])])
        if leaves[0][0]
        else leaves[0][1]
        for name, leaves in groups.items()
    }


@pytest.fixture(scope="module")
def unrolled():
    return loss_and_grads(CONFIG)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_loss_is_that_of_a_uniform_guess(tied):
    model = Decoder(replace(CONFIG, tied=tied), rngs=nnx.Rngs(0))
    ids = tokens(shape=(4, 17))
    logits = apply(model, ids[:, :-1])
    assert logits.shape == (4, 16, 97)
    assert float(cross_entropy(logits, ids[:, 1:])) == pytest.approx(math.log(97), abs=0.1)


def test_every_parameter_has_a_finite_gradient_that_is_not_zero(unrolled):
    for name, grad in unrolled[1].items():
        assert np.isfinite(grad).all(), name
        assert np.abs(grad).max() > 0, name


@pytest.mark.parametrize(
    "options",
    [{"scan_layers": True}, {"remat": True}, {"scan_layers": True, "remat": True}],
    ids=str,
)
def test_scanned_and_recomputed_layers_equal_unrolled_ones(unrolled, options):
    loss, grads = loss_and_grads(replace(CONFIG, **options))
    assert_allclose(loss, unrolled[0], rtol=1e-6)
    assert grads.keys() == unrolled[1].keys()
    for name, grad in grads.items():
        assert_allclose(grad, unrolled[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_equal_seeds_give_equal_parameters_scanned_or_not():
    plain, scanned = (
        stacked(nnx.state(Decoder(replace(CONFIG, scan_layers=scan), rngs=nnx.Rngs(7)), nnx.Param))
        for scan in (False, True)
    )
    assert plain.keys() == scanned.keys()
    for name, value in plain.items():
        assert_array_equal(value, scanned[name], err_msg=name)
    q = plain["layers.attention.q.kernel"]
    assert not np.array_equal(q[0], q[1])  # layers differ from one another


def test_parameters_can_be_created_inside_jit():
    def create():
        return nnx.state(Decoder(replace(CONFIG, scan_layers=True), rngs=nnx.Rngs(3)), nnx.Param)

    eager, abstract, jitted = create(), jax.eval_shape(create), jax.jit(create)()
    assert jax.tree.map(jnp.shape, eager) == jax.tree.map(jnp.shape, abstract)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-6), eager, jitted)


def test_future_tokens_do_not_change_past_logits():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    ids = tokens()
    changed = ids.at[:, 7].set((ids[:, 7] + 1) % CONFIG.vocab_size)
    before, after = apply(model, ids), apply(model, changed)
    assert_array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)) > 1e-6).all()


def test_grouped_heads_equal_repeated_ones():
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 5, 6, 4))
    k, v = (jax.random.normal(key, (2, 5, 3, 4)) for key in keys[1:])
    # The specification: each query alone, in numpy, with the head it shares and its own past.
    expected = np.zeros((2, 5, 6, 4), np.float32)
    for b, t, head in np.ndindex(2, 5, 6):
        past_k, past_v = (np.asarray(x)[b, : t + 1, head // 2] for x in (k, v))
        weights = np.exp(past_k @ np.asarray(q)[b, t, head] / np.sqrt(4))
        expected[b, t, head] = weights / weights.sum() @ past_v
    assert_allclose(causal_attention(q, k, v), expected, rtol=1e-5, atol=1e-6)


def test_repeating_key_value_kernels_turns_grouped_attention_into_multi_head():
    grouped = Attention(CONFIG, rngs=nnx.Rngs(0))
    full = Attention(replace(CONFIG, num_kv_heads=4), rngs=nnx.Rngs(1))
    for name in "qo":
        getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name in "kv":
        heads = getattr(grouped, name).kernel[...].reshape(32, 2, 8)
        getattr(full, name).kernel[...] = jnp.repeat(heads, 2, axis=1).reshape(32, 32)
    x = jax.random.normal(jax.random.key(2), (2, 5, 32))
    assert_allclose(apply(grouped, x), apply(full, x), rtol=1e-5, atol=1e-7)


def test_rotary_products_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 8))
    length = 12
    at_all = [jnp.broadcast_to(x[None, None, None], (1, length, 1, 8)) for x in (q, k)]
    turned_q, turned_k = (np.asarray(rope(x, theta=100.0))[0, :, 0] for x in at_all)
    products = turned_q @ turned_k.T  # [T,S]
    for distance in range(-length + 1, length):
        diagonal = np.diagonal(products, distance)
        assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-5)
    assert np.ptp(products[0]) > 0.1  # and on the distance they do depend
    assert_allclose(products[0, 0], q @ k, rtol=1e-5)
    assert_allclose(np.linalg.norm(turned_q, axis=1), [np.linalg.norm(q)] * length, rtol=1e-5)


def test_a_tied_head_is_one_buffer_whose_gradients_add():
    config = replace(CONFIG, num_layers=1)
    tied = Decoder(replace(config, tied=True), rngs=nnx.Rngs(0))
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(tied, nnx.Param))]
    assert shapes.count((97, 32)) == 1
    assert (32, 97) not in shapes

    # The specification: embedding and head apart, of equal values.
    apart = Decoder(config, rngs=nnx.Rngs(0))
    apart.head.kernel[...] = tied.embed.embedding[...].T
    grad_of = nnx.jit(nnx.grad(lambda model: cross_entropy(model(tokens()), tokens(1))))
    grads, expected = grad_of(tied), grad_of(apart)
    assert_allclose(
        grads.embed.embedding[...],
        expected.embed.embedding[...] + expected.head.kernel[...].T,
        rtol=1e-4,
        atol=1e-6,
    )


def test_bfloat16_activations_over_float32_parameters():
    model = Decoder(replace(CONFIG, dtype="bfloat16"), rngs=nnx.Rngs(0))
    exact = Decoder(CONFIG, rngs=nnx.Rngs(0))
    logits = apply(model, tokens())
    assert logits.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    assert_allclose(logits.astype(jnp.float32), apply(exact, tokens()), atol=0.02)


@pytest.mark.parametrize(
    "config, billions", [(llama3_8b(), 8.03), (llama3_70b(), 70.55)], ids=["8b", "70b"]
)
def test_llama_presets_have_the_published_number_of_parameters(config, billions):
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count / 1e9 == pytest.approx(billions, abs=0.01)


def test_tiny_lm_splits_over_four_tensor_parallel_devices():
    config = tiny_lm()
    sizes = (config.num_heads, config.num_kv_heads, config.hidden_dim, config.vocab_size)
    assert [size % 4 for size in sizes] == [0, 0, 0, 0]


def test_config_repr_pastes_back():
    assert eval(repr(CONFIG), {"DecoderConfig": DecoderConfig}) == CONFIG


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, r"num_heads=4, num_kv_heads=3.*must divide"),
        ({"head_dim": 7}, r"head_dim=7.*even, as 8 is"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_a_longer_input_than_max_seq_len_is_refused():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"\(2, 17\).*max_seq_len = 16.*tokens\[:, -16:\]"):
        model(tokens(shape=(2, 17)))
