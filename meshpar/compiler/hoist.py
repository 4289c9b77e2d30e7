"""Reductions right behind what makes the terms, rather than behind the transpose that follows.

Among positions of equal bytes the earliest is the best: XLA folds a transpose that follows a dot
into the dot, where a slow one comes out on CPU, unless the reduction stands between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshpar.compiler.planned import Move, PlannedNode, PlannedProgram
from meshpar.placements.layout import Layout
from meshpar.rules.rule import Rule

__all__ = ["hoist_reductions"]


def hoist_reductions(planned: PlannedProgram) -> PlannedProgram:
    """The same program with reductions moved before permutations of dims, behind the contraction.

    What other operations make stays pending for longer, so that it may share a collective.
    """
    nodes = list(planned.nodes)
    makers = {v: i for i, node in enumerate(nodes) for v in node.node.outs}
    uses: Counter[tuple[int, Layout]] = Counter()
    for node in nodes:
        uses.update((m.value, m.src) for m in node.moves)
        pairs = zip(node.node.ins, node.operands, strict=True)
        uses.update((ref, layout) for ref, layout in pairs if isinstance(ref, int))
    uses.update((m.value, m.src) for m in planned.moves)
    pairs = zip(planned.program.outputs, planned.outputs, strict=True)
    uses.update((ref, layout) for ref, layout in pairs if isinstance(ref, int))

    def kept(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if not _hoisted(move, nodes, makers, uses))

    # First, as they may move to nodes, which are gathered below.
    moves = kept(planned.moves)
    for i in reversed(range(len(nodes))):
        if any(move.src.partial for move in nodes[i].moves):
            nodes[i] = replace(nodes[i], moves=kept(nodes[i].moves))
    return replace(planned, nodes=tuple(nodes), moves=moves)


def _hoisted(
    move: Move,
    nodes: list[PlannedNode],
    makers: Mapping[int, int],
    uses: Mapping[tuple[int, Layout], int],
) -> bool:
    """Moves a reduction before the permutation that makes its value, if there is one."""
    if len(move.dst.partial) >= len(move.src.partial) or uses[move.value, move.src] != 1:
        return False
    made_at = makers.get(move.value)
    if made_at is None:
        return False
    maker = nodes[made_at]
    order = _permutation(maker.rule)
    source = maker.node.ins[0] if order is not None else None
    if order is None or not isinstance(source, int) or uses[source, maker.operands[0]] != 1:
        return False
    before = Layout(tuple(move.dst.dims[order[d]] for d in range(len(order))), move.dst.partial)
    first = Move(source, maker.operands[0], before)
    if not _hoisted(first, nodes, makers, uses):
        if source not in makers or not _contracts(nodes[makers[source]].rule):
            return False
        maker = replace(maker, moves=(*maker.moves, first))
    assert maker.rule is not None, "only a rule permutes dims"
    axes = {names[0]: cut for names, cut in zip(maker.rule.operands[0], before.dims, strict=True)}
    nodes[made_at] = replace(maker, operands=(before,), results=(move.dst,), axes=axes)
    return True


def _contracts(rule: Rule | None) -> bool:
    """Whether several operands are multiplied and added up."""
    return rule is not None and len(rule.operands) > 1 and bool(rule.reduce)


def _permutation(rule: Rule | None) -> list[int] | None:
    """For each operand dim the result dim that it becomes, where the rule only moves dims."""
    if rule is None or rule.emit is not None or len(rule.operands) != 1 or rule.blocked:
        return None
    (operand,), result = rule.operands, rule.results[0]
    if len(rule.results) != 1 or sorted(operand) != sorted(result) or operand == result:
        return None
    if any(len(dim) != 1 for dim in operand):
        return None
    return [result.index(dim) for dim in operand]
