"""Rules of slices that begin where an index says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.placements.reductions import identity
from meshpar.rules.registry import rule_for
from meshpar.rules.rows import take_rows
from meshpar.rules.rule import EVERY_KIND, Aval, Emission, Pass, Rule, addition, letters

Shape = tuple[int, ...]


def _inside(start: jax.Array, size: int, full: int) -> jax.Array:
    """Where a slice begins: lax moves one that would reach beyond the dim back into it.

    Begins of any integers, also of those that int32 does not hold, and that do not hold the last.
    """
    last = min(full - size, int(jnp.iinfo(start.dtype).max))
    return jnp.clip(start, 0, last).astype(jnp.int32)


@rule_for("dynamic_slice")
def dynamic_slice(x: Aval, *starts: Aval, slice_sizes: Shape, **_: Any) -> Rule:
    """Dims taken whole pass through. A short slice is pending a sum: each device gives its rows."""
    names, kind = letters(x.ndim), addition(x.dtype)
    whole = [size == full for size, full in zip(slice_sizes, x.shape, strict=True)]
    out = [n if keep else f"{n}out" for n, keep in zip(names, whole, strict=True)]
    # Reducing a longer slice would send more than gathering the dim.
    short = [
        d
        for d, n in enumerate(slice_sizes)
        if not whole[d] and kind is not None and 2 * n <= x.shape[d]
    ]

    def emit(at: Emission, block: jax.Array, *starts: jax.Array) -> Any:
        # Begins are made to fit here: jaxlib 0.10 folds a slice of a slice into one by adding their
        # begins, as if none reached beyond its dim, and a reshard may slice what this makes.
        pairs = zip(starts, slice_sizes, x.shape, strict=True)
        where, sizes = [_inside(*start) for start in pairs], [*slice_sizes]
        for d, name in enumerate(names):
            if whole[d]:
                sizes[d] = block.shape[d]
            elif at.is_cut(name):
                assert kind is not None, "only numbers are pending"
                row = where[d] - at.start(name)
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

    def emit(at: Emission, block: jax.Array, rows: jax.Array, *starts: jax.Array) -> Any:
        where, written = [*starts], jnp.asarray(True)
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
