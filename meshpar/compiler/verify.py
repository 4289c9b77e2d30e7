"""The laws that a planned program keeps, whichever pass it comes from.

`check_vma=False` leaves nobody else to check what `shard_map` hands out, so the tests hang `verify`
behind every pass. A broken law is a fault of meshpar, never of the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshpar.compiler.planned import Move, PlannedNode, PlannedProgram, in_buckets
from meshpar.compiler.program import Constant, Ref
from meshpar.placements.apply_bucket import bucket_key
from meshpar.placements.layout import Layout

__all__ = ["verify"]

There = set[tuple[int, Layout]]


def verify(planned: PlannedProgram) -> None:
    """Checks a planned program and the bodies of its loops.

    - A value is moved, taken and returned in a layout only where it is there in that layout.
    - A layout has a dim for each dim of its value, and axes of the mesh, each of them once.
    - Moves that share a collective are of one kind, and none of them waits for another.
    - The dims of an operand or a result are cut by the axes of their factors, and no others; what
      a cut factor adds up is left pending.

    Raises:
      AssertionError: with the operation and the law.
    """
    program = planned.program
    there: There = set()

    def arrive(value: int, layout: Layout, where: str) -> None:
        _check_layout(layout, program.aval(value).ndim, planned, where)
        there.add((value, layout))

    def take(ref: Ref, layout: Layout, where: str) -> None:
        if isinstance(ref, Constant):
            _check_layout(layout, ref.aval.ndim, planned, where)
        else:
            assert (ref, layout) in there, f"{where}: value {ref} is not there as {layout}"

    def move(moves: Sequence[Move], where: str) -> None:
        for together in in_buckets(moves):
            for one in together:
                take(one.value, one.src, f"a move {where}")
            _check_bucket(together, planned, where)
            for one in together:
                arrive(one.value, one.dst, f"a move {where}")

    for value, layout in zip(program.inputs, planned.inputs, strict=True):
        arrive(value, layout, f"argument {value}")
    for value in program.constants:
        arrive(value, Layout.replicated(program.aval(value).ndim), f"constant {value}")
    for node in planned.nodes:
        where = f"{node.node.name} at {node.node.where}"
        move(node.moves, f"before {where}")
        for ref, layout in zip(node.node.ins, node.operands, strict=True):
            take(ref, layout, where)
        for problem in _against_rule(node, planned):
            raise AssertionError(f"{where}: {problem}")
        for value, layout in zip(node.node.outs, node.results, strict=True):
            arrive(value, layout, where)
        for body in node.bodies:
            verify(body)
    move(planned.moves, "for the outputs")
    for ref, layout in zip(program.outputs, planned.outputs, strict=True):
        take(ref, layout, "an output")


def _check_layout(layout: Layout, ndim: int, planned: PlannedProgram, where: str) -> None:
    assert layout.ndim == ndim, f"{where}: {layout} is no layout of {ndim} dims"
    axes = [*layout.shard_axes, *layout.partial_axes]
    assert len(set(axes)) == len(axes), f"{where}: {layout} uses an axis twice"
    assert set(axes) <= set(planned.sizes), f"{where}: {layout} on a mesh {dict(planned.sizes)}"


def _check_bucket(together: Sequence[Move], planned: PlannedProgram, where: str) -> None:
    if len(together) == 1:
        return
    aval = planned.program.aval
    keys = {bucket_key(planned.steps(move), aval(move.value).dtype) for move in together}
    assert len(keys) == 1, f"{where}: a bucket holds {keys}"
    assert None not in keys, f"{where}: a bucket holds a reshard that goes alone"


def _against_rule(node: PlannedNode, planned: PlannedProgram) -> Iterator[str]:
    """What of an operation's layouts its rule does not allow."""
    rule = node.rule
    if rule is None:
        return
    aval = planned.program.aval
    values = [
        *zip(rule.operands, node.operands, node.node.ins, strict=True),
        *zip(rule.results, node.results, node.node.outs, strict=True),
    ]
    for dims, layout, ref in values:
        for dim, (factors, axes) in enumerate(zip(dims, layout.dims, strict=True)):
            cut = [axis for factor in factors for axis in node.axes.get(factor, ())]
            if aval(ref).shape[dim] > 1 and set(axes) != set(cut):
                yield f"dim {dim} of {layout} is cut by {axes}, its factors by {cut}"
    if rule.emit is not None:
        return
    kept = {factor for dims in rule.results for factors in dims for factor in factors}
    for factor in set(rule.reduce) - kept:
        axes = [a for a in node.axes.get(factor, ()) if planned.sizes[a] > 1]
        pending = {axis for layout in node.results for axis in layout.partial_axes}
        if math.prod(planned.sizes[a] for a in axes) > 1 and not set(axes) <= pending:
            yield f"{factor} is added up over {axes}, and {node.results} are not pending"
