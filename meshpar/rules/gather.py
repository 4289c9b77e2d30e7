"""The rule of gather, also where the indexed dim is cut.

A gather from a cut dim is that of a vocabulary-parallel embedding: each device looks up the rows
that it has and gives zeros for the others, so that the result is pending a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from meshpar.placements.reductions import identity
from meshpar.placements.single_element import made_first
from meshpar.placements.types import ReduceType
from meshpar.rules.indexed import Indexed, first_holder, indexed, local_indices, row_limits, wide
from meshpar.rules.registry import rule_for
from meshpar.rules.rule import EVERY_KIND, SUM_LIKE, Aval, Emission, Params, Pass, Rule, addition

Shape = tuple[int, ...]


@rule_for("gather")
def gather(
    operand: Aval,
    indices: Aval,
    *,
    dimension_numbers: Any,
    slice_sizes: Shape,
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> Rule:
    """`vd,b(index)->bd`: v is reduced, dims taken whole and batch dims pass through."""
    dn = dimension_numbers
    dims = indexed(
        operand,
        indices,
        window_dims=dn.offset_dims,
        dropped=dn.collapsed_slice_dims,
        index_map=dn.start_index_map,
        batching=(dn.operand_batching_dims, dn.start_indices_batching_dims),
        window=slice_sizes,
    )
    kind = addition(operand.dtype)
    reduced = {} if kind is None else {dims.operand[d]: kind for d in dims.chosen}

    def local(params: Params, ins: Sequence[Shape], outs: Sequence[Shape]) -> Params:
        sizes = [
            there if size == full else size
            for there, size, full in zip(ins[0], slice_sizes, operand.shape, strict=True)
        ]
        return {**params, "slice_sizes": tuple(sizes)}

    def emit(at: Emission, block: jax.Array, where: jax.Array) -> Any:
        block = made_first(block, math.prod(where.shape[:-1]))
        if not any(at.is_cut(name) for name in reduced):
            return at.bind(block, where)
        return _own_rows(at, dims, operand, block, where, mode, fill_value)

    of_operand, of_indices, of_slices = dims.dims()
    free = {*dims.indices, *dims.passing(), *reduced}
    return Rule(
        operands=(of_operand, of_indices),
        results=(of_slices,),
        sizes=dims.sizes,
        reduce=reduced,
        blocked=frozenset(set(dims.sizes) - free),
        passes=(Pass(_through(mode, fill_value, operand.dtype), (0,)),),
        local=local,
        emit=emit,
    )


def _own_rows(
    at: Emission,
    dims: Indexed,
    operand: Aval,
    block: jax.Array,
    where: jax.Array,
    mode: Any,
    fill_value: Any,
) -> jax.Array:
    """The rows that this device has; for those of others what leaves a sum as it is."""
    where = wide(where)
    limits = row_limits(dims, operand, where)
    inside = jnp.all((where >= 0) & (where <= limits), axis=-1)
    if mode != GatherScatterMode.FILL_OR_DROP:  # XLA clips where a promise is broken
        where = lax.clamp(jnp.zeros_like(where), where, limits)
    where, mine = local_indices(at, dims, where)
    (rows,) = at.bind(block, where)
    expand = [d for d, name in enumerate(dims.slices) if name not in dims.indices]
    kind = addition(rows.dtype)
    assert kind is not None, "only numbers are pending"
    zero = jnp.asarray(identity(kind, rows.dtype))
    rows = jnp.where(jnp.expand_dims(mine, expand), rows, zero)
    if mode == GatherScatterMode.FILL_OR_DROP:
        # One device gives what stands for rows that no device has.
        missing = jnp.where(first_holder(at, dims), _fill(fill_value, rows.dtype), zero)
        rows = jnp.where(jnp.expand_dims(inside, expand), rows, missing)
    return rows


def _through(mode: Any, fill_value: Any, dtype: Any) -> frozenset[ReduceType]:
    """The reductions that may be pending: they leave what stands for missing rows as it is."""
    if mode != GatherScatterMode.FILL_OR_DROP:
        return EVERY_KIND
    # A sum of NaNs is one; a maximum across devices may drop them.
    is_nan = jnp.issubdtype(dtype, jnp.inexact) and (fill_value is None or np.isnan(fill_value))
    return SUM_LIKE if is_nan or fill_value == 0 else frozenset()


def _fill(value: Any, dtype: Any) -> jax.Array:
    """What lax fills rows with that are out of range."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.asarray(jnp.iinfo(dtype).min, dtype)
    return jnp.asarray(True if dtype == jnp.bool_ else jnp.iinfo(dtype).max, dtype)
