"""Rows of blocks: what the local programs of rules share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from meshpar.rules.rule import Emission

__all__ = ["without_padding"]


def without_padding(
    at: Emission, block: jax.Array, dim: int, factor: str, filler: ArrayLike
) -> jax.Array:
    """A block whose padding along a dim holds `filler`."""
    rows = lax.broadcasted_iota(jnp.int32, block.shape, dim)
    return jnp.where(rows < at.valid(factor), block, jnp.asarray(filler, block.dtype))
