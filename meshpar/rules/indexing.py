"""Rules of indexing: gather and scatter, also where the indexed dim is cut.

A gather from a cut dim is that of a vocabulary-parallel embedding: each device looks up the rows
that it has and gives zeros for the others, so that the result is pending a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from meshpar.placements.reductions import identity
from meshpar.placements.types import ReduceType
from meshpar.rules.registry import rule_for
from meshpar.rules.rows import take_rows
from meshpar.rules.rule import (
    EVERY_KIND,
    SUM_LIKE,
    Aval,
    Emission,
    Params,
    Pass,
    Rule,
    addition,
    letters,
)

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
    """`vd,b(index)->bd`: indexed dims are reduced, dims taken whole and batch dims pass through."""
    dn = dimension_numbers
    operand_names = [f"o{d}" for d in range(operand.ndim)]
    batch_dims = [d for d in range(indices.ndim - 1)]
    index_names = [f"i{d}" for d in batch_dims]
    for of_operand, of_indices in zip(
        dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True
    ):
        operand_names[of_operand] = index_names[of_indices]
    whole = [n == s for n, s in zip(operand.shape, slice_sizes, strict=True)]
    dropped = {*dn.collapsed_slice_dims, *dn.operand_batching_dims}
    window = [d for d in range(operand.ndim) if d not in dropped]
    # Dims of one row each that an index chooses, and that the result does not have.
    chosen = [d for d in dn.collapsed_slice_dims if d in dn.start_index_map and not whole[d]]

    result: list[str] = []
    batch, offset = iter(index_names), iter(window)
    out_ndim = len(batch_dims) + len(window)
    partial_window = {}
    for d in range(out_ndim):
        if d in dn.offset_dims:
            source = next(offset)
            name = operand_names[source] if whole[source] else f"w{source}"
            partial_window[name] = slice_sizes[source]
            result.append(name)
        else:
            result.append(next(batch))
    sizes = {
        **dict(zip(operand_names, operand.shape, strict=True)),
        **dict(zip(index_names, indices.shape[:-1], strict=True)),
        **partial_window,
    }
    kind = addition(operand.dtype)
    reduced = {operand_names[d]: kind for d in chosen if kind is not None}
    free = {*index_names, *(operand_names[d] for d in window if whole[d]), *reduced}

    def local(params: Params, ins: Sequence[Shape], outs: Sequence[Shape]) -> Params:
        local_sizes = tuple(
            n if whole[d] or (d in dn.operand_batching_dims and s == operand.shape[d]) else s
            for d, (n, s) in enumerate(zip(ins[0], slice_sizes, strict=True))
        )
        return {**params, "slice_sizes": local_sizes}

    def emit(at: Emission, block: jax.Array, where: jax.Array) -> Any:
        cut = [d for d in chosen if at.is_cut(operand_names[d])]
        if not cut:
            return at.bind(block, where)
        columns = {d: dn.start_index_map.index(d) for d in dn.start_index_map}
        limit = _limits([operand.shape[d] - slice_sizes[d] for d in dn.start_index_map], where)
        inside = jnp.all((where >= 0) & (where <= limit), axis=-1)
        if mode == GatherScatterMode.CLIP:
            where = lax.clamp(jnp.zeros_like(where), where, limit)
        mine, lead = jnp.ones(where.shape[:-1], bool), jnp.asarray(True)
        for d in cut:
            name, column = operand_names[d], columns[d]
            start = at.start(name).astype(where.dtype)
            index = where[..., column] - start
            mine &= (index >= 0) & (index < at.valid(name).astype(where.dtype))
            where = where.at[..., column].set(jnp.clip(index, 0, max(at.local_size(name) - 1, 0)))
            lead &= start == 0
        (rows,) = at.bind(block, where)
        expand = tuple(d for d in range(out_ndim) if d in dn.offset_dims)
        mine, inside = jnp.expand_dims(mine, expand), jnp.expand_dims(inside, expand)
        zero = jnp.zeros((), rows.dtype)
        rows = jnp.where(mine, rows, zero)
        if mode == GatherScatterMode.FILL_OR_DROP:
            # One device gives what stands for rows that no device has.
            missing = jnp.where(lead, _fill(fill_value, rows.dtype), zero)
            rows = jnp.where(inside, rows, missing)
        return rows

    return Rule(
        operands=(
            tuple((n,) for n in operand_names),
            (*((n,) for n in index_names), ()),
        ),
        results=(tuple((n,) for n in result),),
        sizes=sizes,
        reduce=reduced,
        blocked=frozenset(set(sizes) - free),
        passes=(Pass(_through(mode, fill_value, operand.dtype), (0,)),),
        local=local,
        emit=emit,
    )


def _through(mode: Any, fill_value: Any, dtype: Any) -> frozenset[ReduceType]:
    """The reductions that may be pending: those that leave what stands for missing rows as it is."""
    if mode != GatherScatterMode.FILL_OR_DROP:
        return EVERY_KIND
    if jnp.issubdtype(dtype, jnp.inexact) and (fill_value is None or np.isnan(fill_value)):
        return EVERY_KIND
    return SUM_LIKE if fill_value == 0 else frozenset()


def _limits(sizes: Sequence[int], where: jax.Array) -> jax.Array:
    """The greatest index along each indexed dim, for every row of indices."""
    return jnp.broadcast_to(jnp.asarray(sizes, where.dtype), where.shape)


def _fill(value: Any, dtype: Any) -> jax.Array:
    """What lax fills rows with that are out of range."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.asarray(jnp.iinfo(dtype).min, dtype)
    return jnp.asarray(True if dtype == jnp.bool_ else jnp.iinfo(dtype).max, dtype)


