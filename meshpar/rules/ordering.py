"""Rules of sorting: sort along a dim that is whole, the k largest also along one that is cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.placements.reductions import identity
from meshpar.placements.types import ReduceType
from meshpar.rules.registry import rule_for
from meshpar.rules.rows import without_padding
from meshpar.rules.rule import Aval, Emission, Rule, einsum, letters


@rule_for("sort")
def sort(*xs: Aval, dimension: int, **_: Any) -> Rule:
    """`ij,ij->ij,ij`, with the sorted dim whole."""
    names = letters(xs[0].ndim)
    both = [names] * len(xs)
    return einsum((both, both), xs, blocked=[names[dimension]])


@rule_for("top_k")
def top_k(x: Aval, *, k: int, axis: int, **_: Any) -> Rule:
    """`ij->ik,ik`: the k largest of each block, then the k largest of those.

    k values and k indices per row and device travel, never the operand.
    """
    names, lowest = letters(x.ndim), _lowest(x.dtype)
    factor, out = names[axis], [*names]
    out[axis] = "k"

    def emit(at: Emission, block: jax.Array) -> Any:
        if not at.is_cut(factor):
            return at.bind(block)
        assert lowest is not None, "else the dim is whole"
        block = without_padding(at, block, axis, factor, lowest)
        values, indices = at.bind(block, k=min(k, block.shape[axis]))
        indices = indices + at.start(factor).astype(indices.dtype)
        values, indices = at.all_gather(values, factor), at.all_gather(indices, factor)
        ranges = at.ranges(factor, x.shape[axis])
        stop = jnp.asarray([stop for _, stop in ranges], indices.dtype)
        missing = indices >= stop.reshape(-1, *(1,) * x.ndim)
        joined = [_joined(y, axis) for y in (missing.astype(jnp.int32), values, indices)]
        if any(start + block.shape[axis] > stop for start, stop in ranges):
            # Padding may be equal to rows that are there, and must come after them.
            joined = lax.sort(joined, dimension=axis, is_stable=True, num_keys=1)
        _, values, indices = joined
        values, best = at.bind(values, k=k)
        return [values, jnp.take_along_axis(indices, best, axis=axis)]

    return Rule(
        operands=(tuple((n,) for n in names),),
        results=(tuple((n,) for n in out),) * 2,
        sizes={**dict(zip(names, x.shape, strict=True)), "k": k},
        blocked=frozenset({"k", factor} if lowest is None else {"k"}),
        emit=emit,
    )


def _lowest(dtype: Any) -> np.ndarray | None:
    """What no value comes after in XLA's order of all numbers, in which -NaN is before -inf.

    `None` where a NaN is in no such place, as in floats without a negative zero.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return identity(ReduceType.kRedMax, dtype)
    if "fnuz" in str(dtype) or jnp.finfo(dtype).bits < 8:
        return None
    return np.asarray(-1, f"int{jnp.finfo(dtype).bits}").view(dtype)


def _joined(stacked: jax.Array, dim: int) -> jax.Array:
    """What devices gave, stacked on a leading dim, one after the other along a dim."""
    moved = jnp.moveaxis(stacked, 0, dim)
    rows = moved.shape[dim] * moved.shape[dim + 1]
    return moved.reshape(*moved.shape[:dim], rows, *moved.shape[dim + 2 :])


@rule_for("approx_top_k")
def approx_top_k(x: Aval, *, k: int, reduction_dimension: int, **_: Any) -> Rule:
    """`ij->ik,ik`, with the searched dim whole: what is found depends on where it is split."""
    names = letters(x.ndim)
    out = [*names]
    out[reduction_dimension] = "k"
    return Rule(
        operands=(tuple((n,) for n in names),),
        results=(tuple((n,) for n in out),) * 2,
        sizes={**dict(zip(names, x.shape, strict=True)), "k": k},
        blocked=frozenset({"k", names[reduction_dimension]}),
    )
