"""Attention with grouped heads, the core that the models share.

Follows "Attention Is All You Need" (arXiv:1706.03762) and "GQA" (arXiv:2305.13245).

B batch, T query position, S key position, H query heads, K key/value heads, G = H/K query heads
per key/value head, D head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Each position attends to itself and the ones before it.

    Args:
      q: queries of shape `(B, T, H, D)`; heads `k*G .. k*G+G-1` use key/value head `k`.
      k: keys of shape `(B, T, K, D)`, where K divides H.
      v: values of shape `(B, T, K, D)`.
      dropout: applied to the attention weights, of shape `(B, K, G, T, S)`.

    Returns:
      Shape `(B, T, H, D)`, in the dtype of `v`.
    """
    visible = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))[None, None, None]  # [1,1,1,T,S]
    return attention(q, k, v, visible=visible, dropout=dropout)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    visible: jax.Array,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Each query attends to the keys that are visible to it.

    Args:
      q: queries of shape `(B, T, H, D)`; heads `k*G .. k*G+G-1` use key/value head `k`.
      k: keys of shape `(B, S, K, D)`, where K divides H.
      v: values of shape `(B, S, K, D)`.
      visible: bools that broadcast to `(B, K, G, T, S)`. A query that sees nothing gets the mean
        of all values.
      dropout: applied to the attention weights, of shape `(B, K, G, T, S)`.

    Returns:
      Shape `(B, T, H, D)`, in the dtype of `v`.
    """
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    # Splitting H into (K, G) keeps a head's group on the device of its key/value head when heads
    # are sharded; repeating k and v to H heads would move them.
    q = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)  # [B,T,K,G,D]
    scores = jnp.einsum("BTKGD,BSKD->BKGTS", q, k).astype(jnp.float32) * head_dim**-0.5
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [B,K,G,T,S]
    if dropout is not None:
        weights = dropout(weights)
    out = jnp.einsum("BKGTS,BSKD->BTKGD", weights, v)
    return out.reshape(batch, length, num_heads, head_dim)
