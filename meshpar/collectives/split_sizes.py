"""The split sizes of `alltoall_single`: a list for each process, the whole table in a region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshpar.collectives.call import Call
from meshpar.collectives.lists import rows_of_each
from meshpar.errors import CollectiveError
from meshpar.placements.values import describe

__all__ = ["checked_split_sizes"]

Sizes = Sequence[Any] | None


def checked_split_sizes(
    x: jax.Array, in_sizes: Sizes, out_sizes: Sizes, like: Any, call: Call
) -> tuple[Any, Any]:
    """The two arguments of the internal `alltoall_single`, checked against the array.

    Args:
      x: what this rank sends, `(rows, ...)`.
      in_sizes: the rows for each rank, or the table.
      out_sizes: the rows from each rank.
      like: an array like the result, where one was given.
      call: the call.

    Returns:
      `(None, None)` for equal parts; `(table, None)` in a region; else two tuples.

    Raises:
      CollectiveError: they do not fit.
    """
    count = call.group.nranks
    if in_sizes is None and out_sizes is None:
        rows_of_each(x, count)
        return None, None
    if call.region is not None:
        return _table(x, in_sizes, out_sizes, count), None
    sent = _sizes("in_split_sizes", in_sizes, x, count)
    if out_sizes is None and like is None:
        raise CollectiveError(
            "out_split_sizes is missing.",
            because="with in_split_sizes this rank has to say what it gets from each",
            instead="out_split_sizes=[...], or an out_tensor whose rows come equally from all",
        )
    return sent, _sizes("out_split_sizes", out_sizes, like, count)


def _sizes(what: str, sizes: Sizes, x: Any, count: int) -> tuple[int, ...]:
    """A list of sizes that adds up to the rows of an array, if there is one."""
    if sizes is None:
        return (rows_of_each(x, count)[0].shape[0],) * count
    row = np.asarray(sizes)
    if row.shape != (count,) or not np.issubdtype(row.dtype, np.integer) or (row < 0).any():
        raise CollectiveError(
            f"{what}={list(sizes)!r}: it is a list of {count} numbers of rows, one for each rank."
        )
    if x is not None and (not x.ndim or row.sum() != x.shape[0]):
        raise CollectiveError(
            f"{what}={row.tolist()} does not fit {describe(x)}.",
            because=f"the sizes add up to {row.sum()}, and dim 0 has "
            f"{x.shape[0] if x.ndim else 'no'} rows",
        )
    return tuple(row.tolist())


def _table(x: jax.Array, in_sizes: Sizes, out_sizes: Sizes, count: int) -> tuple[Any, ...]:
    example = f"in_split_sizes=[[...] * {count}] * {count}"
    if in_sizes is None or out_sizes is not None:
        raise CollectiveError(
            "inside a region the table of in_split_sizes says what every rank sends and gets.",
            because="all ranks run one program, so that each needs the sizes of all",
            instead=f"{example}, without out_split_sizes",
        )
    try:
        table = np.asarray(in_sizes)
    except (ValueError, TypeError):  # ragged, or a traced value
        table = np.zeros(())
    if table.shape != (count, count) or not np.issubdtype(table.dtype, np.integer):
        raise CollectiveError(
            f"in_split_sizes={in_sizes!r} is no table of {count} x {count} numbers.",
            because="inside a region row i says how many rows rank i of the group sends to each; "
            "the numbers are compile-time constants",
            instead=example,
        )
    if (table < 0).any():
        raise CollectiveError(f"in_split_sizes={in_sizes!r} has a negative number of rows.")
    most = int(table.sum(axis=1).max())
    if not x.ndim or x.shape[0] != most:
        raise CollectiveError(
            f"{describe(x)} does not fit the table.",
            because=f"the rows of the table add up to {table.sum(axis=1).tolist()}, so that every "
            f"rank's array has {most} rows, its own first",
        )
    return tuple(tuple(int(rows) for rows in row) for row in table)