_SCATTERS = {
    "scatter-add": ReduceType.kRedSum,
    "scatter_add": ReduceType.kRedSum,
    "scatter-max": ReduceType.kRedMax,
    "scatter_max": ReduceType.kRedMax,
    "scatter-min": ReduceType.kRedMin,
    "scatter_min": ReduceType.kRedMin,
    "scatter-mul": None,
    "scatter_mul": None,
    "scatter": None,
}


def _scatter(name: str, kind: ReduceType | None) -> None:
    @rule_for(name)
    def scatter(
        operand: Aval, indices: Aval, updates: Aval, *, dimension_numbers: Any, **_: Any
    ) -> Rule:
        """`vd,b(index),bd->vd`: cutting b leaves the result pending, cutting v drops other rows."""
        dn = dimension_numbers
        return _scatter_rule(operand, indices, updates, dn, kind)


def _scatter_rule(
    operand: Aval, indices: Aval, updates: Aval, dn: Any, kind: ReduceType | None
) -> Rule:
    operand_names = [f"o{d}" for d in range(operand.ndim)]
    index_names = [f"i{d}" for d in range(indices.ndim - 1)]
    for of_operand, of_indices in zip(
        dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True
    ):
        operand_names[of_operand] = index_names[of_indices]
    dropped = {*dn.inserted_window_dims, *dn.operand_batching_dims}
    window = iter(d for d in range(operand.ndim) if d not in dropped)
    batch = iter(index_names)
    names, whole, update_sizes = list[str](), set[str](), dict[str, int]()
    for d in range(updates.ndim):
        if d in dn.update_window_dims:
            source = next(window)
            is_whole = updates.shape[d] == operand.shape[source]
            name = operand_names[source] if is_whole else f"w{source}"
            update_sizes[name] = updates.shape[d]
            names.append(name)
            if is_whole:
                whole.add(name)
        else:
            names.append(next(batch))
    chosen = [d for d in dn.inserted_window_dims if d in dn.scatter_dims_to_operand_dims]
    batching = {index_names[d] for d in dn.scatter_indices_batching_dims}
    reduced = {} if kind is None else {n: kind for n in index_names if n not in batching}
    sizes = {
        **dict(zip(operand_names, operand.shape, strict=True)),
        **dict(zip(index_names, indices.shape[:-1], strict=True)),
        **update_sizes,
    }
    free = {*whole, *(operand_names[d] for d in chosen), *batching, *reduced}

    window_sizes = {d: 1 for d in dropped}
    offsets = iter(d for d in range(operand.ndim) if d not in dropped)
    window_sizes |= {next(offsets): updates.shape[d] for d in dn.update_window_dims}

    def emit(at: Emission, block: jax.Array, where: jax.Array, new: jax.Array) -> Any:
        if not any(at.is_cut(operand_names[d]) for d in chosen):
            return at.bind(block, where, new)
        if at.params["mode"] == GatherScatterMode.CLIP:
            limits = [operand.shape[d] - window_sizes[d] for d in dn.scatter_dims_to_operand_dims]
            where = lax.clamp(jnp.zeros_like(where), where, _limits(limits, where))
        for d in chosen:
            name = operand_names[d]
            if at.is_cut(name):
                column = dn.scatter_dims_to_operand_dims.index(d)
                index = where[..., column] - at.start(name).astype(where.dtype)
                inside = (index >= 0) & (index < at.valid(name).astype(where.dtype))
                # Rows of other devices get an index out of range, which the mode below drops.
                index = jnp.where(inside, index, at.local_size(name))
                where = where.at[..., column].set(index)
        return at.bind(
            block, where, new, mode=GatherScatterMode.FILL_OR_DROP, indices_are_sorted=False
        )

    return Rule(
        operands=(
            tuple((n,) for n in operand_names),
            (*((n,) for n in index_names), ()),
            tuple((n,) for n in names),
        ),
        results=(tuple((n,) for n in operand_names),),
        sizes=sizes,
        reduce=reduced,
        blocked=frozenset(set(sizes) - free),
        passes=(Pass(SUM_LIKE, (0, 2)),) if kind is ReduceType.kRedSum else (),
        contributes=dict.fromkeys(reduced, (0,)),
        emit=emit,
    )


