"""Operations that look up, replace and find elements. Indices are in range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.compiler.operations.registry import Attrs, LocalCall, Shape, operation

Array = jax.Array
FILL = "fill"


def _rows(position: int) -> Callable[[Sequence[Shape], Attrs], int]:
    return lambda shapes, attrs: shapes[position][0]


def _along(shapes: Sequence[Shape], attrs: Attrs) -> int:
    return shapes[0][attrs.get("axis", 0)]


def _table_begins(position: int) -> Any:
    def local(attrs: Attrs, call: LocalCall) -> Attrs:
        return {**attrs, "start_index": attrs.get("start_index", 0) + call.starts[position][0]}

    return local


def _looked_up(table: Array, ids: Array, start: int) -> Array:
    """Rows of the table, whose first is row `start`; zeros for rows that it has not."""
    ids = ids - start if start else ids
    return table.at[ids].get(mode=FILL, fill_value=0, wrap_negative_indices=False)


@operation(
    "embedding lookup_table_v2", kinds="if", bound=_rows(1), local=_table_begins(1), located=True
)
def embedding(
    ids: Array, table: Array, padding_idx: int = -1, sparse: bool = False, start_index: int = 0
) -> Array:
    """Rows of a table by index; zeros for the padding index."""
    rows = _looked_up(table, ids, start_index)
    if padding_idx < 0:
        return rows
    return rows * (ids != padding_idx)[..., None].astype(rows.dtype)


@operation("c_embedding", kinds="fi", bound=_rows(0), local=_table_begins(0), located=True)
def c_embedding(table: Array, ids: Array, start_index: int = 0, vocab_size: int = -1) -> Array:
    """Rows of a block of a table by index, zeros for rows of other blocks."""
    return _looked_up(table, ids, start_index)


@operation("gather index_select", kinds="fi", bound=_along)
def gather(x: Array, index: Array, axis: int = 0) -> Array:
    """Rows of a dim by index."""
    return jnp.take(x, index, axis=axis, mode="clip")


@operation("gather_nd", kinds="fi", bound=lambda shapes, attrs: min(shapes[0], default=1))
def gather_nd(x: Array, index: Array) -> Array:
    """Rows by tuples of indices, the last dim of `index`, into the first dims."""
    where = tuple(index[..., i] for i in range(index.shape[-1]))
    return x.at[where].get(mode="clip", wrap_negative_indices=False) if where else x


def _per_row(fn: Callable[..., Array], axis: int, *xs: Array) -> Array:
    """`fn` on vectors along one dim, for every place in the others, which broadcast."""
    axis = axis % xs[0].ndim
    sizes = [max(x.shape[d] for x in xs) for d in range(xs[0].ndim)]
    wide = [jnp.broadcast_to(x, (*sizes[:axis], x.shape[axis], *sizes[axis + 1 :])) for x in xs]
    for d in range(len(sizes) - 1, -1, -1):
        if d != axis:
            # The dims before `d` but `axis` are mapped over further outside, and gone here.
            at = 0 if d < axis else 1
            fn = jax.vmap(fn, in_axes=at, out_axes=at)
    return fn(*wide)


@operation("take_along_axis", kinds="fi", bound=_along)
def take_along_axis(x: Array, index: Array, axis: int = 0) -> Array:
    """For each place, the element of its row that the index says."""
    row = lambda values, where: values.at[where].get(  # noqa: E731
        mode="clip", wrap_negative_indices=False
    )
    return _per_row(row, axis, x, index)


@operation("put_along_axis", kinds="fif", bound=_along)
def put_along_axis(
    x: Array,
    index: Array,
    value: Array,
    axis: int = 0,
    reduce: str = "assign",
    include_self: bool = True,
) -> Array:
    """For each place of `index`, the element of its row replaced, or added to."""

    def row(values: Array, where: Array, new: Array) -> Array:
        at = values.at[where]
        how: Any = {
            "assign": at.set,
            "add": at.add,
            "mul": at.multiply,
            "multiply": at.multiply,
            "amax": at.max,
            "amin": at.min,
        }[reduce]
        return how(new, mode="drop", wrap_negative_indices=False)

    return _per_row(row, axis, x, index, jnp.broadcast_to(value, index.shape))


@operation("index_put", kinds="fif", bound=lambda shapes, attrs: min(shapes[0]))
def index_put(x: Array, indices: list[Array], value: Array, accumulate: bool = False) -> Array:
    """Rows by one index per leading dim replaced, or added to."""
    at = x.at[tuple(indices)]
    how = at.add if accumulate else at.set
    return how(value, mode="drop", wrap_negative_indices=False)


@operation("scatter", kinds="fif", bound=_rows(0))
def scatter(x: Array, index: Array, updates: Array, overwrite: bool = True) -> Array:
    """Rows replaced by index; without `overwrite` they become the sum of their updates."""
    index = index.reshape(-1)
    if overwrite:
        return x.at[index].set(updates, mode="drop", wrap_negative_indices=False)
    zeroed = x.at[index].multiply(0.0, mode="drop", wrap_negative_indices=False)
    return zeroed.at[index].add(updates, mode="drop", wrap_negative_indices=False)


@operation("scatter_nd_add", kinds="fif", bound=lambda shapes, attrs: min(shapes[0]))
def scatter_nd_add(x: Array, index: Array, updates: Array) -> Array:
    """Updates added to rows that tuples of indices name."""
    where = tuple(index[..., i] for i in range(index.shape[-1]))
    return x.at[where].add(updates, mode="drop", wrap_negative_indices=False)


@operation("nonzero")
def nonzero(x: Array) -> Array:
    """Where elements are not zero, a row each; as many rows as there are elements."""
    return jnp.stack(jnp.nonzero(x, size=x.size), axis=-1)


@operation("unique")
def unique(
    x: Array,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: Sequence[int] = (),
    dtype: str = "int64",
) -> tuple[Array | None, ...]:
    """The distinct elements, or rows of a dim, in order; as many as there may be."""
    dim = axis[0] if axis else None
    size = x.size if dim is None else x.shape[dim]
    out, index, inverse, counts = jnp.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=dim, size=size
    )
    return (
        out,
        index if return_index else None,
        inverse.reshape(-1) if return_inverse else None,
        counts if return_counts else None,
    )


@operation("moe_combine", kinds="ffi", bound=_rows(0))
def moe_combine(x: Array, weights: Array, index: Array) -> Array:
    """For each token the weighted sum of its experts' rows."""
    return jnp.einsum("sk,skh->sh", weights, jnp.take(x, index, axis=0, mode="clip"))
