"""Rules of operations that move rows along a dim: slice, split, concatenate, pad, rev.

Where such a dim is cut, the result is cut like it, and each device fetches the rows of its part of
the result from those that have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.placements.reductions import identity
from meshpar.rules.registry import rule_for
from meshpar.rules.rows import fetch, pick, take_rows
from meshpar.rules.rule import EVERY_KIND, Aval, Emission, Pass, Rule, addition, letters
from meshpar.rules.windows import dilated_rows, window_spans

Shape = tuple[int, ...]
_ANY_PENDING = (Pass(EVERY_KIND, (0,)),)


def _named(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((n,) for n in names)


@rule_for("slice")
def slice_(
    x: Aval, *, start_indices: Shape, limit_indices: Shape, strides: Shape | None = None, **_: Any
) -> Rule:
    """`ij->ij`, where j may be shorter in the result; a single row is pending a sum over j."""
    steps = strides or (1,) * x.ndim
    names, ndim = letters(x.ndim), x.ndim
    result = [
        -(-(stop - start) // step)
        for start, stop, step in zip(start_indices, limit_indices, steps, strict=True)
    ]
    sliced = [d for d in range(ndim) if result[d] != x.shape[d]]
    kind = addition(x.dtype)
    single = [d for d in sliced if result[d] == 1 and kind is not None]
    out = [f"{n}row" if d in single else n for d, n in enumerate(names)]

    def emit(at: Emission, block: jax.Array) -> Any:
        starts, stops, by = [*start_indices], [*limit_indices], [*steps]
        for d, name in enumerate(names):
            if d not in sliced:
                stops[d] = block.shape[d]
            elif not at.is_cut(name):
                continue
            elif d in single:
                assert kind is not None, "only numbers are pending"
                row = start_indices[d] - at.start(name)
                block, good = take_rows(block, d, row, 1, 0, at.valid(name))
                block = jnp.where(good, block, jnp.asarray(identity(kind, block.dtype)))
                starts[d], stops[d], by[d] = 0, 1, 1
            else:
                spans = window_spans(at.ranges(name, result[d]), steps[d], -start_indices[d], 0)
                block = dilated_rows(at, block, d, name, x.shape[d], 1, spans, 0)
                starts[d], stops[d] = 0, block.shape[d]
        changed = {"start_indices": tuple(starts), "limit_indices": tuple(stops)}
        return at.bind(block, **changed, strides=tuple(by) if strides else None)

    return Rule(
        operands=(_named(names),),
        results=(_named(out),),
        sizes={**dict(zip(names, x.shape, strict=True)), **{out[d]: 1 for d in single}},
        reduce={names[d]: kind for d in single if kind is not None},
        passes=_ANY_PENDING,
        emit=emit,
        exchanged=frozenset(names[d] for d in sliced if d not in single),
    )


@rule_for("split")
def split(x: Aval, *, sizes: Shape, axis: int, **_: Any) -> Rule:
    """`ij->ij,ij`, where j is shorter in the results."""
    names = letters(x.ndim)
    factor = names[axis]

    def emit(at: Emission, block: jax.Array) -> Any:
        if not at.is_cut(factor):
            return at.bind(block)
        pieces: list[jax.Array] = []
        for first, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
            spans = window_spans(at.ranges(factor, size), 1, -first, 0)
            pieces.append(dilated_rows(at, block, axis, factor, x.shape[axis], 1, spans, 0))
        return pieces

    return Rule(
        operands=(_named(names),),
        results=(_named(names),) * len(sizes),
        sizes=dict(zip(names, x.shape, strict=True)),
        passes=_ANY_PENDING,
        emit=emit,
        exchanged=frozenset({factor}),
    )


@rule_for("concatenate")
def concatenate(*xs: Aval, dimension: int, **_: Any) -> Rule:
    """`ij,ij->ij`, where j is longer in the result."""
    names = letters(xs[0].ndim)
    factor = names[dimension]
    size = [x.shape[dimension] for x in xs]
    first = np.cumsum([0, *size]).tolist()

    def emit(at: Emission, *blocks: jax.Array) -> Any:
        if not at.is_cut(factor):
            return at.bind(*blocks)
        mine = at.ranges(factor, first[-1])
        out: jax.Array | None = None
        for block, begin, rows in zip(blocks, first, size, strict=False):
            spans = window_spans(mine, 1, begin, 0)
            piece = fetch(at, block, dimension, factor, at.ranges(factor, rows), spans, 0)
            row = lax.broadcasted_iota(jnp.int32, piece.shape, dimension)
            begins = pick(at, factor, [begin - start for start, _ in mine])
            out = piece if out is None else jnp.where(row >= begins, piece, out)
        assert out is not None, "something is joined"
        return out

    return Rule(
        operands=(_named(names),) * len(xs),
        results=(_named(names),),
        sizes={**dict(zip(names, xs[0].shape, strict=True)), factor: first[-1]},
        passes=(Pass(EVERY_KIND, tuple(range(len(xs)))),),
        emit=emit,
        exchanged=frozenset({factor}),
    )


@rule_for("pad")
def pad(x: Aval, value: Aval, *, padding_config: Sequence[Shape], **_: Any) -> Rule:
    """`ij,->ij`, where j may be longer in the result: each device pads its part."""
    names = letters(x.ndim)
    result = [
        max(0, lo + hi + size + max(0, size - 1) * inner)
        for size, (lo, hi, inner) in zip(x.shape, padding_config, strict=True)
    ]
    padded = [d for d, config in enumerate(padding_config) if any(config)]

    def emit(at: Emission, block: jax.Array, filler: jax.Array) -> Any:
        config = [*padding_config]
        for d in padded:
            if at.is_cut(names[d]):
                lo, _, inner = padding_config[d]
                spans = window_spans(at.ranges(names[d], result[d]), 1, lo, 0)
                size = x.shape[d]
                block = dilated_rows(at, block, d, names[d], size, inner + 1, spans, filler)
                config[d] = (0, 0, 0)
        return at.bind(block, filler, padding_config=tuple(config))

    return Rule(
        operands=(_named(names), ()),
        results=(_named(names),),
        sizes=dict(zip(names, x.shape, strict=True)),
        passes=(Pass(EVERY_KIND, (0, 1)),),
        emit=emit,
        exchanged=frozenset(names[d] for d in padded),
    )


@rule_for("rev")
def rev(x: Aval, *, dimensions: Shape, **_: Any) -> Rule:
    """`ij->ij`: each device fetches the rows that are opposite to its own, and turns them round."""
    names = letters(x.ndim)

    def emit(at: Emission, block: jax.Array) -> Any:
        for d in dimensions:
            if at.is_cut(names[d]):
                mine, last = at.ranges(names[d], x.shape[d]), x.shape[d]
                opposite = [(last - start - block.shape[d], last - start) for start, _ in mine]
                block = fetch(at, block, d, names[d], mine, opposite, 0)
        return at.bind(block)

    return Rule(
        operands=(_named(names),),
        results=(_named(names),),
        sizes=dict(zip(names, x.shape, strict=True)),
        passes=_ANY_PENDING,
        emit=emit,
        exchanged=frozenset(names[d] for d in dimensions),
    )
