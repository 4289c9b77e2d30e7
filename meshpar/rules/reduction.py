"""Rules of reductions: a dim that is reduced away leaves the result pending that reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.placements.reductions import identity, takes
from meshpar.placements.types import ReduceType
from meshpar.rules.registry import register, rule_for
from meshpar.rules.rows import without_padding
from meshpar.rules.rule import SUM_LIKE, Aval, Emission, Pass, Rule, einsum, letters

SUM, MAX, MIN = ReduceType.kRedSum, ReduceType.kRedMax, ReduceType.kRedMin
PROD, ANY, ALL = ReduceType.kRedProd, ReduceType.kRedAny, ReduceType.kRedAll


def _register(name: str, kind: ReduceType, passes: frozenset[ReduceType]) -> None:
    def rule(x: Aval, *, axes: tuple[int, ...], **_: Any) -> Rule:
        """`ij->i`, with j reduced; whole where nothing can be pending that, as `or` of integers."""
        if not takes(kind, x.dtype):
            return _whole((x,), 1, axes)
        names = letters(x.ndim)
        kept = [n for d, n in enumerate(names) if d not in axes]
        pending = (Pass(passes, (0,)),)
        return einsum(([names], [kept]), (x,), reduce=kind, passes=pending)

    register(name, rule)


_register("reduce_sum", SUM, SUM_LIKE)
_register("reduce_max", MAX, frozenset({MAX}))
_register("reduce_min", MIN, frozenset({MIN}))
_register("reduce_prod", PROD, frozenset())
_register("reduce_or", ANY, frozenset({ANY}))
_register("reduce_and", ALL, frozenset({ALL}))


@rule_for("reduce_xor")
def reduce_xor(x: Aval, *, axes: Sequence[int], **_: Any) -> Rule:
    """`ij->i`, with j whole: nothing else is pending an exclusive or."""
    return _whole((x,), 1, axes)


@rule_for("reduce")
def reduce(*avals: Aval, dimensions: Sequence[int], **_: Any) -> Rule:
    """`ij,->i`, with j whole, since the reducer is any function."""
    return _whole(avals, len(avals) // 2, dimensions)


def _whole(avals: Sequence[Aval], count: int, axes: Sequence[int]) -> Rule:
    names = letters(avals[0].ndim)
    kept = [n for d, n in enumerate(names) if d not in axes]
    operands = [names] * count + [[]] * (len(avals) - count)
    gone = [names[d] for d in axes]
    return einsum((operands, [kept] * count), avals, reduce=None, blocked=gone)


def _argmax(x: Aval, **params: Any) -> Rule:
    return _arg_extreme(x, MAX, **params)


def _argmin(x: Aval, **params: Any) -> Rule:
    return _arg_extreme(x, MIN, **params)


register("argmax", _argmax)
register("argmin", _argmin)


def _arg_extreme(
    x: Aval, kind: ReduceType, *, axes: tuple[int, ...], index_dtype: Any, **_: Any
) -> Rule:
    """`ij->i`: the index within the block, plus where the block begins; then the best of blocks.

    Two values per row and device travel, never the operand.
    """
    names = letters(x.ndim)
    (dim,) = axes
    kept = [n for d, n in enumerate(names) if d != dim]
    factor = names[dim]

    def emit(at: Emission, block: jax.Array) -> jax.Array:
        if not at.is_cut(factor):
            return at.bind(block)[0]
        block = without_padding(at, block, dim, factor, identity(kind, block.dtype))
        (index,) = at.bind(block)
        best = jnp.take_along_axis(block, jnp.expand_dims(index, dim), axis=dim)
        values = at.all_gather(jnp.squeeze(best, dim), factor)
        indices = at.all_gather(index + at.start(factor).astype(index_dtype), factor)
        # Blocks are in index order and ties go to the first, as on one device.
        (winner,) = at.bind(values, axes=(0,), index_dtype=index_dtype)
        return jnp.take_along_axis(indices, winner[None], axis=0)[0]

    return einsum(([names], [kept]), (x,), reduce=None, emit=emit)
