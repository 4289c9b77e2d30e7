"""Rules of scatters: each device writes the rows that it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from meshpar.placements.reductions import identity, takes
from meshpar.placements.types import ReduceType
from meshpar.rules.indexed import indexed, local_indices, row_limits, wide
from meshpar.rules.registry import register
from meshpar.rules.rule import SUM_LIKE, Aval, Emission, Pass, Rule

SUM, MAX, MIN = ReduceType.kRedSum, ReduceType.kRedMax, ReduceType.kRedMin


def _register(name: str, kind: ReduceType | None) -> None:
    def rule(
        operand: Aval, indices: Aval, updates: Aval, *, dimension_numbers: Any, **_: Any
    ) -> Rule:
        """`vd,b(index),bd->vd`: cutting b leaves the result pending, cutting v drops other rows."""
        return _scatter(name, operand, indices, updates, dimension_numbers, kind)

    register(name, rule)


def _scatter(
    name: str, operand: Aval, indices: Aval, updates: Aval, dn: Any, kind: ReduceType | None
) -> Rule:
    dims = indexed(
        operand,
        indices,
        window_dims=dn.update_window_dims,
        dropped=dn.inserted_window_dims,
        index_map=dn.scatter_dims_to_operand_dims,
        batching=(dn.operand_batching_dims, dn.scatter_indices_batching_dims),
        window=_window(operand, dn, updates),
    )
    batching = {dims.indices[d] for d in dn.scatter_indices_batching_dims}
    if kind is not None and not takes(kind, operand.dtype):
        kind = None
    reduced = {} if kind is None else {n: kind for n in dims.indices if n not in batching}

    def emit(at: Emission, block: jax.Array, where: jax.Array, new: jax.Array) -> Any:
        if not any(at.is_cut(dims.operand[d]) for d in dims.chosen):
            return at.bind(block, where, new)
        where = wide(where)
        if at.params["mode"] == GatherScatterMode.CLIP:
            where = lax.clamp(jnp.zeros_like(where), where, row_limits(dims, operand, where))
        where, mine = local_indices(at, dims, where)
        # Rows of other devices have indices out of range, which this mode drops.
        drop = GatherScatterMode.FILL_OR_DROP
        if mine.size == 1:
            # XLA makes a single row a dynamic slice, and forgets that its index may be out of
            # range where it then merges that slice with a pad.
            for d in dims.chosen:
                if at.is_cut(dims.operand[d]):
                    last = max(block.shape[d] - 1, 0)
                    column = dims.column[d]
                    where = where.at[..., column].set(jnp.minimum(where[..., column], last))
            new = jnp.where(mine.reshape(()), new, _neutral(name, block, where, new, dn))
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


def _window(block: Aval | jax.Array, dn: Any, new: Aval | jax.Array) -> list[int]:
    """The size of what one index writes, for each dim of the operand."""
    dropped = {*dn.inserted_window_dims, *dn.operand_batching_dims}
    sizes = iter(new.shape[d] for d in dn.update_window_dims)
    return [1 if d in dropped else next(sizes) for d in range(block.ndim)]


def _neutral(name: str, block: jax.Array, where: jax.Array, new: jax.Array, dn: Any) -> jax.Array:
    """What changes nothing when it is written: the rows that are there, or a neutral number."""
    operation = name.replace("_", "-").removeprefix("scatter").removeprefix("-")
    if operation in _NEUTRAL:
        return jnp.full_like(new, _NEUTRAL[operation](new.dtype))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=dn.update_window_dims,
        collapsed_slice_dims=dn.inserted_window_dims,
        start_index_map=dn.scatter_dims_to_operand_dims,
        operand_batching_dims=dn.operand_batching_dims,
        start_indices_batching_dims=dn.scatter_indices_batching_dims,
    )
    window = tuple(_window(block, dn, new))
    return lax.gather(block, where, numbers, window, mode=GatherScatterMode.CLIP)


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "add": lambda dtype: 0,
    "sub": lambda dtype: 0,
    "mul": lambda dtype: 1,
    "max": partial(identity, MAX),
    "min": partial(identity, MIN),
}

for _name, _kind in {"add": SUM, "sub": None, "max": MAX, "min": MIN, "mul": None}.items():
    _register(f"scatter-{_name}", _kind)
    _register(f"scatter_{_name}", _kind)
_register("scatter", None)
