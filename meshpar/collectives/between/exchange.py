"""Arrays that go from each rank to each other one."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.collectives.between import bodies
from meshpar.collectives.between.engine import Action, perform
from meshpar.collectives.between.terms import Terms
from meshpar.collectives.between.world import here
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["alltoall", "alltoall_single"]


def alltoall(xs: Sequence[jax.Array], group: Group, terms: Terms) -> list[jax.Array]:
    """From each rank its item for this one."""
    return perform(Action("alltoall()", bodies.exchanged), list(xs), group.ranks, terms)


def alltoall_single(
    x: jax.Array,
    in_sizes: Sequence[int] | None,
    out_sizes: Sequence[int] | None,
    group: Group,
    terms: Terms,
) -> jax.Array:
    """From each rank its rows for this one, joined in the group's order.

    Without sizes all parts are equal. With them the ranks first tell each other theirs, which is a
    small collective by itself; then parts travel padded to the largest, so that XLA compiles one
    program for many tables.

    Raises:
      CollectiveError: what a rank sends is not what another one expects; all ranks raise.
    """
    if in_sizes is None or out_sizes is None:
        action = Action("alltoall_single()", bodies.exchanged_rows)
        return perform(action, x, group.ranks, terms)
    sends, expects = _tables(in_sizes, out_sizes, group, terms)
    _check_tables(sends, expects, group)
    most = int(sends.max())
    mine = sends[:, group.ranks.index(here().rank)]
    if most == 0:
        return x[:0]
    part = 1 << (most - 1).bit_length()
    padded = _taken(x, _padded_rows(in_sizes, part))
    action = Action("alltoall_single(sizes)", bodies.exchanged_rows)
    moved = perform(action, padded, group.ranks, terms)
    kept = np.concatenate([np.arange(n) + i * part for i, n in enumerate(mine)])
    return _taken(moved, kept)


def _tables(
    in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group, terms: Terms
) -> tuple[np.ndarray, np.ndarray]:
    """Who sends how many rows to whom, and who expects how many from whom: [sender, receiver]."""
    own = np.array([in_sizes, out_sizes], dtype=np.int32)
    action = Action("alltoall_single(sizes)", bodies.gathered)
    found = np.stack(perform(action, own, group.ranks, terms))
    return found[:, 0], found[:, 1].T


def _check_tables(sends: np.ndarray, expects: np.ndarray, group: Group) -> None:
    wrong = np.argwhere(sends != expects)
    if not wrong.size:
        return
    facts = "; ".join(
        f"rank {group.ranks[i]} sends {sends[i, j]} row(s) to rank {group.ranks[j]}, which expects "
        f"{expects[i, j]}"
        for i, j in wrong[:4]
    )
    raise CollectiveError(
        "the split sizes of the ranks do not match.",
        because=facts + ("; ..." if len(wrong) > 4 else ""),
        instead="out_split_sizes[i] of rank j is in_split_sizes[j] of rank i: mp.alltoall_single "
        "of the in_split_sizes as an array gives them",
    )


def _padded_rows(sizes: Sequence[int], part: int) -> np.ndarray:
    """For each row of the padded parts the row of the array that it is; a padding row is any."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rows = starts[:, None] + np.minimum(np.arange(part), np.maximum(sizes, 1)[:, None] - 1)
    return rows.ravel()


def _taken(x: jax.Array, rows: np.ndarray) -> jax.Array:
    if not x.shape[0]:
        return jnp.zeros((len(rows), *x.shape[1:]), x.dtype)
    return jnp.take(x, np.minimum(rows, x.shape[0] - 1).astype(np.int32), axis=0)
