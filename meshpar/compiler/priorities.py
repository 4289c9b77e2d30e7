"""Annotations with priorities: which of them a value follows where several pull at it.

An annotation always holds for the value that it makes. What may be open is where the values before
it lie, a free argument above all: annotations that disagree pull at them. Those with a number are
followed first, the lowest before all others, and then those without, as cost has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshpar.compiler.options import Wish
from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.compiler.program import Node
from meshpar.errors import PlacementError
from meshpar.placements.annotate import PRIMITIVE
from meshpar.placements.layout import Layout

__all__ = ["prioritized"]

Through = Callable[[PlannedNode, Sequence[Wish]], Sequence[Wish]]


def prioritized(
    estimate: PlannedProgram, full_wish: Callable[[Layout], Wish], through: Through
) -> dict[int, dict[str, int | None]]:
    """What annotations with a priority wish of the values before them, lower numbers first.

    Args:
      estimate: the program with estimated layouts.
      full_wish: a layout as a wish.
      through: (an operation, wishes for its results) -> wishes for its operands.

    Raises:
      PlacementError: two annotations of one value with the same priority contradict each other.
    """
    wishes: dict[int, dict[str, int | None]] = {}
    levels = {priority for planned in estimate.nodes if (priority := _of(planned.node)) is not None}
    for level in sorted(levels):
        asked_of: dict[int, tuple[Node, Layout]] = {}
        for planned in reversed(estimate.nodes):
            node = planned.node
            if _of(node) == level:
                (ref,), (layout,) = node.ins, planned.operands
                if isinstance(ref, int):
                    first, other = asked_of.setdefault(ref, (node, layout))
                    if other != layout:
                        raise _contradiction(level, (node, layout), (first, other))
                    _add(wishes, ref, full_wish(layout))
            elif planned.rule is not None:
                asked = [wishes.get(value, {}) for value in node.outs]
                axes = {axis for wish in asked for axis in wish}
                if not axes:
                    continue
                for ref, wish in zip(node.ins, through(planned, asked), strict=True):
                    if isinstance(ref, int):
                        _add(wishes, ref, {axis: wish[axis] for axis in axes if axis in wish})
    return wishes


def _of(node: Node) -> int | None:
    return node.params.get("priority") if node.name == PRIMITIVE else None


def _add(
    wishes: dict[int, dict[str, int | None]], ref: int, wish: Mapping[str, int | None]
) -> None:
    mine = wishes.setdefault(ref, {})
    for axis, dim in wish.items():
        mine.setdefault(axis, dim)


def _contradiction(
    level: int, lhs: tuple[Node, Layout], rhs: tuple[Node, Layout]
) -> PlacementError:
    mesh = lhs[0].params["mesh"]
    (first, at_first), (second, at_second) = (
        (layout.placements(mesh), node.where or "an unknown line") for node, layout in (lhs, rhs)
    )
    aval = lhs[0].eqn.outvars[0].aval
    return PlacementError(
        f"two annotations of one value have priority={level} and contradict each other.",
        value=f"{aval.dtype}[{','.join(map(str, aval.shape))}] on {mesh!s}",
        first=f"{first} at {at_first}",
        second=f"{second} at {at_second}",
        because="a value lies in one way, and equal priorities do not say in which",
        instead=f"shard_tensor(..., priority={level + 1}) for the one that should give way, or "
        "no priority: then both hold as resharded copies, and cost decides where the value lies",
    )
