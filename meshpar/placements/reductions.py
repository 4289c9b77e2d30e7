"""The reductions of `Partial`: what they take, their identities, and which of them commute."""

# JAX is partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshpar.errors import PlacementError, message
from meshpar.placements.layout import Layout
from meshpar.placements.types import ReduceType

__all__ = [
    "COPIED",
    "EMBEDDED",
    "check_dtype",
    "commute",
    "identity",
    "is_key",
    "part_of_mean",
    "reduce_stacked",
    "takes",
    "whole_mean",
]

SUM, MAX, MIN = ReduceType.kRedSum, ReduceType.kRedMax, ReduceType.kRedMin
PROD, AVG = ReduceType.kRedProd, ReduceType.kRedAvg
ANY, ALL = ReduceType.kRedAny, ReduceType.kRedAll

COPIED = frozenset({MAX, MIN, AVG, ANY, ALL})
"""The reductions of which equal contributions give that contribution."""

EMBEDDED = frozenset({SUM, MAX, MIN, PROD, ANY, ALL})
"""The reductions with an identity, so that one device may hold a part and the others nothing."""

# for the kinds that XLA cannot scatter, and products, which it cannot reduce across devices at all
_ORDER = {MAX: jnp.max, MIN: jnp.min, ANY: jnp.any, ALL: jnp.all}
_ARITHMETIC = {SUM: jnp.sum, PROD: jnp.prod}  # these may widen the dtype

# Gathering these ends the process on CPU; the last holds no zero and no negative number.
_NO_COLLECTIVES = {"int2", "uint2"}
_NO_REDUCTIONS = {"float8_e8m0fnu"}
_WITHOUT_NAN = {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}


def is_key(dtype: DTypeLike) -> bool:
    """Whether a dtype is one of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def commute(lhs: ReduceType, rhs: ReduceType) -> bool:
    """Whether two reductions over different axes give the same in either order."""
    return lhs is rhs or {lhs, rhs} == {SUM, AVG}


@cache
def takes(kind: ReduceType, dtype: DTypeLike) -> bool:
    """Whether values of a dtype can be pending a reduction.

    Example:
      >>> takes(ReduceType.kRedMax, "int32"), takes(ReduceType.kRedMax, "complex64")
      (True, False)
    """
    reason, _ = _refusal(kind, dtype, str(dtype if is_key(dtype) else np.dtype(dtype)))
    return not reason


def check_dtype(layout: Layout, dtype: DTypeLike) -> None:
    """Checks that values of a dtype can be moved and, where reductions are pending, reduced.

    Booleans take any, all, max and min; any and all take booleans only. Integers take no avg,
    because their mean is not an integer; complex numbers have no order, so no max and min; PRNG
    keys are no numbers at all. int2 and uint2 are refused in every layout.

    Raises:
      PlacementError: they cannot.
    """
    name = str(dtype if is_key(dtype) else np.dtype(dtype))
    if name in _NO_COLLECTIVES:
        raise PlacementError(
            message(
                f"{name} cannot be placed on a mesh.",
                because="XLA has no collective for it on CPU and aborts the process",
                instead="x.astype(jnp.int8)",
            )
        )
    for axis, kind in layout.partial:
        reason, instead = _refusal(kind, dtype, name)
        if reason:
            raise PlacementError(
                message(
                    f"Partial({kind.word!r}) does not take {name}.",
                    layout=f"{layout}, pending over mesh axis {axis!r}",
                    because=reason,
                    instead=instead,
                )
            )


def _refusal(kind: ReduceType, dtype: DTypeLike, name: str) -> tuple[str, str]:
    """Why a reduction does not take a dtype, and what to write; two empty strings if it does."""
    if is_key(dtype):
        return "PRNG keys are not numbers", "Replicate() or Shard(dim)"
    if name in _NO_REDUCTIONS:
        return f"{name} holds neither 0 nor negative numbers", "x.astype(jnp.bfloat16)"
    kept = np.dtype(dtype)
    if kept == np.bool_ and kind in {SUM, PROD, AVG}:
        return "booleans take any, all, max and min", "Partial('any') or Partial('all')"
    if kept != np.bool_ and kind in {ANY, ALL}:
        return f"{kind.word} takes booleans only", "Partial('max') or Partial('min')"
    if kind is AVG and not jnp.issubdtype(kept, jnp.inexact):
        return "the mean of integers is not an integer", "Partial('sum'), or a float dtype"
    if kind in {MAX, MIN} and jnp.issubdtype(kept, jnp.complexfloating):
        return "complex numbers have no order", "one Partial for x.real, one for x.imag"
    if kind in {MAX, MIN} and name in _WITHOUT_NAN:
        return f"{name} has no NaN, by which maxima travel", "x.astype(jnp.bfloat16)"
    return "", ""


def identity(kind: ReduceType, dtype: DTypeLike) -> np.ndarray:
    """The scalar that leaves every value as it is; for sums of floats -0.0, as 0.0 changes -0.0.

    XLA's own sums on CPU start at 0.0, so there -0.0 comes out as 0.0 all the same.

    Example:
      >>> identity(ReduceType.kRedMax, "int8")
      array(-128, dtype=int8)
    """
    kept = np.dtype(dtype)
    assert kind in EMBEDDED, f"{kind!r} has no identity"
    if kind in {ANY, ALL} or kept == np.bool_:
        return np.array(kind in {ALL, MIN}, dtype=kept)
    if kind is PROD:
        return np.array(1, dtype=kept)
    if kind is SUM:
        zero = np.zeros((), dtype=kept)
        return np.asarray(-zero, kept) if jnp.issubdtype(kept, jnp.inexact) else zero
    return _extreme(kept, lowest=kind is MAX)


def _extreme(dtype: np.dtype, *, lowest: bool) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.integer):
        integers = jnp.iinfo(dtype)
        return np.array(integers.min if lowest else integers.max, dtype=dtype)
    infinite = np.array(-np.inf if lowest else np.inf).astype(dtype)
    if np.isinf(infinite.astype(np.float64)):
        return infinite
    floats = jnp.finfo(dtype)  # some 8-bit floats have no infinity
    return np.array(floats.min if lowest else floats.max, dtype=dtype)


def reduce_stacked(kind: ReduceType, stacked: jax.Array, dim: int) -> jax.Array:
    """Reduces the contributions that are stacked along one dim; the dtype stays."""
    if kind is AVG:
        n = stacked.shape[dim]
        return whole_mean(jnp.sum(part_of_mean(stacked, n), dim, dtype=stacked.dtype), n)
    if kind in _ARITHMETIC:
        return _ARITHMETIC[kind](stacked, axis=dim, dtype=stacked.dtype)
    return _ORDER[kind](stacked, axis=dim)


def part_of_mean(x: jax.Array, count: int) -> jax.Array:
    """What is added up for a mean of `count` values, by a power of two less than each of them.

    So the sum does not overflow where the mean does not. No bit is lost but the last ones of
    numbers next to the least that the dtype has.
    """
    return (_wide(x) * 0.5 ** _halvings(count)).astype(x.dtype)


def whole_mean(total: jax.Array, count: int) -> jax.Array:
    """The mean, from the sum of the parts of it."""
    rest = count / 2 ** _halvings(count)
    return total if rest == 1 else (_wide(total) / rest).astype(total.dtype)


def _wide(x: jax.Array) -> jax.Array:
    narrow = jnp.finfo(x.dtype).bits < 32  # a factor need not be a number of 4 or 8 bits
    return x.astype(jnp.float32) if narrow else x


def _halvings(count: int) -> int:
    return max(count - 1, 0).bit_length()
