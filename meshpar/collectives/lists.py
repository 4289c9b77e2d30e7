"""Lists of arrays, one for each rank: their checks, and filling those that the caller gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.arrays import as_array
from meshpar.errors import CollectiveError
from meshpar.placements.values import describe

__all__ = [
    "check_alike",
    "check_length",
    "check_target",
    "filled",
    "items_of_each",
    "per_leaf",
    "rows_of_each",
]


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


def items_of_each(what: str, given: Any, count: int) -> list[Any]:
    """A list with an item for each of `count` ranks, or an array cut into one.

    Raises:
      CollectiveError: it is neither, or has another length.
    """
    if hasattr(given, "shape"):
        return rows_of_each(as_array(given), count)
    if not isinstance(given, (list, tuple)):
        raise CollectiveError(
            f"{what} is a {type(given).__name__}; it is a list with an item for each rank, or one "
            "array whose dim 0 is cut."
        )
    items: list[Any] = list(given)  # pyright: ignore[reportUnknownArgumentType]
    check_length(what, items, count)
    return items


def check_length(what: str, items: Sequence[Any], count: int) -> None:
    """Checks that a list has an item for each of `count` ranks.

    Raises:
      CollectiveError: it has not.
    """
    if len(items) != count:
        raise CollectiveError(
            f"{what} has {len(items)} item(s) for {count} rank(s).",
            because="it holds one for each rank of the group, in rank order",
        )


def check_target(what: str, target: Any, count: int) -> None:
    """Checks a list that is to be filled: empty, or with an item for each of `count` ranks.

    Raises:
      CollectiveError: it has another length, or is neither a list nor an array.
    """
    if target is None or (isinstance(target, list) and not target) or hasattr(target, "shape"):
        return
    if not isinstance(target, list):
        raise CollectiveError(
            f"{what} is a {type(target).__name__}; it is a list to fill, or left out."
        )
    items: list[Any] = target
    check_length(what, items, count)
