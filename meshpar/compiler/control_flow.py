"""Layouts of control flow: carried values keep theirs from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from meshpar.compiler.decide import Decider, wished
from meshpar.compiler.options import Wish
from meshpar.compiler.planned import Move, PlannedNode, PlannedProgram
from meshpar.compiler.program import Node, Program, Ref
from meshpar.placements.layout import Layout

__all__ = ["plan_control_flow"]

_TURNS = 3  # a carried layout that still changes after so many turns is cut back to what agrees


class Pass(Protocol):
    """The forward pass that meets the operation."""

    program: Program
    decider: Decider

    def layouts(self, ref: Ref) -> tuple[Layout, ...]: ...
    def wish(self, value: int) -> Wish: ...
    def stack_wish(self, value: int) -> Wish: ...
    def bring_all(self, refs: Sequence[Ref], layouts: Sequence[Layout]) -> tuple[Move, ...]: ...


class Propagate(Protocol):
    """`propagate`, which plans the bodies."""

    def __call__(
        self,
        program: Program,
        inputs: Sequence[Layout | None],
        outputs: Sequence[Layout | None],
        decider: Decider,
        *,
        leave_pending: bool = False,
    ) -> PlannedProgram: ...


def plan_control_flow(at: Pass, node: Node, propagate: Propagate) -> PlannedNode:
    """Plans an operation with bodies."""
    assert node.bodies is not None, "control flow has bodies"
    return _PLANNERS[node.bodies.kind](at, node, propagate)


def _there(at: Pass, ref: Ref) -> Layout:
    """The first layout of an operand, with nothing pending."""
    return at.layouts(ref)[0].without_partial()


def _call(at: Pass, node: Node, propagate: Propagate) -> PlannedNode:
    (body,) = node.bodies.bodies  # pyright: ignore[reportOptionalMemberAccess]
    operands = [at.layouts(ref)[0] for ref in node.ins]
    free = propagate(body, operands, [None] * len(node.outs), at.decider, leave_pending=True)
    wanted = [
        wished(layout, at.wish(value), at.decider.sizes)
        for value, layout in zip(node.outs, free.outputs, strict=True)
    ]
    planned = propagate(body, operands, wanted, at.decider)
    moves = at.bring_all(node.ins, operands)
    return PlannedNode(
        node, None, moves, tuple(operands), planned.outputs, bodies=(planned,), why="call"
    )


def _carried(
    at: Pass,
    body: Program,
    start: Sequence[Layout],
    rest: tuple[Sequence[Layout], Sequence[Layout]],
    offset: int,
    propagate: Propagate,
) -> list[Layout]:
    """Layouts that the carried values have before and after every turn of a body."""
    before, after = rest
    carry = list(start)
    for turn in range(_TURNS + 1):
        inputs = [*before, *carry, *after]
        count = len(body.outputs)
        out = propagate(body, inputs, [None] * count, at.decider, leave_pending=True)
        natural = out.outputs[offset : offset + len(carry)]
        if list(natural) == carry:
            return carry
        if turn == 0:
            carry = list(natural)
        else:
            carry = [_agreed(lhs, rhs) for lhs, rhs in zip(carry, natural, strict=True)]
    return [Layout.replicated(layout.ndim) for layout in carry]


def _agreed(lhs: Layout, rhs: Layout) -> Layout:
    """What two layouts have in common: on each dim the outer axes on which they agree."""
    dims: list[tuple[str, ...]] = []
    for left, right in zip(lhs.dims, rhs.dims, strict=True):
        same: list[str] = []
        for a, b in zip(left, right, strict=False):
            if a != b:
                break
            same.append(a)
        dims.append(tuple(same))
    return Layout(tuple(dims))


def _scan(at: Pass, node: Node, propagate: Propagate) -> PlannedNode:
    bodies = node.bodies
    assert bodies is not None, "a scan has a body"
    (body,), (consts,), carried = bodies.bodies, bodies.consts, bodies.carry
    xs_at = consts + carried
    fixed = [_there(at, ref) for ref in node.ins[:consts]]
    start = [_there(at, ref) for ref in node.ins[consts:xs_at]]
    # The scanned dim is whole on every device; the others stay cut.
    stacked = [Layout(_there(at, ref).dims[1:]) for ref in node.ins[xs_at:]]
    carry = _carried(at, body, start, (fixed, stacked), 0, propagate)
    inputs = [*fixed, *carry, *stacked]
    wanted: list[Layout | None] = [*carry, *([None] * (len(node.outs) - carried))]
    # What a turn leaves pending is reduced once, after the loop, or at once where that cuts it.
    planned = propagate(body, inputs, wanted, at.decider, leave_pending=True)
    made = zip(node.outs[carried:], planned.outputs[carried:], strict=True)
    scattered = [
        _scattered(layout, at.stack_wish(value), at.decider.sizes) for value, layout in made
    ]
    if any(scattered):
        planned = propagate(body, inputs, [*carry, *scattered], at.decider, leave_pending=True)

    def unstacked(layouts: Sequence[Layout]) -> list[Layout]:
        return [Layout(((), *layout.dims), layout.partial) for layout in layouts]

    operands = [*fixed, *carry, *unstacked(stacked)]
    results = [*carry, *unstacked(planned.outputs[carried:])]
    moves = at.bring_all(node.ins, operands)
    return PlannedNode(
        node, None, moves, tuple(operands), tuple(results), bodies=(planned,), why="scan"
    )


def _scattered(layout: Layout, wish: Wish, sizes: Mapping[str, int]) -> Layout | None:
    """The layout of what a turn adds to a stack, where a pending sum of it is wished cut.

    The bytes are those of a reduction after the loop, and the stack holds blocks. A wish for the
    dim along which turns are stacked cannot be fulfilled here.
    """
    cuts = {axis: dim - 1 for axis in layout.partial_axes if (dim := wish.get(axis))}
    return wished(layout, cuts, sizes) if cuts else None


def _while(at: Pass, node: Node, propagate: Propagate) -> PlannedNode:
    bodies = node.bodies
    assert bodies is not None, "a while loop has a body"
    (condition, body), (cond_consts, body_consts) = bodies.bodies, bodies.consts
    first = cond_consts + body_consts
    for_condition = [_there(at, ref) for ref in node.ins[:cond_consts]]
    for_body = [_there(at, ref) for ref in node.ins[cond_consts:first]]
    start = [_there(at, ref) for ref in node.ins[first:]]
    carry = _carried(at, body, start, (for_body, []), 0, propagate)
    # The condition runs on every device, and must come to the same there: nothing stays pending.
    carry = [layout.without_partial() for layout in carry]
    test = propagate(condition, [*for_condition, *carry], [Layout(())], at.decider)
    planned = propagate(body, [*for_body, *carry], list(carry), at.decider)
    operands = (*for_condition, *for_body, *carry)
    moves = at.bring_all(node.ins, operands)
    return PlannedNode(
        node, None, moves, operands, tuple(carry), bodies=(test, planned), why="while"
    )


def _cond(at: Pass, node: Node, propagate: Propagate) -> PlannedNode:
    bodies = node.bodies
    assert bodies is not None, "a cond has branches"
    operands = [_there(at, ref) for ref in node.ins[1:]]
    free: list[None] = [None] * len(node.outs)
    natural = [propagate(b, operands, free, at.decider).outputs for b in bodies.bodies]
    results = [
        wished(_common(layouts), at.wish(value), at.decider.sizes)
        for value, layouts in zip(node.outs, zip(*natural, strict=True), strict=True)
    ]
    planned = tuple(propagate(b, operands, list(results), at.decider) for b in bodies.bodies)
    brought = (Layout.replicated(at.program.aval(node.ins[0]).ndim), *operands)
    moves = at.bring_all(node.ins, brought)
    return PlannedNode(node, None, moves, brought, tuple(results), bodies=planned, why="cond")


def _common(layouts: Sequence[Layout]) -> Layout:
    """The layout of a branch that cuts most, so that constants follow the others."""
    return max(layouts, key=lambda layout: len(layout.shard_axes)).without_partial()


_PLANNERS: dict[str, Callable[[Any, Node, Propagate], PlannedNode]] = {
    "call": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
