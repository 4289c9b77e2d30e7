"""The memory that a planned program takes on each device, estimated in order of operations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.placements.blocks import local_shape
from meshpar.placements.layout import Layout

__all__ = ["peak_bytes"]

Block = tuple[int, Layout]
"""A value's number and a layout in which it is there."""


def peak_bytes(planned: PlannedProgram, donated: Collection[int] = ()) -> int:
    """The largest sum of the blocks that are alive at once, arguments and results included.

    A block lives from where it is made to its last use; an argument lives to the end, unless it is
    donated. An elementwise result takes the place of an operand that ends there. The bodies of
    loops keep what one turn needs. XLA orders and fuses operations as it likes, so this is an
    estimate; `tests/compiler/test_memory.py` says how good it is.

    Args:
      planned: the program.
      donated: the positions of arguments whose memory may be reused.
    """
    inputs = list(zip(planned.program.inputs, planned.inputs, strict=True))
    kept = {block for position, block in enumerate(inputs) if position not in donated}
    return _peak(planned, inputs, kept)


def _peak(
    planned: PlannedProgram,
    inputs: Iterable[Block] = (),
    kept: Collection[Block] = (),
    *,
    in_loop: bool = False,
) -> int:
    ends = _ends(planned, in_loop)
    alive: dict[Block, int] = {}

    def hold(blocks: Iterable[Block]) -> int:
        new = {block: _size(planned, block) for block in blocks if block not in alive}
        alive.update(new)
        return sum(new.values())

    total = peak = hold(inputs)
    for i, node in enumerate(planned.nodes):
        total += hold((move.value, move.dst) for move in node.moves)
        peak = max(peak, total)
        ended = [block for block in ends.get(i, ()) if block not in kept]
        freed = sum(alive.get(block, 0) for block in ended)
        made = hold(zip(node.node.outs, node.results, strict=True))
        peak = max(peak, total + _while_it_runs(node, made, freed))
        total += made - sum(alive.pop(block, 0) for block in ended)
    total += hold((move.value, move.dst) for move in planned.moves)
    return max(peak, total)


def _ends(planned: PlannedProgram, in_loop: bool) -> dict[int, list[Block]]:
    """The position of an operation -> the blocks that nothing takes after it."""
    last: dict[Block, int] = {}
    for i, node in enumerate(planned.nodes):
        last.update(((move.value, move.src), i) for move in node.moves)
        # Where nothing takes a result, it ends where it is made.
        blocks = [*zip(node.node.ins, node.operands, strict=True)]
        blocks += zip(node.node.outs, node.results, strict=True)
        last.update(((ref, layout), i) for ref, layout in blocks if isinstance(ref, int))
    if not in_loop:  # a loop's results are written to their places as they are made
        last.update(((move.value, move.src), -1) for move in planned.moves)
        results = zip(planned.program.outputs, planned.outputs, strict=True)
        last.update(((ref, layout), -1) for ref, layout in results if isinstance(ref, int))
    ends: dict[int, list[Block]] = {}
    for block, i in last.items():
        ends.setdefault(i, []).append(block)
    return ends


def _while_it_runs(node: PlannedNode, made: int, freed: int) -> int:
    """What an operation adds to the blocks that are alive before it."""
    if node.bodies:
        loops = node.why in ("scan", "while")
        inside = max(_peak(body, in_loop=loops) for body in node.bodies)
        # What a call or a branch makes are its results; a loop makes them turn by turn.
        return made + inside if loops else max(made, inside)
    if node.rule is not None and not node.rule.reduce and node.rule.emit is None:
        return made - min(made, freed)
    return made


def _size(planned: PlannedProgram, block: Block) -> int:
    value, layout = block
    aval: Any = planned.program.avals[value]
    item = np.dtype(aval.dtype).itemsize if isinstance(aval.dtype, np.dtype) else 8
    return math.prod(local_shape(tuple(aval.shape), layout, planned.sizes)) * item
