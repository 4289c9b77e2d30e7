"""`reshard_steps`: the steps of least bytes that turn a layout into another on one mesh."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import jax
import numpy as np
from jax.typing import DTypeLike

from meshpar.errors import PlacementError, message
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout
from meshpar.placements.moves import Move, Moves
from meshpar.placements.reductions import check_dtype, commute, is_key
from meshpar.placements.steps import Step
from meshpar.placements.types import Placement, ReduceType

__all__ = ["planned_steps", "reshard_steps"]

Shape = tuple[int, ...]
AxisSizes = tuple[tuple[str, int], ...]
Cost = tuple[int, int, int, int]  # bytes, collectives, bytes of the largest block, steps


def reshard_steps(
    src: Layout | Sequence[Placement],
    dst: Layout | Sequence[Placement],
    shape: Sequence[int],
    dtype: DTypeLike,
    mesh: ProcessMesh,
) -> tuple[Step, ...]:
    """The steps that turn one layout of a tensor into another on the same mesh.

    They send the fewest bytes per device; among those, by the fewest collectives, with the smallest
    blocks on the way. An axis whose placement is the same before and after takes no part, unless
    reductions of another kind are pending over an earlier one; axes of size 1 appear in no step.
    Nothing is run: the mesh may name devices that are not there.

    Args:
      src: the layout before, or one placement per mesh axis.
      dst: the layout after, or one placement per mesh axis.
      shape: the global shape `(d0, d1, ...)`.
      dtype: the dtype, that of a PRNG key array included.
      mesh: the mesh of both layouts.

    Returns:
      The steps in order; none if the layouts are equal.

    Raises:
      PlacementError: a layout does not fit the shape or the mesh, or a pending reduction does not
        take the dtype.

    Example:
      >>> from meshpar.placements.types import Partial, Replicate, Shard
      >>> mesh = ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ["dp", "tp"])
      >>> steps = reshard_steps([Partial(), Shard(1)], [Shard(0), Shard(1)], (8, 8), "f4", mesh)
      >>> print(*steps)
      reduce_scatter over dp by sum: 32 bytes
    """
    before, after = (
        layout if isinstance(layout, Layout) else Layout.of(layout, mesh, len(shape))
        for layout in (src, dst)
    )
    before.check_axes(mesh)
    after.check_axes(mesh)
    return planned_steps(before, after, tuple(shape), dtype, mesh.axis_sizes)


def planned_steps(
    src: Layout, dst: Layout, shape: Shape, dtype: DTypeLike, sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """`reshard_steps` for layouts and the sizes of the axes, in mesh order."""
    kept = dtype if is_key(dtype) else np.dtype(dtype)
    for layout in (src, dst):
        _check(layout, shape, kept)
    return _search(src, dst, shape, _itemsize(kept), tuple(sizes.items()))


def _itemsize(dtype: DTypeLike) -> int:
    return jax.ShapeDtypeStruct((), dtype).dtype.itemsize


@lru_cache(maxsize=4096)
def _check(layout: Layout, shape: Shape, dtype: DTypeLike) -> None:
    if layout.ndim != len(shape):
        raise PlacementError(
            message(
                "the layout and the shape differ in the number of dims.",
                layout=layout,
                because=f"the layout has {layout.ndim} dims, the shape {shape} has {len(shape)}",
            )
        )
    check_dtype(layout, dtype)


@lru_cache(maxsize=16384)
def _search(
    src: Layout, dst: Layout, shape: Shape, itemsize: int, axis_sizes: AxisSizes
) -> tuple[Step, ...]:
    sizes = {axis: size for axis, size in axis_sizes if size > 1}
    src, dst = _on_axes(src, sizes), _on_axes(dst, sizes)
    if src == dst:
        return ()
    if 0 in shape:
        return (Step("slice", (), (), src, dst, 0),)
    if src.partial == dst.partial and all(map(_starts, dst.dims, src.dims)):
        return tuple(_slices(src, dst))
    common = [_common(lhs, rhs) for lhs, rhs in zip(src.dims, dst.dims, strict=True)]
    free = _free_axes(src, dst, common, sizes)
    moves = Moves(shape, itemsize, sizes, dst, tuple(common), free)
    return _cheapest(src, dst, moves)


def _cheapest(src: Layout, dst: Layout, moves: Moves) -> tuple[Step, ...]:
    """A*, with `moves.least` as the bound from below on what is left to send."""
    # a mask makes a block grow for nothing, so then there is no such bound
    bounded = not any(axis in moves.free for axis in dst.partial_axes)
    block = moves.block_bytes(src.dims)
    best: dict[Layout, Cost] = {src: (0, 0, block, 0)}
    came: dict[Layout, tuple[Layout, Move]] = {}
    heap: list[tuple[int, Cost, int, Layout]] = [(0, best[src], 0, src)]
    order = 0  # decides between equal costs: the edge seen first
    limit = math.inf
    while heap:
        _, cost, _, here = heapq.heappop(heap)
        if here == dst:
            break
        if cost > best[here]:
            continue  # a cheaper way here was found since
        sent, talks, peak, steps = cost
        for move in moves.of(here, limit - sent):
            after = move.dst
            if after in best and sent + move.bytes > best[after][0]:
                continue
            block = moves.block_bytes(after.dims)
            cost = (sent + move.bytes, talks + move.talks, max(peak, block), steps + 1)
            if after in best and cost >= best[after]:
                continue
            least = cost[0] + (moves.least(after) if bounded else 0)
            if least > limit:
                continue
            if after == dst:
                limit = cost[0]
            best[after] = cost
            came[after] = (here, move)
            order += 1
            heapq.heappush(heap, (least, cost, order, after))
    path: list[Step] = []
    here = dst
    while here != src:
        before, move = came[here]
        path.append(moves.step(before, move))
        here = before
    return tuple(reversed(path))


def _starts(row: tuple[str, ...], start: tuple[str, ...]) -> bool:
    return row[: len(start)] == start


def _slices(src: Layout, dst: Layout) -> Iterator[Step]:
    """The steps where all axes are only gained; the search would find them too, but slowly."""
    here = src
    for dim, axes in enumerate(dst.dims):
        for level in range(len(src.dims[dim]), len(axes)):
            after = here.with_dim(dim, axes[: level + 1])
            yield Step("slice", axes[level : level + 1], (dim,), here, after, 0)
            here = after


def _on_axes(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout without the axes that are not in `sizes`."""
    dims = tuple(tuple(axis for axis in axes if axis in sizes) for axes in layout.dims)
    return Layout(dims, tuple(pending for pending in layout.partial if pending[0] in sizes))


def _common(lhs: tuple[str, ...], rhs: tuple[str, ...]) -> int:
    """The number of leading axes that two rows share."""
    return next(
        (i for i, (a, b) in enumerate(zip(lhs, rhs, strict=False)) if a != b),
        min(len(lhs), len(rhs)),
    )


def _free_axes(
    src: Layout, dst: Layout, common: Sequence[int], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The axes that take part, in mesh order: those that change, and the reductions in their way.

    A reduction that stays pending is in the way where it does not commute with one over an earlier
    axis that is done or made: it comes first, so it is reduced and made again.
    """
    fixed = {axis for n, axes in zip(common, src.dims, strict=True) for axis in axes[:n]}
    free = {*src.shard_axes, *dst.shard_axes} - fixed
    before, after = dict(src.partial), dict(dst.partial)
    earlier: set[ReduceType] = set()
    for axis in sizes:
        pending = {layout[axis] for layout in (before, after) if axis in layout}
        changes = before.get(axis) is not after.get(axis)
        if changes or any(not commute(lhs, rhs) for lhs in pending for rhs in earlier):
            free.add(axis)
            earlier |= pending
    return tuple(axis for axis in sizes if axis in free)
