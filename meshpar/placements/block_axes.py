"""Cutting a local block along the axes of a collective, and joining the chunks that arrive.

Between the two lives an array with one leading or inner dim of size n, one chunk for each device of
the collective. Cutting pads each level at the tail; joining cuts that padding off again, so every
size works with static shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax import lax

__all__ = ["cut", "join"]

Axes = tuple[str, ...]


def cut(
    block: jax.Array, gained: Mapping[int, Axes], axes: Axes, sizes: Mapping[str, int]
) -> tuple[jax.Array, int]:
    """Cuts dims of a block into one chunk for each position along `axes`.

    Args:
      block: of any shape; trailing dims that the tensor does not have stay whole.
      gained: dim -> the axes that cut it, outermost first.
      axes: all of those axes, in the order in which the collective numbers devices.
      sizes: axis -> size.

    Returns:
      The chunks along one new dim, and which dim that is.
    """
    names: list[str | None] = [None] * block.ndim
    for dim in sorted(gained, reverse=True):
        for level, axis in enumerate(gained[dim]):
            block = _split(block, dim + level, sizes[axis])
        names[dim:dim] = gained[dim]
    at = names.index(axes[0])
    if tuple(names[at : at + len(axes)]) != axes:
        rest = [i for i, name in enumerate(names) if name is None]
        block = lax.transpose(block, [*(names.index(axis) for axis in axes), *rest])
        at = 0
    shape = block.shape
    n = math.prod(sizes[axis] for axis in axes)
    return lax.reshape(block, (*shape[:at], n, *shape[at + len(axes) :])), at


def _split(block: jax.Array, dim: int, count: int) -> jax.Array:
    """Pads a dim to a multiple of `count` and makes it two, (count, size of a chunk)."""
    size = block.shape[dim]
    chunk = -(-size // count)
    if chunk * count > size:
        config = [(0, 0, 0)] * block.ndim
        config[dim] = (0, chunk * count - size, 0)
        block = lax.pad(block, lax.full((), 0, block.dtype), config)
    return lax.reshape(block, (*block.shape[:dim], count, chunk, *block.shape[dim + 1 :]))


def join(
    chunks: jax.Array,
    at: int,
    lost: Mapping[int, Axes],
    axes: Axes,
    sizes: Mapping[str, int],
    levels: Mapping[int, Sequence[int]],
) -> jax.Array:
    """Joins chunks to a block: the inverse of `cut`.

    Args:
      chunks: one for each position along `axes`, along dim `at`.
      at: that dim.
      lost: dim -> the axes that no longer cut it, outermost first.
      axes: all of those axes, in the order in which the collective numbers devices.
      sizes: axis -> size.
      levels: dim -> the size of its block before each of those axes cut it.

    Returns:
      The block, without the padding.
    """
    shape = chunks.shape
    counts = [sizes[axis] for axis in axes]
    block = lax.reshape(chunks, (*shape[:at], *counts, *shape[at + 1 :]))
    names: list[str | int] = list(range(len(shape) - 1))
    names[at:at] = axes
    wanted: list[str | int] = []
    for dim in range(len(shape) - 1):
        wanted += [*lost.get(dim, ()), dim]
    if wanted != names:
        block = lax.transpose(block, [names.index(name) for name in wanted])
    for dim in sorted(lost, reverse=True):
        first = wanted.index(dim) - len(lost[dim])
        for level, size in reversed(list(enumerate(levels[dim]))):
            here = first + level
            shape = block.shape
            merged = shape[here] * shape[here + 1]
            block = lax.reshape(block, (*shape[:here], merged, *shape[here + 2 :]))
            block = lax.slice_in_dim(block, 0, size, axis=here) if size < merged else block
    return block
