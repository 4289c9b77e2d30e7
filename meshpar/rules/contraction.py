"""Rules of contractions: `dot_general`, which every matmul and einsum lowers to."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from meshpar.rules.registry import rule_for
from meshpar.rules.rule import Aval, Rule, addition, einsum, letters, multilinear


@rule_for("dot_general")
def dot_general(
    lhs_aval: Aval,
    rhs_aval: Aval,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any = None,
    **_: Any,
) -> Rule:
    """`bmk,bkn->bmn`, where each of b, m, n, k may be several dims.

    k is not in the result, so cutting it leaves the result pending a sum (of booleans: any).
    """
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
    names = letters(lhs_aval.ndim + rhs_aval.ndim)
    lhs, rhs = names[: lhs_aval.ndim], names[lhs_aval.ndim :]
    for left, right in zip((*lhs_b, *lhs_k), (*rhs_b, *rhs_k), strict=True):
        rhs[right] = lhs[left]
    # lax lays the result out as batch, lhs free, rhs free, whatever order the operands had.
    out = [lhs[d] for d in lhs_b]
    out += [name for d, name in enumerate(lhs) if d not in {*lhs_b, *lhs_k}]
    out += [name for d, name in enumerate(rhs) if d not in {*rhs_b, *rhs_k}]
    dtype = preferred_element_type
    if dtype is None:
        dtype = jnp.result_type(lhs_aval.dtype, rhs_aval.dtype)
    passes = multilinear(lhs_aval, rhs_aval, result=dtype)
    kind = addition(jnp.dtype(dtype))
    whole = [lhs[d] for d in lhs_k] if kind is None else []
    return einsum(
        ([lhs, rhs], [out]), (lhs_aval, rhs_aval), reduce=kind, blocked=whole, passes=passes
    )
