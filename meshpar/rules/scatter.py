"""Rules of scatters: each device writes the rows that it has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from meshpar.placements.types import ReduceType
from meshpar.rules.indexed import indexed, local_indices, row_limits
from meshpar.rules.registry import register
from meshpar.rules.rule import SUM_LIKE, Aval, Emission, Pass, Rule

SUM, MAX, MIN = ReduceType.kRedSum, ReduceType.kRedMax, ReduceType.kRedMin


def _register(name: str, kind: ReduceType | None) -> None:
    def rule(
        operand: Aval, indices: Aval, updates: Aval, *, dimension_numbers: Any, **_: Any
    ) -> Rule:
        """`vd,b(index),bd->vd`: cutting b leaves the result pending, cutting v drops other rows."""
        return _scatter(operand, indices, updates, dimension_numbers, kind)

    register(name, rule)


def _scatter(operand: Aval, indices: Aval, updates: Aval, dn: Any, kind: ReduceType | None) -> Rule:
    dropped = {*dn.inserted_window_dims, *dn.operand_batching_dims}
    sizes = iter(updates.shape[d] for d in dn.update_window_dims)
    dims = indexed(
        operand,
        indices,
        window_dims=dn.update_window_dims,
        dropped=dn.inserted_window_dims,
        index_map=dn.scatter_dims_to_operand_dims,
        batching=(dn.operand_batching_dims, dn.scatter_indices_batching_dims),
        window=[1 if d in dropped else next(sizes) for d in range(operand.ndim)],
    )
    batching = {dims.indices[d] for d in dn.scatter_indices_batching_dims}
    reduced = {} if kind is None else {n: kind for n in dims.indices if n not in batching}

    def emit(at: Emission, block: jax.Array, where: jax.Array, new: jax.Array) -> Any:
        if not any(at.is_cut(dims.operand[d]) for d in dims.chosen):
            return at.bind(block, where, new)
        if at.params["mode"] == GatherScatterMode.CLIP:
            where = lax.clamp(jnp.zeros_like(where), where, row_limits(dims, operand, where))
        where, _ = local_indices(at, dims, where)
        # Rows of other devices have indices out of range, which this mode drops.
        drop = GatherScatterMode.FILL_OR_DROP
        return at.bind(block, where, new, mode=drop, indices_are_sorted=False)

    of_operand, of_indices, of_slices = dims.dims()
    free = {*dims.passing(), *(dims.operand[d] for d in dims.chosen), *batching, *reduced}
    return Rule(
        operands=(of_operand, of_indices, of_slices),
        results=(of_operand,),
        sizes=dims.sizes,
        reduce=reduced,
        blocked=frozenset(set(dims.sizes) - free),
        passes=(Pass(SUM_LIKE, (0, 2)),) if kind is SUM else (),
        contributes=dict.fromkeys(reduced, (0,)),
        emit=emit,
    )


for _name, _kind in {"add": SUM, "sub": None, "max": MAX, "min": MIN, "mul": None}.items():
    _register(f"scatter-{_name}", _kind)
    _register(f"scatter_{_name}", _kind)
_register("scatter", None)
