"""How long a planned program takes, by the model of the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.planned import Move, PlannedNode, PlannedProgram
from meshpar.placements.blocks import local_shape, shards_on
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps

__all__ = ["seconds_of"]


def seconds_of(planned: PlannedProgram, model: DeviceModel) -> float:
    """The estimated time of a program on its blocks, one operation after the other.

    An operation takes two arithmetic operations for each point of its dims, or the time to move its
    operands and results where that is longer; a loop as often as it turns.
    """
    moves = [*planned.moves, *(move for node in planned.nodes for move in node.moves)]
    total = sum(model.reshard_seconds(_steps(planned, move)) for move in moves)
    for node in planned.nodes:
        inside = sum(seconds_of(body, model) for body in node.bodies)
        turns = node.node.params.get("length", 1) if node.node.name == "scan" else 1
        total += inside * turns if node.bodies else _alone(planned, node, model)
    return total


def _alone(planned: PlannedProgram, node: PlannedNode, model: DeviceModel) -> float:
    program, sizes = planned.program, planned.sizes
    values = [*zip(node.node.ins, node.operands, strict=True)]
    values += [*zip(node.node.outs, node.results, strict=True)]
    blocks = [_block(program.aval(ref), layout, sizes) for ref, layout in values]
    moved = sum(count * size for count, size in blocks)
    points = max((count for count, _ in blocks), default=0)
    if node.rule is not None:
        cuts = {f: shards_on(axes, sizes) for f, axes in node.axes.items()}
        points = math.prod(-(-size // cuts.get(f, 1)) for f, size in node.rule.sizes.items())
    return model.compute_seconds(2.0 * points, moved)


def _block(aval: Any, layout: Layout, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The elements of a block, and the bytes of one."""
    itemsize = aval.dtype.itemsize if isinstance(aval.dtype, np.dtype) else 4
    return math.prod(local_shape(tuple(aval.shape), layout, sizes)), itemsize


def _steps(planned: PlannedProgram, move: Move) -> Sequence[Any]:
    aval = planned.program.aval(move.value)
    return planned_steps(move.src, move.dst, tuple(aval.shape), aval.dtype, planned.sizes)
