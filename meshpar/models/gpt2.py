"""GPT-2: learned positions, LayerNorm, GELU, dropout, and a head tied to the embedding.

Follows "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019): norms before
each block and one at the end, residual projections initialised smaller by `sqrt(2 L)`.

B batch, T position, V vocabulary, E model dim, H heads, D head dim (E = H D).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.attention import causal_attention
from meshpar.models.parts import (
    check_heads,
    check_tokens,
    dropout,
    embedding,
    linear,
    norm,
)
from meshpar.models.stack import make_layers, run_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Sizes and options of a `GPT2`; the defaults are those of GPT-2 small."""

    vocab_size: int = 50_257
    num_layers: int = 12
    model_dim: int = 768
    num_heads: int = 12
    max_seq_len: int = 1024
    dropout: float = 0.1  # rate, of embeddings, attention weights and residual branches
    norm_eps: float = 1e-5
    init_std: float = 0.02  # of all matrices, the residual projections' divided by sqrt(2 L)
    dtype: str = "float32"  # of activations; softmax and norms' statistics are float32
    param_dtype: str = "float32"
    scan_layers: bool = False  # see meshpar.models.stack
    remat: bool = False  # recompute each layer in the backward pass

    def __post_init__(self) -> None:
        check_heads("GPT2Config", self.model_dim, self.num_heads)


class GPT2(nnx.Module):
    """Maps tokens of shape `(B, T)` to logits of shape `(B, T, V)`.

    Dropout is on after construction, off after `model.eval()`, on again after `model.train()`.

    Example:
      >>> config = GPT2Config(vocab_size=256, num_layers=2, model_dim=64, num_heads=4)
      >>> model = GPT2(config, rngs=nnx.Rngs(params=0, dropout=1))
      >>> model(jnp.zeros((1, 8), jnp.int32)).shape
      (1, 8, 256)
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = embedding(config, config.vocab_size, rngs)
        self.positions = embedding(config, config.max_seq_len, rngs)
        self.embed_dropout = dropout(config.dropout, rngs)
        self.layers = make_layers(
            lambda rngs: GPT2Layer(config, rngs=rngs),
            config.num_layers,
            scan=config.scan_layers,
            rngs=rngs,
        )
        self.final_norm = norm(nnx.LayerNorm, config, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token at each position, in `config.dtype`."""
        check_tokens("GPT2", tokens, self.config.max_seq_len)
        positions = self.positions(jnp.arange(tokens.shape[1])[None])  # [1,T,E]
        x = self.embed_dropout(self.embed(tokens) + positions)  # [B,T,E]
        x = run_layers(self.layers, x, remat=self.config.remat)
        return self.embed.attend(self.final_norm(x))  # [B,T,V]


class GPT2Layer(nnx.Module):
    """Attention, then MLP, each on the normalized input and added to it after dropout."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = norm(nnx.LayerNorm, config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(nnx.LayerNorm, config, rngs)
        self.mlp = FeedForward(config, rngs=rngs)
        self.attention_dropout = dropout(config.dropout, rngs)
        self.mlp_dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Attention(nnx.Module):
    """Causal multi-head attention with dropout of its weights.

    q, k and v are three matrices, not GPT-2's fused one: columns of a fused matrix cannot be
    sharded by head as one contiguous dim.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.model_dim // config.num_heads
        self.q = linear(config, config.model_dim, config.model_dim, rngs)
        self.k = linear(config, config.model_dim, config.model_dim, rngs)
        self.v = linear(config, config.model_dim, config.model_dim, rngs)
        self.o = linear(config, config.model_dim, config.model_dim, rngs, residual=True)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).reshape(heads) for project in (self.q, self.k, self.v))  # [B,T,H,D]
        return self.o(causal_attention(q, k, v, dropout=self.dropout).reshape(x.shape))  # [B,T,E]


class FeedForward(nnx.Module):
    """`down(gelu(up(x)))`, four times as wide inside."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.up = linear(config, config.model_dim, 4 * config.model_dim, rngs)
        self.down = linear(config, 4 * config.model_dim, config.model_dim, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))  # [B,T,4E] -> [B,T,E]
