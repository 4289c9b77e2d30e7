"""Microbatches as parts of a batch: an axis of the partitioner that is no axis of the mesh."""

from __future__ import annotations

from typing import Any

from meshpar.compiler.emitted import emitted_collectives
from meshpar.compiler.planned import Move, PlannedProgram
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps

__all__ = ["TIME", "by_microbatch", "check_in_time", "whole", "without_time"]

TIME = "microbatch"
"""The axis along which microbatches lie, where a model is traced with the whole batch."""


def without_time(layout: Layout) -> Layout:
    """The layout on the mesh alone."""
    dims = tuple(tuple(axis for axis in axes if axis != TIME) for axes in layout.dims)
    return Layout(dims, tuple(p for p in layout.partial if p[0] != TIME))


def by_microbatch(block: Any, layout: Layout, microbatches: int) -> Any:
    """A device's block with a dim of microbatches first; of size 1 where all share it."""
    if TIME not in layout.shard_axes:
        return block[None]
    rows = block.shape[0] // microbatches
    return block.reshape(microbatches, rows, *block.shape[1:])


def whole(blocks: Any, layout: Layout) -> Any:
    """A device's block of a result, from those of the microbatches."""
    if TIME in layout.partial_axes:
        return blocks.sum(0)
    if TIME in layout.shard_axes:
        return blocks.reshape(-1, *blocks.shape[2:])
    return blocks[0]


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
            talks = any(TIME in axes for _, axes, _ in emitted_collectives(planned, node, used))
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
