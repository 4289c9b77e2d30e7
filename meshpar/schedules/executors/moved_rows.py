"""Whether a model's annotations move the rows of its batch between devices.

Each device has a part of the batch's rows. Where it also has a part of every microbatch's, rows are
cut over the data axes first and into microbatches then: nothing moves before the first action, and
nothing may move within a microbatch, whose rows on several devices are not one range of the batch.
Annotations that take rows off the data axes need microbatches that are: there the batch is cut into
microbatches first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshpar.compiler.annotations import Surroundings, annotated_layout, is_annotation
from meshpar.compiler.program import Node, Program
from meshpar.placements.layout import Layout
from meshpar.schedules.executors.evaluate import depending_on, values_of

__all__ = ["moves_rows"]


def moves_rows(
    program: Program,
    batch: Collection[int],
    rows: Sequence[str],
    sizes: Mapping[str, int],
    around: Surroundings,
) -> bool:
    """Whether an annotation takes rows off some of the axes that cut them.

    Args:
      program: the model.
      batch: those of its inputs that are the batch.
      rows: the axes that cut the rows of the batch.
      sizes: the axes within a rank.
      around: in what they differ from those of the mesh.
    """
    if not rows:
        return False
    return _moves(program, batch, tuple(rows), _rows_of(program, batch), sizes, around)


def _rows_of(program: Program, batch: Collection[int]) -> int:
    return next((program.avals[v].shape[0] for v in batch if program.avals[v].ndim), 0)


def _moves(
    program: Program,
    batch: Collection[int],
    rows: tuple[str, ...],
    count: int,
    sizes: Mapping[str, int],
    around: Surroundings,
) -> bool:
    of_batch = depending_on(program, batch)
    for node in program.nodes:
        touched = values_of(node.ins) & of_batch
        if not touched:
            continue
        if is_annotation(node):
            (operand,) = node.ins
            shape = program.aval(operand).shape
            asked = annotated_layout(node, sizes, around, Layout.replicated(len(shape)))
            dims = asked.dims[:1] if shape and shape[0] == count else asked.dims
            if all(dim[: len(rows)] != rows for dim in dims):
                return True
        for body, inputs in _bodies(node, touched):
            if _moves(body, inputs, rows, count, sizes, around):
                return True
    return False


def _bodies(node: Node, touched: Collection[int]) -> list[tuple[Any, list[int]]]:
    """The bodies of a node, and those of their inputs that may depend on operands."""
    if node.bodies is None:
        return []
    out = []
    for body in node.bodies.bodies:
        # The last inputs are operands, of all kinds of bodies; loops carry what they are given.
        operands = node.ins[len(node.ins) - len(body.inputs) :]
        carried = range(0)
        if node.bodies.kind in ("scan", "while"):
            consts = node.bodies.consts[0] if node.bodies.kind == "scan" else 0
            count = node.bodies.carry if node.bodies.kind == "scan" else len(body.inputs)
            carried = range(consts, consts + count)
        pairs = enumerate(zip(operands, body.inputs, strict=True))
        inside = [v for k, (ref, v) in pairs if k in carried or values_of([ref]) & {*touched}]
        out.append((body, inside))
    return out
