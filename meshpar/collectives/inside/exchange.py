"""`alltoall` and `alltoall_single` inside a region."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.collectives.inside.members import members_of
from meshpar.collectives.inside.pieces import exchanged, spread
from meshpar.mesh import Group

__all__ = ["alltoall", "alltoall_single"]

Table = Sequence[Sequence[int]]


def alltoall(
    xs: Sequence[jax.Array], group: Group, timeout: float | None = None
) -> list[jax.Array]:
    """What each member has for this one; zeros on other devices."""
    members = members_of(group)
    got = exchanged(spread(xs, members), members)
    return list(members.only_members(got, jnp.zeros_like(got)))


def alltoall_single(
    x: jax.Array, table: Table | None, _: None, group: Group, timeout: float | None = None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The parts for this member joined; with a table also the rows of each.

    Args:
      x: `(rows, ...)`.
      table: `table[i][j]` is the number of rows that member i sends to member j.
    """
    members = members_of(group)
    if table is None:
        return jnp.concatenate(alltoall(jnp.split(x, members.count), group))
    rows = np.asarray(table, np.int32)
    here = jnp.maximum(members.position(), 0)
    parts = jnp.asarray(_sent_rows(rows))[here]  # (members, most rows of one part)
    nothing = jnp.zeros((1, *x.shape[1:]), x.dtype)
    chunks = jnp.concatenate([x, nothing])[parts]
    got = exchanged(spread(list(chunks), members), members)
    flat = jnp.concatenate([got.reshape(-1, *x.shape[1:]), nothing])
    padded = flat[jnp.asarray(_got_rows(rows))[here]]
    sizes = jnp.asarray(rows.T)[here]
    outside = jnp.zeros_like(padded), jnp.zeros_like(sizes)
    return members.only_members(padded, outside[0]), members.only_members(sizes, outside[1])


def _sent_rows(table: np.ndarray) -> np.ndarray:
    """`[i, j, k]` is the row of member i's array that is row k of its part for member j.

    Rows of padding are the row behind the last.
    """
    starts = np.cumsum(table, axis=1) - table
    k = np.arange(table.max(initial=0))
    behind = table.sum(axis=1).max()
    return np.where(k < table[..., None], starts[..., None] + k, behind)


def _got_rows(table: np.ndarray) -> np.ndarray:
    """`[j, k]` is where row k of what member j gets lies among the parts, joined with padding."""
    count, width = len(table), table.max(initial=0)
    out = np.full((count, table.sum(axis=0).max()), count * width)
    for j in range(count):
        rows = [i * width + k for i in range(count) for k in range(table[i, j])]
        out[j, : len(rows)] = rows
    return out
