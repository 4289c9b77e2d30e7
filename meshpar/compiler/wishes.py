"""The backward pass: what the operations after a value wish of it.

The layouts of annotations, outputs and neighbours go from the last operation to the first, through
the factors of each rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meshpar.compiler.decide import value_bytes
from meshpar.compiler.options import Wish, Wished
from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.compiler.priorities import prioritized
from meshpar.compiler.program import Constant, Program, Ref
from meshpar.placements.blocks import shards_on
from meshpar.placements.layout import Layout

__all__ = ["as_wished", "full_wish", "stack_wishes", "wishes_of"]


def full_wish(layout: Layout, sizes: Mapping[str, int]) -> Wish:
    """A layout as a wish: every axis cuts its dim or none; pending axes stay open."""
    return {axis: layout.dim_of(axis) for axis in sizes if axis not in layout.partial_axes}


def as_wished(aval: Any, wish: Wish, sizes: Mapping[str, int]) -> Layout:
    """The layout of an argument that may have any: as wished, where dims divide."""
    dims: list[tuple[str, ...]] = [()] * aval.ndim
    for axis, dim in wish.items():
        if dim is not None and not aval.shape[dim] % shards_on((*dims[dim], axis), sizes):
            dims[dim] = (*dims[dim], axis)
    return Layout(tuple(dims))


def wishes_of(
    program: Program,
    estimate: PlannedProgram,
    outputs: Sequence[Wish],
    sizes: Mapping[str, int],
) -> dict[int, Wished]:
    """What the operations after a value, from the last to the first, wish of it."""
    wishes = prioritized(
        estimate,
        lambda layout: full_wish(layout, sizes),
        lambda planned, asked: _operand_wishes(planned, asked, sizes),
    )
    worth: dict[int, float] = dict.fromkeys(wishes, math.inf)

    def add(ref: Ref, wish: Wish, below: float = math.inf) -> None:
        if isinstance(ref, Constant):
            return
        mine = wishes.setdefault(ref, {})
        if wish.keys() - mine.keys():
            least = min(below, value_bytes(program.aval(ref)))
            worth[ref] = max(worth.get(ref, 0), least)
        for axis, dim in wish.items():
            mine.setdefault(axis, dim)

    for ref, wish in zip(program.outputs, outputs, strict=True):
        add(ref, wish)
    for planned in reversed(estimate.nodes):
        node = planned.node
        if planned.rule is None:
            if planned.why in ("annotation", "manual"):
                for ref, layout in zip(node.ins, planned.operands, strict=True):
                    add(ref, full_wish(layout, sizes))
            continue
        asked = [wishes.get(value, {}) for value in node.outs]
        below = max((worth.get(v, 0) for v in node.outs if wishes.get(v)), default=math.inf)
        for ref, wish in zip(node.ins, _operand_wishes(planned, asked, sizes), strict=True):
            add(ref, wish, below)
    return {v: Wished(tuple(wish.items()), worth[v]) for v, wish in wishes.items() if wish}


def stack_wishes(
    estimate: PlannedProgram, wishes: Mapping[int, Wished], sizes: Mapping[str, int]
) -> dict[int, Wish]:
    """For what loops stack: what is wished of the sums into which it passes, still pending."""
    stacked = {v for planned in estimate.nodes if planned.why == "scan" for v in planned.node.outs}
    if not stacked:
        return {}
    through: dict[int, Wish] = {value: each.wish for value, each in wishes.items()}
    for planned in reversed(estimate.nodes):
        if planned.rule is not None:
            asked = [through.get(value, {}) for value in planned.node.outs]
            wanted = _operand_wishes(planned, asked, sizes, sums=True)
            for ref, wish in zip(planned.node.ins, wanted, strict=True):
                if isinstance(ref, int):
                    through[ref] = {**wish, **through.get(ref, {})}
    return {value: through[value] for value in stacked if value in through}


def _operand_wishes(
    planned: PlannedNode,
    asked: Sequence[Wish],
    sizes: Mapping[str, int],
    *,
    sums: bool = False,
) -> list[dict[str, int | None]]:
    """The wishes for results as wishes for operands, through the rule's factors.

    An axis that cuts a factor which is reduced keeps cutting it: what is wished of the result says
    nothing about it. Otherwise the wish decides, and where there is none, what was estimated. What
    passes pending may so be reduced before an operation, where it is smaller than behind it; but of
    the terms of a pending sum nothing is wished unless `sums`: they are reduced once, behind it.
    """
    rule = planned.rule
    assert rule is not None, "only operations with a rule have factors"
    estimated = {axis: factor for factor, axes in planned.axes.items() for axis in axes}
    pending = {axis for layout in planned.results for axis in layout.partial_axes}
    terms = _terms(planned)
    out: list[dict[str, int | None]] = [{} for _ in rule.operands]
    for axis in sizes:
        factor = estimated.get(axis)
        decided = factor is not None
        passes = not decided and (sums or terms[axis] < 2)
        if axis not in pending or passes:
            for dims, wish in zip(rule.results, asked, strict=True):
                if axis in wish:
                    dim = wish[axis]
                    if dim is None:
                        factor, decided = None, True
                    elif dims[dim] and dims[dim][0] not in rule.blocked:
                        factor, decided = dims[dim][0], True
                    break
        if not decided:
            continue
        for wish, dims in zip(out, rule.operands, strict=True):
            wish[axis] = next((d for d, names in enumerate(dims) if factor in names), None)
    return out


def _terms(planned: PlannedNode) -> Counter[str]:
    """How many operands are there pending on each axis; what is merely made so adds nothing."""
    made = {move.value for move in planned.moves if not move.src.partial}
    pairs = zip(planned.node.ins, planned.operands, strict=True)
    there = (layout for ref, layout in pairs if isinstance(ref, int) and ref not in made)
    return Counter(axis for layout in there for axis in layout.partial_axes)
