"""Rules of windows that move over dims: pooling, its gradients, and what convolutions share.

A dim over which windows move may be cut: each device fetches the rows at the edges of its windows
from its neighbours, the halo, and then needs no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from meshpar.placements.reductions import identity
from meshpar.placements.types import ReduceType
from meshpar.rules.registry import register, rule_for
from meshpar.rules.rows import Ranges, fetch, pick
from meshpar.rules.rule import SUM_LIKE, Aval, Emission, Pass, Rule, letters

__all__ = ["dilated_rows", "window_spans"]

Filler = Callable[[Sequence[jax.Array]], Sequence[ArrayLike]]
"""Local operands -> for each operand with windows what stands for rows beyond its edges."""


def dilated_rows(
    at: Emission,
    block: jax.Array,
    dim: int,
    factor: str,
    size: int,
    base: int,
    spans: Ranges,
    filler: ArrayLike,
) -> jax.Array:
    """The part that each device wants of a dim whose rows stand `base` apart.

    Args:
      block: this device's rows of the dim.
      size: the global size of the dim.
      base: row i stands at i * base; between the rows and beyond them stands the filler.
      spans: the part (start, stop) that each device wants, as long for each.
      filler: a scalar.
    """
    first = [start // base for start, _ in spans]
    count = max(-(-stop // base) - f for (_, stop), f in zip(spans, first, strict=True))
    want = [(f, f + max(count, 0)) for f in first]
    rows = fetch(at, block, dim, factor, at.ranges(factor, size), want, filler)
    if base == 1:
        return rows
    config = [(0, 0, 0)] * rows.ndim
    config[dim] = (0, base - 1, base - 1)
    rows = lax.pad(rows, jnp.asarray(filler, rows.dtype), config)
    offset = [start - f * base for (start, _), f in zip(spans, first, strict=True)]
    return lax.dynamic_slice_in_dim(rows, pick(at, factor, offset), spans[0][1] - spans[0][0], dim)


def window_spans(out: Ranges, stride: int, low: int, reach: int) -> Ranges:
    """What the windows of each device see.

    Args:
      out: the windows of each device.
      stride: from one window to the next.
      low: how far the first window begins before the first row.
      reach: from the first row of a window to its last.
    """
    count = max(stop - start for start, stop in out)
    starts = [start * stride - low for start, _ in out]
    return [(s, s + max((count - 1) * stride + reach + 1, 0)) for s in starts]


def _windowed(count: int, fillers: Filler, passes: tuple[Pass, ...] = ()) -> Callable[..., Rule]:
    """A rule of windows over the first `count` operands, 0 for half; the rest are scalars."""

    def rule(
        *avals: Aval,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        base_dilation: Sequence[int],
        window_dilation: Sequence[int],
        **_: Any,
    ) -> Rule:
        moving = count or len(avals) // 2
        x, ndim = avals[0], avals[0].ndim
        reach = [(k - 1) * r for k, r in zip(window_dimensions, window_dilation, strict=True)]
        names = letters(ndim)
        still = [
            (reach[d], window_strides[d], base_dilation[d], *padding[d]) == (0, 1, 1, 0, 0)
            for d in range(ndim)
        ]

        def results(d: int) -> int:
            span = max(x.shape[d] - 1, 0) * base_dilation[d] + (x.shape[d] > 0) + sum(padding[d])
            return max((span - reach[d] - 1) // window_strides[d] + 1, 0)

        def emit(at: Emission, *blocks: jax.Array) -> list[jax.Array]:
            pads, bases, inside = [*padding], [*base_dilation], list(blocks[:moving])
            for d in range(ndim):
                if still[d] or not at.is_cut(names[d]):
                    continue
                out = at.ranges(names[d], results(d))
                spans = window_spans(out, window_strides[d], padding[d][0], reach[d])
                inside = [
                    dilated_rows(at, x, d, names[d], avals[0].shape[d], bases[d], spans, f)
                    for x, f in zip(inside, fillers(blocks), strict=True)
                ]
                pads[d], bases[d] = (0, 0), 1
            return at.bind(
                *inside, *blocks[moving:], padding=tuple(pads), base_dilation=tuple(bases)
            )

        dims = tuple((n,) for n in names)
        return Rule(
            operands=(dims,) * moving + ((),) * (len(avals) - moving),
            results=(dims,) * (moving if count == 0 else 1),
            sizes=dict(zip(names, x.shape, strict=True)),
            passes=passes,
            emit=emit,
            exchanged=frozenset(n for n, keeps in zip(names, still, strict=True) if not keeps),
        )

    return rule


def _identities(*kinds: ReduceType) -> Filler:
    return lambda blocks: [identity(k, x.dtype) for k, x in zip(kinds, blocks, strict=True)]


SUM, MAX, MIN = ReduceType.kRedSum, ReduceType.kRedMax, ReduceType.kRedMin
register("reduce_window_sum", _windowed(1, _identities(SUM), (Pass(SUM_LIKE, (0,)),)))
register("reduce_window_max", _windowed(1, _identities(MAX), (Pass(frozenset({MAX}), (0,)),)))
register("reduce_window_min", _windowed(1, _identities(MIN), (Pass(frozenset({MIN}), (0,)),)))
register("reduce_window", _windowed(0, lambda blocks: blocks[len(blocks) // 2 :]))


def _worst(select_prim: Any, dtype: Any) -> ArrayLike:
    """What no window selects: the least for `ge`, which selects the greatest."""
    return identity(MAX if select_prim.name == "ge" else MIN, dtype)


@rule_for("select_and_gather_add")
def select_and_gather_add(tangents: Aval, x: Aval, *, select_prim: Any, **params: Any) -> Rule:
    """The tangent of pooling: windows over both operands."""

    def fillers(blocks: Sequence[jax.Array]) -> list[ArrayLike]:
        return [identity(SUM, tangents.dtype), _worst(select_prim, x.dtype)]

    return _windowed(2, fillers, (Pass(SUM_LIKE, (0,)),))(tangents, x, **params)


@rule_for("select_and_scatter_add")
def select_and_scatter_add(
    source: Aval,
    x: Aval,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **_: Any,
) -> Rule:
    """The gradient of pooling: each device goes over all windows that touch its rows."""
    names, ndim = letters(x.ndim), x.ndim
    still = [
        (window_dimensions[d], window_strides[d], *padding[d]) == (1, 1, 0, 0) for d in range(ndim)
    ]

    def emit(at: Emission, grads: jax.Array, block: jax.Array) -> jax.Array:
        pads, crops = [*padding], dict[int, tuple[jax.Array, int]]()
        for d in range(ndim):
            if still[d] or not at.is_cut(names[d]):
                continue
            window, stride, low = window_dimensions[d], window_strides[d], padding[d][0]
            mine = at.ranges(names[d], x.shape[d])
            rows = block.shape[d]
            # The windows that touch this device's rows, from the first to the last.
            first = [-(-(start + low - window + 1) // stride) for start, _ in mine]
            count = max(
                (start + rows - 1 + low) // stride - f + 1
                for (start, _), f in zip(mine, first, strict=True)
            )
            there = at.ranges(names[d], source.shape[d])
            wanted = [(f, f + count) for f in first]
            grads = fetch(at, grads, d, names[d], there, wanted, 0)
            spans = window_spans(wanted, stride, low, window - 1)
            worst = _worst(select_prim, block.dtype)
            block = fetch(at, block, d, names[d], mine, spans, worst)
            offset = [start - span[0] for (start, _), span in zip(mine, spans, strict=True)]
            pads[d], crops[d] = (0, 0), (pick(at, names[d], offset), rows)
        (out,) = at.bind(grads, block, padding=tuple(pads))
        for d, (offset, rows) in crops.items():
            config = [(0, 0, 0)] * ndim
            config[d] = (window_strides[d], rows, 0)  # rows that no window touches
            out = lax.pad(out, jnp.zeros((), out.dtype), config)
            out = lax.dynamic_slice_in_dim(out, offset + window_strides[d], rows, d)
        return out

    dims = tuple((n,) for n in names)
    return Rule(
        operands=(dims, dims),
        results=(dims,),
        sizes=dict(zip(names, x.shape, strict=True)),
        passes=(Pass(SUM_LIKE, (0,)),),
        emit=emit,
        exchanged=frozenset(n for n, keeps in zip(names, still, strict=True) if not keeps),
    )
