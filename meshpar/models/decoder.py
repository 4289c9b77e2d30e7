"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Follows "LLaMA" (arXiv:2302.13971) and "The Llama 3 Herd of Models" (arXiv:2407.21783); rotary
positions "RoFormer" (arXiv:2104.09864), SwiGLU "GLU Variants Improve Transformer"
(arXiv:2002.05202), small initial residual projections "GPT-2" (Radford et al., 2019).

B batch, T position, V vocabulary, E model dim, H query heads, K key/value heads, D head dim,
F hidden dim of the MLP.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.attention import causal_attention
from meshpar.models.parts import check_tokens, embedding, linear, norm
from meshpar.models.stack import make_layers, run_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a `Decoder`.

    Example:
      >>> config = DecoderConfig(
      ...     vocab_size=256, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2,
      ...     head_dim=16, hidden_dim=128, max_seq_len=64,
      ... )
      >>> eval(repr(config)) == config
      True
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int  # divides num_heads; equal to it: multi-head, 1: multi-query attention
    head_dim: int  # even: rotary positions turn pairs
    hidden_dim: int
    max_seq_len: int  # no parameter depends on it; a longer input raises
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False  # the head is the transposed embedding
    init_std: float = 0.02  # of all matrices, the residual projections' divided by sqrt(2 L)
    dtype: str = "float32"  # of activations; softmax and norms' statistics are float32
    param_dtype: str = "float32"
    scan_layers: bool = False  # see meshpar.models.stack
    remat: bool = False  # recompute each layer in the backward pass

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"DecoderConfig(num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}): "
                "each key/value head serves equally many query heads, so num_kv_heads must divide "
                f"num_heads; num_kv_heads={self.num_heads} is multi-head, 1 multi-query attention"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"DecoderConfig(head_dim={self.head_dim}): rotary positions turn pairs of "
                f"features, so head_dim must be even, as {self.head_dim + 1} is"
            )


class Decoder(nnx.Module):
    """Maps tokens of shape `(B, T)` to logits of shape `(B, T, V)`.

    Example:
      >>> model = Decoder(tiny_lm(), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 8), jnp.int32)).shape
      (1, 8, 256)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = embedding(config, config.vocab_size, rngs)
        self.layers = make_layers(
            lambda rngs: DecoderLayer(config, rngs=rngs),
            config.num_layers,
            scan=config.scan_layers,
            rngs=rngs,
        )
        self.final_norm = norm(nnx.RMSNorm, config, rngs)
        if not config.tied:
            self.head = linear(config, config.model_dim, config.vocab_size, rngs, bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token at each position, in `config.dtype`."""
        check_tokens("Decoder", tokens, self.config.max_seq_len)
        x = self.embed(tokens)  # [B,T,E]
        x = run_layers(self.layers, x, remat=self.config.remat)
        x = self.final_norm(x)
        return self.embed.attend(x) if self.config.tied else self.head(x)  # [B,T,V]


class DecoderLayer(nnx.Module):
    """Attention, then MLP, each on the normalized input and added to it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = norm(nnx.RMSNorm, config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(nnx.RMSNorm, config, rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = linear(config, config.model_dim, q_dim, rngs, bias=False)
        self.k = linear(config, config.model_dim, kv_dim, rngs, bias=False)
        self.v = linear(config, config.model_dim, kv_dim, rngs, bias=False)
        self.o = linear(config, q_dim, config.model_dim, rngs, bias=False, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rope(self.q(x).reshape(heads), theta=self.rope_theta)  # [B,T,H,D]
        k = rope(self.k(x).reshape(heads), theta=self.rope_theta)  # [B,T,K,D]
        v = self.v(x).reshape(heads)  # [B,T,K,D]
        return self.o(causal_attention(q, k, v).reshape(*x.shape[:2], -1))  # [B,T,E]


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = linear(config, config.model_dim, config.hidden_dim, rngs, bias=False)
        self.up = linear(config, config.model_dim, config.hidden_dim, rngs, bias=False)
        self.down = linear(
            config, config.hidden_dim, config.model_dim, rngs, bias=False, residual=True
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))  # [B,T,F] -> [B,T,E]


def rope(x: jax.Array, *, theta: float) -> jax.Array:
    """Turns feature pairs `(i, i + D/2)` at position t by the angle `t * theta**(-2 i / D)`.

    Args:
      x: queries or keys of shape `(B, T, H, D)`.
      theta: the base of the wave lengths.

    Returns:
      The shape and dtype of `x`. A query at t and a key at s meet in a product that depends on
      t - s only.
    """
    length, head_dim = x.shape[1], x.shape[3]
    speed = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)  # [D/2]
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * speed[None, :]  # [T,D/2]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    # float32: bfloat16 angles are off by whole turns at a few hundred positions.
    lhs, rhs = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [B,T,H,D/2] each
    return jnp.concatenate([lhs * cos - rhs * sin, rhs * cos + lhs * sin], axis=-1).astype(x.dtype)


def tiny_lm(*, scan_layers: bool = False) -> DecoderConfig:
    """A byte-level model that learns Python source in minutes on two CPU cores."""
    return DecoderConfig(
        vocab_size=256,
        num_layers=2,
        model_dim=128,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        hidden_dim=384,
        max_seq_len=128,
        init_std=0.06,  # 0.02 is for widths of thousands: a narrow model starts too close to 0
        scan_layers=scan_layers,
    )


def llama3_8b() -> DecoderConfig:
    """Sizes of Llama 3 8B (arXiv:2407.21783, table 3), scanned and recomputed in bfloat16."""
    return DecoderConfig(
        vocab_size=128_256,
        num_layers=32,
        model_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden_dim=14_336,
        max_seq_len=8192,
        rope_theta=500_000.0,
        dtype="bfloat16",
        scan_layers=True,
        remat=True,
    )


def llama3_70b() -> DecoderConfig:
    """Sizes of Llama 3 70B (arXiv:2407.21783, table 3), scanned and recomputed in bfloat16."""
    return replace(llama3_8b(), num_layers=80, model_dim=8192, num_heads=64, hidden_dim=28_672)
