"""The encoder against a plain numpy BERT on weights named as in BERT's files."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from meshpar.models import Encoder, EncoderConfig, load_bert_weights, mean_embedding

CONFIG = EncoderConfig(
    vocab_size=29, num_layers=2, model_dim=12, num_heads=3, hidden_dim=20, max_seq_len=10
)
TOKENS = np.random.default_rng(0).integers(0, 29, (3, 7)).astype(np.int32)
MASK = np.arange(7)[None] < np.array([[7], [4], [1]])


def weights_of(config=CONFIG, seed=0):
    """Random weights under the names and in the shapes of BERT's files."""
    rng = np.random.default_rng(seed)
    dim, hidden = config.model_dim, config.hidden_dim
    shapes = {
        "embeddings.word_embeddings.weight": (config.vocab_size, dim),
        "embeddings.position_embeddings.weight": (config.max_seq_len, dim),
        "embeddings.token_type_embeddings.weight": (2, dim),
        "embeddings.LayerNorm.weight": (dim,),
        "embeddings.LayerNorm.bias": (dim,),
        "pooler.dense.weight": (dim, dim),
    }
    for layer in range(config.num_layers):
        at = f"encoder.layer.{layer}."
        for name, out, into in (
            ("attention.self.query", dim, dim),
            ("attention.self.key", dim, dim),
            ("attention.self.value", dim, dim),
            ("attention.output.dense", dim, dim),
            ("intermediate.dense", hidden, dim),
            ("output.dense", dim, hidden),
        ):
            shapes |= {f"{at}{name}.weight": (out, into), f"{at}{name}.bias": (out,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{at}{name}.weight": (dim,), f"{at}{name}.bias": (dim,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def plain_bert(weights, tokens, mask, config=CONFIG):
    """BERT on one sentence at a time, its padding cut off, in float64."""

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T.astype(np.float64) + weights[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_eps)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    out = []
    for ids in (row[keep] for row, keep in zip(tokens, mask, strict=True)):
        x = weights["embeddings.word_embeddings.weight"][ids].astype(np.float64)
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = norm("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
        for layer in range(config.num_layers):
            at = f"encoder.layer.{layer}."
            q, k, v = (linear(f"{at}attention.self.{n}", x) for n in ("query", "key", "value"))
            heads = []
            for columns in np.split(np.arange(config.model_dim), config.num_heads):
                scores = q[:, columns] @ k[:, columns].T / math.sqrt(len(columns))
                shares = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, columns])
            mixed = linear(f"{at}attention.output.dense", np.concatenate(heads, -1))
            x = norm(f"{at}attention.output.LayerNorm", x + mixed)
            h = linear(f"{at}intermediate.dense", x)
            gelu = 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
            x = norm(f"{at}output.LayerNorm", x + linear(f"{at}output.dense", gelu))
        out.append(x)
    return out


def model_of(**options):
    return Encoder(replace(CONFIG, **options), rngs=nnx.Rngs(0))


@nnx.jit
def apply(model, tokens, mask):
    return model(tokens, mask)


@pytest.mark.parametrize("options", [{}, {"scan_layers": True}, {"remat": True}], ids=str)
def test_loaded_weights_give_what_a_plain_bert_gives(options):
    weights = weights_of()
    got = apply(load_bert_weights(model_of(**options), weights), TOKENS, MASK)
    expected = plain_bert(weights, TOKENS, MASK)
    for row, keep, wanted in zip(np.asarray(got), MASK, expected, strict=True):
        assert_allclose(row[keep], wanted, rtol=1e-4, atol=1e-5)
    vectors = mean_embedding(got, jnp.asarray(MASK))
    for vector, wanted in zip(vectors, expected, strict=True):
        mean = wanted.mean(0)
        assert_allclose(vector, mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-5)


def test_padding_does_not_count():
    model = load_bert_weights(model_of(), weights_of())
    other = np.where(MASK, TOKENS, 5).astype(np.int32)
    assert (other != TOKENS).any()
    lhs, rhs = (mean_embedding(apply(model, ids, MASK), MASK) for ids in (TOKENS, other))
    assert_array_equal(lhs, rhs)


def test_a_sentence_of_padding_only_is_zeros_with_a_gradient():
    mask = np.zeros((1, 4), bool)
    vectors = np.ones((1, 4, 3), np.float32)
    assert_array_equal(mean_embedding(vectors, mask), np.zeros((1, 3)))
    gradient = jax.grad(lambda x: mean_embedding(x, mask).sum())(vectors)
    assert_array_equal(gradient, np.zeros_like(vectors))


def test_a_weight_that_is_missing_too_many_or_of_another_shape_is_named():
    weights = weights_of()
    name = "encoder.layer.1.output.dense.weight"
    without = {n: w for n, w in weights.items() if n != name}
    with pytest.raises(KeyError, match=re.escape(f"no '{name}', which layers.1.mlp.down.kernel")):
        load_bert_weights(model_of(), without)
    with pytest.raises(KeyError, match="16 weights have no place in the model"):
        load_bert_weights(model_of(num_layers=1), weights)
    with pytest.raises(ValueError, match=r"embed.embedding of shape \(29, 12\), .* \(30, 12\)"):
        load_bert_weights(model_of(vocab_size=30), weights)


def test_shapes_that_do_not_fit():
    for tokens, mask in ((TOKENS, MASK[:, :3]), (TOKENS[0], MASK[0]), (np.ones((1, 11), int),) * 2):
        with pytest.raises(ValueError, match="<= max_seq_len = 10"):
            model_of()(tokens, mask)
    with pytest.raises(ValueError, match="12 % 5 = 2"):
        replace(CONFIG, num_heads=5)