for _name, _kind in _SCATTERS.items():
    _scatter(_name, _kind)


def _inside(start: jax.Array, size: int, full: int) -> jax.Array:
    """Where a slice begins: lax moves one that would reach beyond the dim back into it."""
    return jnp.clip(start.astype(jnp.int32), 0, full - size)


@rule_for("dynamic_slice")
def dynamic_slice(x: Aval, *starts: Aval, slice_sizes: Shape, **_: Any) -> Rule:
    """Dims taken whole pass through. A short slice is pending a sum: each device gives its rows."""
    names, kind = letters(x.ndim), addition(x.dtype)
    whole = [size == full for size, full in zip(slice_sizes, x.shape, strict=True)]
    out = [n if keep else f"{n}out" for n, keep in zip(names, whole, strict=True)]
    # Reducing a longer slice would send more than gathering the dim.
    short = [
        d for d, n in enumerate(slice_sizes) if not whole[d] and kind is not None and 2 * n <= x.shape[d]
    ]

    def emit(at: Emission, block: jax.Array, *where: jax.Array) -> Any:
        where, sizes = [*where], [*slice_sizes]
        for d, name in enumerate(names):
            if whole[d]:
                sizes[d] = block.shape[d]
            elif at.is_cut(name):
                assert kind is not None, "only numbers are pending"
                row = _inside(where[d], slice_sizes[d], x.shape[d]) - at.start(name)
                block, good = take_rows(block, d, row, slice_sizes[d], 0, at.valid(name))
                block = jnp.where(good, block, jnp.asarray(identity(kind, block.dtype)))
                where[d] = jnp.zeros_like(where[d])
        return at.bind(block, *where, slice_sizes=tuple(sizes))

    sizes = {**dict(zip(names, x.shape, strict=True)), **dict(zip(out, slice_sizes, strict=True))}
    changed = {n for n in sizes if n not in out or n not in names}
    return Rule(
        operands=(tuple((n,) for n in names), *(() for _ in starts)),
        results=(tuple((n,) for n in out),),
        sizes=sizes,
        reduce={names[d]: kind for d in short if kind is not None},
        blocked=frozenset(changed - {names[d] for d in short}),
        passes=(Pass(EVERY_KIND, (0,)),),
        emit=emit,
    )


@rule_for("dynamic_update_slice")
def dynamic_update_slice(x: Aval, update: Aval, *starts: Aval, **_: Any) -> Rule:
    """Dims replaced whole pass through; of one replaced in part each device writes its rows."""
    names = letters(x.ndim)
    whole = [size == full for size, full in zip(update.shape, x.shape, strict=True)]
    new = [n if keep else f"{n}new" for n, keep in zip(names, whole, strict=True)]

    def emit(at: Emission, block: jax.Array, rows: jax.Array, *where: jax.Array) -> Any:
        where, written = [*where], jnp.asarray(True)
        for d, name in enumerate(names):
            if at.is_cut(name) and not whole[d]:
                begin = _inside(where[d], update.shape[d], x.shape[d])
                row = at.start(name) - begin
                rows, good = take_rows(rows, d, row, block.shape[d], 0, update.shape[d])
                written, where[d] = written & good, jnp.zeros_like(where[d])
        (out,) = at.bind(block, rows, *where)
        # Dims that are not cut are written where their own indices say.
        kept = jnp.broadcast_to(written, rows.shape)
        (mask,) = at.bind(jnp.zeros(block.shape, bool), kept, *where)
        return jnp.where(mask, out, block)

    sizes = {**dict(zip(names, x.shape, strict=True)), **dict(zip(new, update.shape, strict=True))}
    return Rule(
        operands=(tuple((n,) for n in names), tuple((n,) for n in new), *(() for _ in starts)),
        results=(tuple((n,) for n in names),),
        sizes=sizes,
        blocked=frozenset(n for n in new if n not in names),
        passes=(Pass(EVERY_KIND, (0, 1)),),
        emit=emit,
    )
