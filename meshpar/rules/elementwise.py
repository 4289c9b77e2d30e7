"""Rules of elementwise operations: every operand dim goes to the same result dim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from meshpar.placements.types import ReduceType
from meshpar.rules.registry import register
from meshpar.rules.rule import (
    EVERY_KIND,
    MONOTONE,
    SUM_LIKE,
    Aval,
    Pass,
    Rule,
    einsum,
    letters,
    multilinear,
)

__all__ = ["elementwise"]


def elementwise(*avals: Aval, passes: tuple[Pass, ...] = (), results: int = 1) -> Rule:
    """`ij,ij->ij` for any number of operands, where scalars and dims of size 1 are broadcast."""
    ndim = max(aval.ndim for aval in avals)
    names = letters(ndim)
    operands = [names if aval.ndim else [] for aval in avals]
    return einsum((operands, [names] * results), avals, passes=passes)


def _register(names: str, passes: tuple[Pass, ...] = ()) -> None:
    def rule(*avals: Aval, **_: Any) -> Rule:
        return elementwise(*avals, passes=passes)

    for name in names.split():
        register(name, rule)


# Nothing pending passes through these.
_register(
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e clz cos cosh digamma "
    "eq erf_inv ge gt integer_pow is_finite le lt lgamma log log1p "
    "igamma igammac igamma_grad_a random_gamma_grad regularized_incomplete_beta polygamma zeta "
    "ne nextafter not population_count pow rem shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square tan xor or rsqrt "
    "erfc reduce_precision one_minus_square eq_to le_to lt_to log2 polynomial"
)
_UP = (Pass(MONOTONE, (0,)),)
# Increasing functions of all numbers: the largest argument gives the largest value.
_register("cbrt ceil erf exp exp2 expm1 floor logistic round tanh", _UP)

_LINEAR = (Pass(SUM_LIKE, (0,)),)
_register("neg real imag conj", _LINEAR)
_register("copy copy_p stop_gradient reshard", (Pass(EVERY_KIND, (0,)),))
# Pending sums must be those of both. A pending maximum of x is none of x + c: the least integer,
# which a device without the maximum may have, wraps around, and -inf + inf is no number.
_register("add add_any add_jaxvals_p sub", (Pass(SUM_LIKE, (0, 1)),))
_register("complex", (Pass(SUM_LIKE, (0, 1)),))
_register("max", (Pass(frozenset({ReduceType.kRedMax}), (0, 1)),))
_register("min", (Pass(frozenset({ReduceType.kRedMin}), (0, 1)),))


def _select_n(which: Aval, *cases: Aval, **_: Any) -> Rule:
    """The choice must be known; a pending reduction of all cases is one of the result."""
    pending = Pass(EVERY_KIND, tuple(range(1, len(cases) + 1)))
    return elementwise(which, *cases, passes=(pending,))


register("select_n", _select_n)


def _mul(x: Aval, y: Aval, **_: Any) -> Rule:
    return elementwise(x, y, passes=multilinear(x, y))


register("mul", _mul)


def _div(x: Aval, y: Aval, **_: Any) -> Rule:
    """A sum may be divided term by term, but not of integers, whose quotients are cut off."""
    return elementwise(x, y, passes=multilinear(x) if jnp.issubdtype(x.dtype, jnp.inexact) else ())


register("div", _div)


def _convert(x: Aval, *, new_dtype: Any, **_: Any) -> Rule:
    """A sum may be converted before it is reduced where no bit of a term is lost."""
    if _holds(new_dtype, x.dtype):
        return elementwise(x, passes=(Pass(SUM_LIKE | MONOTONE, (0,)),))
    return elementwise(x)


def _holds(new: Any, old: Any) -> bool:
    if not (jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)):
        return False
    wide, narrow = jnp.finfo(new), jnp.finfo(old)
    least = wide.minexp - wide.nmant <= narrow.minexp - narrow.nmant
    return least and wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp


register("convert_element_type", _convert)


def _bitcast(x: Aval, *, new_dtype: Any, **_: Any) -> Rule:
    """Elementwise for equal widths; else a last dim of pieces appears or goes, and is whole."""
    old, new = _bits(x.dtype), _bits(new_dtype)
    if old == new:
        return elementwise(x)
    names = letters(x.ndim)
    if old > new:
        rule = einsum(([names], [[*names, "piece"]]), (x,))
        return replace(
            rule, sizes={**rule.sizes, "piece": old // new}, blocked=frozenset({"piece"})
        )
    return einsum(([names], [names[:-1]]), (x,), reduce=None, blocked=names[-1:])


register("bitcast_convert_type", _bitcast)


def _bits(dtype: Any) -> int:
    """The width of a dtype; that of some is less than the bytes that numpy gives them."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * jnp.dtype(dtype).itemsize


def _clamp(low: Aval, x: Aval, high: Aval, **_: Any) -> Rule:
    return elementwise(low, x, high)


register("clamp", _clamp)


def _same_layout(*avals: Aval, **_: Any) -> Rule:
    """Operands of any shapes, each going to the result of its position."""
    names = letters(sum(aval.ndim for aval in avals))
    it = iter(names)
    dims = [[next(it) for _ in range(aval.ndim)] for aval in avals]
    passes = [Pass(EVERY_KIND, (i,)) for i in range(len(avals))] if len(avals) == 1 else []
    return einsum((dims, dims), avals, passes=passes)


register("optimization_barrier", _same_layout)
