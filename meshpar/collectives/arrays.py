"""What a caller gives, as the arrays of one rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import CollectiveError
from meshpar.placements.dist_tensor import DistTensor

__all__ = ["as_array", "as_arrays"]


def as_array(x: Any) -> jax.Array:
    """A leaf as an array.

    Raises:
      CollectiveError: it is a value distributed over a mesh, or no array at all.
    """
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, DistTensor):
        raise CollectiveError(
            f"{x!r} is a value of the whole mesh, not of one rank.",
            instead="mp.reshard(x, mesh, placements) changes how it lies; mp.spmd takes it apart",
        )
    try:
        return jnp.asarray(x)
    except TypeError:
        raise CollectiveError(f"{x!r} is no array.") from None


def as_arrays(tree: Any) -> Any:
    """A pytree of arrays from one of what can be arrays."""
    return jax.tree.map(as_array, tree)
