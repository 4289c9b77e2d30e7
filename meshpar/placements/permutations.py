"""Which layouts cut a tensor into the same blocks, and the permutation that moves them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from meshpar.placements.layout import Layout
from meshpar.placements.steps import Axes

__all__ = ["cuts_alike", "has_empty_blocks", "moving_axes", "permutation"]

Pairs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def block_starts(size: int, factors: tuple[int, ...]) -> tuple[int, ...]:
    """Where the blocks of a dim start when factors cut it, outermost first; -1 for empty ones.

    Example:
      >>> block_starts(5, (2, 2)), block_starts(5, (4,))
      ((0, 2, 3, -1), (0, 2, 4, -1))
    """
    starts, stops = np.zeros(1, np.int64), np.full(1, size)
    block = size
    for factor in factors:
        block = -(-block // factor)
        outer_stops = np.repeat(stops, factor)
        starts = (starts[:, None] + block * np.arange(factor)).ravel()
        starts = np.minimum(starts, outer_stops)
        stops = np.minimum(starts + block, outer_stops)
    return tuple(np.where(starts < stops, starts, -1).tolist())


@lru_cache(maxsize=65536)
def cuts_alike(size: int, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> bool:
    """Whether two rows of factors cut a dim into the same blocks, but for order and empty ones.

    Example:
      >>> cuts_alike(7, (4,), (2, 3)), block_starts(7, (4,)), block_starts(7, (2, 3))
      (True, (0, 2, 4, 6), (0, 2, -1, 4, 6, -1))
    """
    if -(-size // math.prod(lhs)) != -(-size // math.prod(rhs)):
        return False
    if _in_order(size, lhs, rhs):
        return True
    left, right = (sorted(set(block_starts(size, row)) - {-1}) for row in (lhs, rhs))
    return left == right


def _in_order(size: int, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> bool:
    """Whether the blocks are the same one by one, the empty ones included."""
    if lhs == rhs or (math.prod(lhs) == math.prod(rhs) and size % math.prod(lhs) == 0):
        return True
    return block_starts(size, lhs) == block_starts(size, rhs)


def has_empty_blocks(size: int, factors: tuple[int, ...]) -> bool:
    """Whether some block of a dim has no rows; the last one has none then."""
    return size % math.prod(factors) != 0 and block_starts(size, factors)[-1] == -1


def moving_axes(shape: tuple[int, ...], src: Layout, dst: Layout, sizes: Mapping[str, int]) -> Axes:
    """The axes, in mesh order, whose coordinate means another part of the tensor afterwards.

    All axes of a dim are among them where its blocks come in another order, because then the digits
    of a block's number do not tell which block it is.
    """
    before, after = _digits(src, sizes), _digits(dst, sizes)
    moving = {axis for axis in sizes if before.get(axis) != after.get(axis)}
    for size, lhs, rhs in zip(shape, src.dims, dst.dims, strict=True):
        factors = (tuple(sizes[axis] for axis in axes) for axes in (lhs, rhs))
        if not _in_order(size, *factors):
            moving.update(lhs, rhs)
    return tuple(axis for axis in sizes if axis in moving)


def _digits(layout: Layout, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Axis -> (dim, blocks inside): the place of its digit in the number of a block."""
    out: dict[str, tuple[int, int]] = {}
    for dim, axes in enumerate(layout.dims):
        inner = 1
        for axis in reversed(axes):
            out[axis] = (dim, inner)
            inner *= sizes[axis]
    return out


@lru_cache(maxsize=4096)
def permutation(
    shape: tuple[int, ...], src: Layout, dst: Layout, axis_sizes: tuple[tuple[str, int], ...]
) -> tuple[Axes, Pairs]:
    """The permutation that gives each device its block, as many as possible staying where they are.

    Args:
      shape: the tensor's.
      src: the layout before.
      dst: the layout after; every dim is cut alike in both, into as many blocks altogether, and
        the pending reductions are equal.
      axis_sizes: (axis, size) of the whole mesh, in its order.

    Returns:
      The axes, and pairs (from, to) of positions along them, row-major. A device that keeps its
      block is paired with itself; one that gets no rows is in no pair.
    """
    sizes = dict(axis_sizes)
    axes = moving_axes(shape, src, dst, sizes)
    holding = list(_blocks_along(shape, src, axes, sizes))
    wanted = list(_blocks_along(shape, dst, axes, sizes))
    spare: dict[tuple[int, ...], list[int]] = {}
    for position, (has, wants) in enumerate(zip(holding, wanted, strict=True)):
        if has is not None and has != wants:
            spare.setdefault(has, []).append(position)
    pairs: list[tuple[int, int]] = []
    for position, (has, wants) in enumerate(zip(holding, wanted, strict=True)):
        if wants is not None:
            source = position if has == wants else spare[wants].pop(0)
            pairs.append((source, position))
    return axes, tuple(sorted(pairs))


def _blocks_along(
    shape: tuple[int, ...], layout: Layout, axes: Axes, sizes: Mapping[str, int]
) -> Iterator[tuple[int, ...] | None]:
    """The block at each position along some axes, the others at 0; None where it has no rows.

    A block without rows at coordinate 0 of the other axes has none elsewhere either, because the
    rows come first.
    """
    cuts = [tuple(sizes[axis] for axis in cut) for cut in layout.dims]
    starts = [block_starts(size, factors) for size, factors in zip(shape, cuts, strict=True)]
    for at in itertools.product(*(range(sizes[axis]) for axis in axes)):
        coordinate = dict(zip(axes, at, strict=True))
        block: list[int] = []
        for dim, cut in enumerate(layout.dims):
            number = 0
            for axis in cut:
                number = number * sizes[axis] + coordinate.get(axis, 0)
            block.append(starts[dim][number])
        yield None if -1 in block else tuple(block)
