"""What gather and scatter have in common: which dim of the slices is which of the operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.rules.rule import Aval, Dim, Emission

__all__ = ["Indexed", "indexed", "local_indices", "row_limits", "wide"]

Shape = tuple[int, ...]


class Indexed(NamedTuple):
    """The factors of an operand, of indices into it, and of the slices that these choose.

    Args:
      operand: `o0, o1, ...`; a batch dim has the factor of the indices.
      indices: `i0, i1, ...` of the batch dims, and none for the dim of index vectors.
      slices: those of the indices and of the operand; a dim held in part has its own.
      sizes: the size of each factor.
      chosen: operand dims of which an index chooses one row.
      column: operand dim -> its place in an index vector.
      window: the size of a slice along each operand dim.
    """

    operand: list[str]
    indices: list[str]
    slices: list[str]
    sizes: dict[str, int]
    chosen: list[int]
    column: dict[int, int]
    window: list[int]

    def dims(self) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]]:
        """The dims of the operand, the indices and the slices, as rules have them."""
        operand, indices, slices = (
            tuple((n,) for n in names) for names in (self.operand, self.indices, self.slices)
        )
        return operand, (*indices, ()), slices

    def passing(self) -> set[str]:
        """Factors that go from the operand to the slices as a whole."""
        return {n for n in self.operand if n in self.slices}


def indexed(
    operand: Aval,
    indices: Aval,
    *,
    window_dims: Sequence[int],
    dropped: Sequence[int],
    index_map: Sequence[int],
    batching: tuple[Sequence[int], Sequence[int]],
    window: Sequence[int],
) -> Indexed:
    """The factors of a gather or a scatter.

    Args:
      window_dims: the dims of the slices that are dims of the operand.
      dropped: operand dims that slices hold one row of, and do not have.
      index_map: the operand dim of each place in an index vector.
      batching: dims of the operand and of the indices that are batch dims of both.
      window: the size of a slice along each operand dim.
    """
    names = [f"o{d}" for d in range(operand.ndim)]
    index_names = [f"i{d}" for d in range(indices.ndim - 1)]
    for of_operand, of_indices in zip(*batching, strict=True):
        names[of_operand] = index_names[of_indices]
    sizes = dict(zip(index_names, indices.shape, strict=False))
    sizes |= dict(zip(names, operand.shape, strict=True))
    kept = iter(d for d in range(operand.ndim) if d not in {*dropped, *batching[0]})
    batch, slices = iter(index_names), list[str]()
    for d in range(len(window_dims) + len(index_names)):
        if d not in window_dims:
            slices.append(next(batch))
            continue
        source = next(kept)
        whole = window[source] == operand.shape[source]
        slices.append(names[source] if whole else f"w{source}")
        sizes[slices[-1]] = window[source]
    chosen = [d for d in dropped if d in index_map]
    column = {d: place for place, d in enumerate(index_map)}
    return Indexed(names, index_names, slices, sizes, chosen, column, [*window])


def wide(where: jax.Array) -> jax.Array:
    """Indices as integers that hold the sizes of dims and of blocks: 32 bits at least."""
    return where.astype(jnp.int32) if where.dtype.itemsize < 4 else where


def row_limits(dims: Indexed, operand: Aval, where: jax.Array) -> jax.Array:
    """The greatest index along each indexed dim, for every index vector."""
    sizes = [operand.shape[d] - dims.window[d] for d in dims.column]
    return jnp.broadcast_to(jnp.asarray(sizes, where.dtype), where.shape)


def local_indices(at: Emission, dims: Indexed, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The index vectors of this device's block, and which of them are rows that it has.

    Those of rows that it does not have are one beyond its block.
    """
    mine = jnp.ones(where.shape[:-1], bool)
    for d in dims.chosen:
        name = dims.operand[d]
        if at.is_cut(name):
            index = where[..., dims.column[d]] - at.start(name).astype(where.dtype)
            inside = (index >= 0) & (index < at.valid(name).astype(where.dtype))
            index = jnp.where(inside, index, at.local_size(name))
            where, mine = where.at[..., dims.column[d]].set(index), mine & inside
    return where, mine


def first_holder(at: Emission, dims: Indexed) -> Any:
    """Whether this device is the first along all dims that are chosen from and cut."""
    first = jnp.asarray(True)
    for d in dims.chosen:
        if at.is_cut(dims.operand[d]):
            first &= at.start(dims.operand[d]) == 0
    return first
