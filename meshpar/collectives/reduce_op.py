"""`ReduceOp`: how a collective combines what the ranks give, and of which dtypes it can."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import CollectiveError

__all__ = ["ReduceOp", "check_reduction"]


class ReduceOp(IntEnum):
    """How `all_reduce`, `reduce` and `reduce_scatter` combine arrays, element by element.

    The dtype stays, as on one device: integer sums and products wrap around, NaN survives MAX and
    MIN. Booleans take MAX (any) and MIN (all). AVG takes floats and complex numbers: the mean of
    integers is no integer, and backends differ in how they round it. MAX and MIN do not take
    complex numbers, which have no order.

    Example:
      >>> ReduceOp.SUM, int(ReduceOp.AVG)
      (ReduceOp.SUM, 4)

    Follows `paddle.distributed.ReduceOp` (3.3.1), numbers included.
    """

    SUM = 0
    MAX = 1
    MIN = 2
    PROD = 3
    AVG = 4

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"


def check_reduction(op: Any, x: Any) -> ReduceOp:
    """The member for `op`, which can combine arrays like `x`.

    Raises:
      CollectiveError: there is no such operation, or it does not take the dtype.
    """
    member = op
    if type(op) is not ReduceOp:
        if isinstance(op, bool) or op not in tuple(ReduceOp):
            names = ", ".join(f"ReduceOp.{member.name}" for member in ReduceOp)
            raise CollectiveError(f"op={op!r} is no reduction.", because=f"there are {names}")
        member = ReduceOp(op)
    because, instead = _refusal(member, x.dtype)
    if because:
        raise CollectiveError(
            f"{member!r} does not take {x.dtype}.", because=because, instead=instead
        )
    return member


@functools.lru_cache(maxsize=256)
def _refusal(op: ReduceOp, dtype: Any) -> tuple[str, str]:
    """Why an operation does not take a dtype, and what to write; empty strings if it does."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "PRNG keys are not numbers", "mp.broadcast or mp.all_gather moves keys"
    if dtype.name == "float8_e8m0fnu":
        return "it holds neither 0 nor negative numbers", "x.astype(jnp.bfloat16)"
    if dtype == jnp.bool_ and op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG):
        return (
            "booleans are not added up; MAX is `any`, MIN is `all`",
            "op=mp.ReduceOp.MAX, or x.astype(jnp.int32) to count",
        )
    if op is ReduceOp.AVG and not jnp.issubdtype(dtype, jnp.inexact):
        return (
            "the mean of integers is not an integer",
            "op=mp.ReduceOp.SUM and // mp.get_world_size(group), or x.astype(jnp.float32)",
        )
    if op in (ReduceOp.MAX, ReduceOp.MIN) and jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex numbers have no order", "x.real and x.imag, each by itself"
    if op in (ReduceOp.MAX, ReduceOp.MIN) and dtype.name.startswith("float4"):
        return "its 4 bits have no pattern left that could stand for NaN", "x.astype(jnp.bfloat16)"
    return "", ""
