"""Products that are transposed at once, as products of the swapped operands.

The gradient of a weight comes as `transpose(dot_general(ct, x))`, which is `dot_general(x, ct)`.
XLA's CPU compiler takes about twice the time for the former.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core

__all__ = ["transposed_products"]


def transposed_products(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr; a product of which only the transposed one is taken is made so."""
    transposes = {
        eqn.invars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "transpose" and _is_var(eqn.invars[0])
    }
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    taken = Counter(filter(_is_var, atoms))
    eqns: list[Any] = []
    spared: set[int] = set()
    for eqn in jaxpr.eqns:
        if id(eqn) in spared:
            continue
        transpose = transposes.get(eqn.outvars[0]) if eqn.primitive.name == "dot_general" else None
        if (
            transpose is not None
            and taken[eqn.outvars[0]] == 1
            and _swaps(eqn, transpose.params["permutation"])
        ):
            spared.add(id(transpose))
            eqns.append(_swapped(eqn, transpose.outvars))
        else:
            eqns.append(eqn)
    return eqns


def _is_var(atom: Any) -> bool:
    return isinstance(atom, jex_core.Var)


def _swaps(product: Any, permutation: Sequence[int]) -> bool:
    """Whether a permutation puts the dims of `rhs` before those of `lhs`, behind those of both."""
    (contracted, _), (both, _) = product.params["dimension_numbers"]
    batch, ndim = len(both), product.outvars[0].aval.ndim
    rhs = product.invars[0].aval.ndim - len(contracted)  # where its dims begin
    return tuple(permutation) == (*range(batch), *range(rhs, ndim), *range(batch, rhs))


def _swapped(product: Any, results: Sequence[Any]) -> Any:
    params = dict(product.params)
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    params["dimension_numbers"] = ((rhs_contracted, lhs_contracted), (rhs_batch, lhs_batch))
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=list(results), params=params)
