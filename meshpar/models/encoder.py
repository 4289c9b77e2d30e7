"""A BERT-style encoder with its sentence embeddings: MiniLM, all-MiniLM and their relatives.

Follows "BERT" (arXiv:1810.04805): learned positions and segments, norms after each residual sum,
exact GELU, attention in both directions; the mean over tokens as the sentence's vector is
"Sentence-BERT" (arXiv:1908.10084). Without dropout, and without BERT's pooler, which sentence
embeddings do not use. Trained weights are loaded by `load_bert_weights`.

B batch, T position, S key position, V vocabulary, E model dim, H heads, D head dim (E = H D).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.attention import attention
from meshpar.models.parts import check_heads, embedding, linear, norm
from meshpar.models.stack import make_layers, run_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes and options of an `Encoder`; the defaults are those of MiniLM with 6 layers."""

    vocab_size: int = 30_522
    num_segments: int = 2  # a sentence is segment 0
    num_layers: int = 6
    model_dim: int = 384
    num_heads: int = 12
    hidden_dim: int = 1536
    max_seq_len: int = 512
    norm_eps: float = 1e-12
    init_std: float = 0.02
    dtype: str = "float32"  # of activations; softmax and norms' statistics are float32
    param_dtype: str = "float32"
    scan_layers: bool = False  # see meshpar.models.stack
    remat: bool = False  # recompute each layer in the backward pass

    def __post_init__(self) -> None:
        check_heads("EncoderConfig", self.model_dim, self.num_heads)


class Encoder(nnx.Module):
    """Maps tokens of shape `(B, T)` to a vector per token, of shape `(B, T, E)`.

    Example:
      >>> config = EncoderConfig(vocab_size=64, num_layers=2, model_dim=16, num_heads=2)
      >>> model = Encoder(config, rngs=nnx.Rngs(0))
      >>> tokens, mask = jnp.zeros((1, 8), jnp.int32), jnp.arange(8)[None] < 5
      >>> model(tokens, mask).shape, mean_embedding(model(tokens, mask), mask).shape
      ((1, 8, 16), (1, 16))
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = embedding(config, config.vocab_size, rngs)
        self.positions = embedding(config, config.max_seq_len, rngs)
        self.segments = embedding(config, config.num_segments, rngs)
        self.embed_norm = norm(nnx.LayerNorm, config, rngs)
        self.layers = make_layers(
            lambda rngs: EncoderLayer(config, rngs=rngs),
            config.num_layers,
            scan=config.scan_layers,
            rngs=rngs,
        )

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """A vector for each token, in `config.dtype`.

        Args:
          tokens: integers of shape `(B, T)`, T at most `max_seq_len`.
          mask: bools of shape `(B, T)`, true where a token is and false where padding is. Padding
            changes no other position's vector; its own vectors mean nothing.

        Raises:
          ValueError: the shapes do not fit, or the sentences are too long.
        """
        longest = self.config.max_seq_len
        if tokens.ndim != 2 or tokens.shape[1] > longest or mask.shape != tokens.shape:
            raise ValueError(
                f"Encoder(tokens, mask): shapes {tokens.shape} and {mask.shape} are not both "
                f"(batch, length) with length <= max_seq_len = {longest}; tokens[:, :{longest}] "
                "keeps the first ones, and jnp.ones(tokens.shape, bool) is the mask of no padding"
            )
        positions = self.positions(jnp.arange(tokens.shape[1])[None])  # [1,T,E]
        segment = self.segments(jnp.zeros((1, 1), jnp.int32))  # [1,1,E]
        x = self.embed_norm(self.embed(tokens) + positions + segment)  # [B,T,E]
        return run_layers(self.layers, x, mask, remat=self.config.remat)


class EncoderLayer(nnx.Module):
    """Attention, then MLP, each added to its input and normalized with it."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = norm(nnx.LayerNorm, config, rngs)
        self.mlp = FeedForward(config, rngs=rngs)
        self.mlp_norm = norm(nnx.LayerNorm, config, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.mlp(x))


class Attention(nnx.Module):
    """Multi-head attention to every token that is not padding."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.model_dim // config.num_heads
        self.q = linear(config, config.model_dim, config.model_dim, rngs)
        self.k = linear(config, config.model_dim, config.model_dim, rngs)
        self.v = linear(config, config.model_dim, config.model_dim, rngs)
        self.o = linear(config, config.model_dim, config.model_dim, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).reshape(heads) for project in (self.q, self.k, self.v))  # [B,T,H,D]
        visible = mask[:, None, None, None, :]  # [B,1,1,1,S]
        return self.o(attention(q, k, v, visible=visible).reshape(x.shape))  # [B,T,E]


class FeedForward(nnx.Module):
    """`down(gelu(up(x)))`."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.up = linear(config, config.model_dim, config.hidden_dim, rngs)
        self.down = linear(config, config.hidden_dim, config.model_dim, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))  # [B,T,E]


def mean_embedding(vectors: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of a sentence's vectors, scaled to length 1.

    Args:
      vectors: floats of shape `(B, T, E)`.
      mask: bools of shape `(B, T)`, false where padding is.

    Returns:
      float32 of shape `(B, E)`; zeros for a sentence of padding only.
    """
    weights = mask.astype(jnp.float32)[:, :, None]  # [B,T,1]
    total = (vectors.astype(jnp.float32) * weights).sum(axis=1)  # [B,E]
    mean = total / jnp.maximum(weights.sum(axis=1), 1e-9)
    # The bound is inside the root: its gradient at zero would be NaN.
    return mean * jax.lax.rsqrt(jnp.maximum((mean * mean).sum(axis=1, keepdims=True), 1e-24))
