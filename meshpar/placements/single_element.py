"""Taking one element of a vector where an index says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["made_first"]


def made_first(vector: jax.Array, count: int) -> jax.Array:
    """What `count` elements are taken from, which XLA must make before it takes a single one.

    XLA's simplifier (jaxlib 0.10 and 0.12) turns an element of `n * dynamic_slice(x)` of integers
    into one of `dynamic_slice(x)`. A program that does not take single elements may come to it by
    being cut into blocks of one.
    """
    single = vector.ndim == 1 and count == 1 and jnp.issubdtype(vector.dtype, jnp.integer)
    return lax.optimization_barrier(vector) if single else vector
