"""What a caller gives, as the arrays of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar._jax import is_key_array
from meshpar.errors import CollectiveError
from meshpar.placements.dist_tensor import DistTensor

__all__ = ["as_array", "moving"]


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


def moving(operation: Callable[..., Any], *leaves: Any) -> Any:
    """An operation that moves arrays of one dtype; PRNG keys travel as their words."""
    arrays = [as_array(leaf) for leaf in leaves]
    if not is_key_array(arrays[0]):
        return operation(*arrays)
    impl = jax.random.key_impl(arrays[0])
    moved = operation(*(jax.random.key_data(key) for key in arrays))
    return jax.tree.map(lambda words: jax.random.wrap_key_data(words, impl=impl), moved)
