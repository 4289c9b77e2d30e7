"""What a caller gives, as the arrays of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar._jax import is_key_array
from meshpar.errors import CollectiveError
from meshpar.placements.dist_tensor import DistTensor
from meshpar.placements.layout import Layout
from meshpar.placements.reductions import check_dtype

__all__ = ["as_array", "moving", "per_array"]


def per_array(operation: Callable[[Any], Any], tree: Any) -> Any:
    """An operation on each array of a pytree; quicker than `jax.tree.map` where it is one array."""
    if isinstance(tree, (jax.Array, np.ndarray)):
        return operation(tree)
    return jax.tree.map(operation, tree)


def as_array(x: Any) -> jax.Array:
    """A leaf as an array.

    Raises:
      CollectiveError: it is a value distributed over a mesh, or no array at all.
      PlacementError: it is of a dtype that XLA has no collectives for.
    """
    if isinstance(x, jax.Array):
        if getattr(x.dtype, "kind", None) == "V":  # one of the narrow types
            check_dtype(Layout.replicated(x.ndim), x.dtype)
        return x
    if isinstance(x, DistTensor):
        raise CollectiveError(
            f"{x!r} is a value of the whole mesh, not of one rank.",
            instead="mp.reshard(x, mesh, placements) changes how it lies; mp.spmd takes it apart",
        )
    try:
        if isinstance(x, np.ndarray):
            _check_narrowing(x)
        array = jnp.asarray(x)
    except (TypeError, OverflowError):
        raise CollectiveError(f"{x!r} is no array.") from None
    return as_array(array)


def _check_narrowing(x: np.ndarray) -> None:
    """Checks that an array of 64 bits keeps its numbers where JAX makes one of 32 bits of it.

    Floats are rounded, as everywhere in JAX; a whole number is never another one, and a float is
    not infinite of a sudden.
    """
    kept = jax.dtypes.canonicalize_dtype(x.dtype)
    if kept == x.dtype or not x.size:
        return
    if np.issubdtype(kept, np.integer):
        limits = np.iinfo(kept)
        fits = x.min() >= limits.min and x.max() <= limits.max
    else:
        with np.errstate(over="ignore"):
            fits = bool((np.isfinite(x.astype(kept)) == np.isfinite(x)).all())
    if not fits:
        raise CollectiveError(
            f"the array is {x.dtype}, and {kept} does not hold its numbers.",
            because="JAX makes arrays of 32 bits of those of 64 where jax_enable_x64 is off",
            instead='jax.config.update("jax_enable_x64", True) at the start, on all ranks',
        )


def moving(operation: Callable[..., Any], *leaves: Any) -> Any:
    """An operation that moves arrays of one dtype; PRNG keys travel as their words."""
    arrays = [as_array(leaf) for leaf in leaves]
    if not is_key_array(arrays[0]):
        return operation(*arrays)
    impl = jax.random.key_impl(arrays[0])
    moved = operation(*(jax.random.key_data(key) for key in arrays))
    return jax.tree.map(lambda words: jax.random.wrap_key_data(words, impl=impl), moved)
