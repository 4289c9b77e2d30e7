"""Microbatches as parts of a batch: an axis of the partitioner that is no axis of the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.compiler.emitted import emitted_collectives
from meshpar.compiler.planned import Move, PlannedProgram
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps

__all__ = [
    "TIME",
    "by_microbatch",
    "check_in_time",
    "is_time_first",
    "merged",
    "stacked",
    "whole",
    "without_time",
]

TIME = "microbatch"
"""The axis along which microbatches lie, where a model is traced with the whole batch."""


def without_time(layout: Layout) -> Layout:
    """The layout on the mesh alone."""
    dims = tuple(tuple(axis for axis in axes if axis != TIME) for axes in layout.dims)
    return Layout(dims, tuple(p for p in layout.partial if p[0] != TIME))


def is_time_first(layout: Layout) -> bool:
    """Whether a dim is cut into microbatches, and these over axes of the mesh.

    Then a device's rows of all microbatches are no range of the batch: between the outside and the
    ranks such values have a dim of microbatches first (`stacked`, `merged`).
    """
    return any(len(axes) > 1 and axes[0] == TIME for axes in layout.dims)


def stacked(x: Any, microbatches: int) -> Any:
    """A batch with a dim of microbatches first, in traced code.

    The last microbatches may be smaller: they are padded, as the blocks of an uneven dim are.
    """
    rows = -(-x.shape[0] // microbatches)
    missing = rows * microbatches - x.shape[0]
    if missing:
        pad = [(0, missing, 0), *[(0, 0, 0)] * (x.ndim - 1)]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), pad)
    return x.reshape(microbatches, rows, *x.shape[1:])


def merged(x: Any, layout: Layout, size: int) -> Any:
    """The inverse of `stacked`, in traced code.

    Args:
      x: with a dim of microbatches first.
      layout: that of a microbatch's block, which tells the dim.
      size: of that dim in the whole.
    """
    dim = layout.dim_of(TIME)
    assert dim is not None, "a dim is cut into microbatches"
    x = jnp.moveaxis(x, 0, dim)
    x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
    return jax.lax.slice_in_dim(x, 0, size, axis=dim)


def by_microbatch(block: Any, layout: Layout, microbatches: int) -> Any:
    """A device's block with a dim of microbatches first; of size 1 where all share it."""
    if TIME not in layout.shard_axes:
        return block[None]
    return block if is_time_first(layout) else stacked(block, microbatches)


def whole(blocks: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
    """A device's block of a result, from those of the microbatches.

    Args:
      blocks: with a dim of microbatches first.
      layout: that of a microbatch's block.
      shape: of the device's block of the whole batch.

    Raises:
      NotImplementedError: rows of a microbatch that do not lie together.
    """
    if TIME in layout.partial_axes:
        return blocks.sum(0)
    if is_time_first(layout):
        return blocks
    dim = layout.dim_of(TIME)
    if dim is None:
        return blocks[0]
    if layout.dims[dim][-1] != TIME:
        raise NotImplementedError(
            f"pipeline: an output of shape {shape} on each device is cut over mesh axis "
            f"{layout.dims[dim][-1]!r} within microbatches; place it otherwise by mp.shard_tensor"
        )
    return merged(blocks, layout, shape[dim])


def check_in_time(planned: PlannedProgram) -> None:
    """Refuses a program that needs values of other microbatches than the one at hand.

    Raises:
      NotImplementedError: names the operation.
    """
    used = planned.program.used()
    for node in planned.nodes:
        for body in node.bodies:
            check_in_time(body)
        talks = any(TIME in _axes(planned, move) for move in node.moves)
        if not talks and node.rule is not None and any(TIME in a for a in node.axes.values()):
            talks = any(TIME in axes for _, axes, _, _ in emitted_collectives(planned, node, used))
        if talks:
            _refuse(node.node.name, node.node.where)
    if any(TIME in _axes(planned, move) for move in planned.moves):
        _refuse("a result", "")


def _axes(planned: PlannedProgram, move: Move) -> set[str]:
    """The axes over which the steps of a move talk."""
    aval = planned.program.aval(move.value)
    steps = planned_steps(move.src, move.dst, tuple(aval.shape), aval.dtype, planned.sizes)
    return {axis for step in steps if step.is_collective for axis in step.axes}


def _refuse(what: str, where: str) -> None:
    at = f" at {where}" if where else ""
    raise NotImplementedError(
        f"pipeline: {what}{at} needs values of all microbatches, and each is computed by itself. A "
        "mean over what the batch alone decides (its size, a mask of it) is fine; one over what "
        "the model computes is not: let the loss return (sum, count), whose quotient is taken last"
    )
