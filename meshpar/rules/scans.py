"""Rules of running reductions: cumsum and its like, also along a cut dim.

Each device runs over its block; then what the blocks before it come to is added. One value per row
and device travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.placements.reductions import identity
from meshpar.placements.types import ReduceType
from meshpar.rules.registry import register
from meshpar.rules.rows import without_padding
from meshpar.rules.rule import SUM_LIKE, Aval, Emission, Pass, Rule, einsum, letters

Combine = Callable[[jax.Array, jax.Array], jax.Array]

_KINDS: dict[str, tuple[Combine, ReduceType]] = {
    "cumsum": (lax.add, ReduceType.kRedSum),
    "cumprod": (lax.mul, ReduceType.kRedProd),
    "cummax": (lax.max, ReduceType.kRedMax),
    "cummin": (lax.min, ReduceType.kRedMin),
}


def _register(name: str, combine: Combine, neutral: Callable[[Any], Any], linear: bool) -> None:
    def rule(x: Aval, *, axis: int, reverse: bool, **_: Any) -> Rule:
        """`ij->ij`, with a carry between the blocks of j."""
        names = letters(x.ndim)
        factor = names[axis]

        def emit(at: Emission, block: jax.Array) -> Any:
            if not at.is_cut(factor):
                return at.bind(block)
            start = jnp.asarray(neutral(block.dtype), block.dtype)
            block = without_padding(at, block, axis, factor, start)
            (run,) = at.bind(block)
            edge = 0 if reverse else block.shape[axis] - 1
            totals = at.all_gather(lax.slice_in_dim(run, edge, edge + 1, axis=axis), factor)
            starts = [start for start, _ in at.ranges(factor, x.shape[axis])]
            mine = at.start(factor)
            # Empty blocks share a start with a neighbour, and hold nothing but neutral elements.
            carry = start
            for total, first in zip(totals, starts, strict=True):
                before = first > mine if reverse else first < mine
                carry = combine(carry, jnp.where(before, total, start))
            return combine(run, jnp.broadcast_to(carry, run.shape))

        passes = (Pass(SUM_LIKE, (0,)),) if linear else ()
        # JAX's own sum of two complex logarithms of nothing is no number.
        whole = combine is _log_add and jnp.issubdtype(x.dtype, jnp.complexfloating)
        return einsum(
            ([names], [names]),
            (x,),
            blocked=[factor] if whole else [],
            passes=passes,
            emit=emit,
        )

    register(name, rule)


for _name, (_combine, _kind) in _KINDS.items():
    _register(_name, _combine, lambda dtype, kind=_kind: identity(kind, dtype), _name == "cumsum")


def _log_add(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.logaddexp(lhs, rhs)


_register("cumlogsumexp", _log_add, lambda dtype: -jnp.inf, False)
