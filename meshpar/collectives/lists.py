"""Lists of arrays, one for each rank: their checks, and filling those that the caller gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.arrays import as_array
from meshpar.errors import CollectiveError
from meshpar.placements.values import describe

__all__ = ["check_alike", "filled", "per_leaf", "rows_of_each"]


def per_leaf(operation: Callable[..., list[Any]], *trees: Any) -> list[Any]:
    """An operation that gives a list for each leaf, as a list of trees."""
    leaves = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
    lists = [operation(*group) for group in leaves]
    structure = jax.tree.structure(trees[0])
    return [jax.tree.unflatten(structure, item) for item in zip(*lists, strict=True)]


def filled(target: Any, values: list[Any]) -> Any:
    """The values in the list that the caller gave, in a new one, or joined for an array."""
    if target is None:
        return values
    if isinstance(target, list):
        target[:] = values
        return target
    return jax.tree.map(lambda *xs: jnp.concatenate([jnp.atleast_1d(x) for x in xs]), *values)


def check_alike(what: str, items: Sequence[Any], like: Any = None) -> None:
    """Checks that the items have the same tree, shapes and dtypes, and those of `like`.

    Raises:
      CollectiveError: they do not.
    """
    first, named = (items[0], f"{what}[0]") if like is None else (like, "tensor")
    for i, item in enumerate(items):
        if jax.tree.structure(item) != jax.tree.structure(first):
            raise CollectiveError(
                f"{what}[{i}] is another tree than {named}.",
                because=f"{jax.tree.structure(item)} is not {jax.tree.structure(first)}",
            )
        pairs = zip(jax.tree.leaves(item), jax.tree.leaves(first), strict=True)
        for leaf, expected in pairs:
            x, y = as_array(leaf), as_array(expected)
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                raise CollectiveError(
                    f"{what}[{i}] is {describe(x)}, and {named} is {describe(y)}.",
                    because="the ranks exchange items of one shape and dtype",
                )


def rows_of_each(x: jax.Array, parts: int) -> list[jax.Array]:
    """An array as equal parts along dim 0.

    Raises:
      CollectiveError: it cannot be divided.
    """
    if not x.ndim:
        raise CollectiveError(
            f"a scalar cannot be cut between {parts} rank(s).", instead="a list with one for each"
        )
    rows = x.shape[0]
    if rows % parts:
        raise CollectiveError(
            f"dim 0 of {describe(x)} cannot be cut equally between {parts} ranks.",
            because=f"{rows} rows / {parts} ranks leaves {rows % parts}",
        )
    step = rows // parts
    return [x[i * step : (i + 1) * step] for i in range(parts)]
