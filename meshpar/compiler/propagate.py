"""A layout for every value of a program: forward, backward, and forward again.

The first forward pass takes what operands have. The backward pass turns the layouts of annotations,
outputs and neighbours into *wishes* for the values before them, so that zeros, masks and gradients
are made where they are needed. The second forward pass decides, each operation by the time that it
and its reshards take, wishes included. No operation is named here: rules say what they allow.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from meshpar.compiler.annotations import annotated_layout, is_annotation, manual_layouts
from meshpar.compiler.bucket import bucket_moves
from meshpar.compiler.control_flow import plan_control_flow
from meshpar.compiler.decide import Decider, wished
from meshpar.compiler.hoist import hoist_reductions
from meshpar.compiler.options import Wish, Wished
from meshpar.compiler.planned import Move, PlannedNode, PlannedProgram
from meshpar.compiler.program import Constant, Node, Program, Ref
from meshpar.compiler.wishes import as_wished, full_wish, stack_wishes, wishes_of
from meshpar.placements.layout import Layout

__all__ = ["AFTER_EACH_PASS", "propagate"]

AFTER_EACH_PASS: list[Callable[[PlannedProgram], None]] = []
"""What looks at a program after each pass: in the tests `verify`."""


def propagate(
    program: Program,
    inputs: Sequence[Layout | None],
    outputs: Sequence[Layout | None],
    decider: Decider,
    *,
    leave_pending: bool = False,
) -> PlannedProgram:
    """Plans a program.

    Args:
      program: what runs.
      inputs: the layout of each argument; `None` lets the plan choose.
      outputs: the layout that each output must have; `None` lets the plan choose.
      decider: makes the choice for single operations; bodies of control flow share it.
      leave_pending: whether outputs of a layout that the plan chooses may be pending.

    Returns:
      The program with a layout for every value and every reshard.
    """
    with collector_paused():
        return _propagate(program, inputs, outputs, decider, leave_pending)


def _propagate(
    program: Program,
    inputs: Sequence[Layout | None],
    outputs: Sequence[Layout | None],
    decider: Decider,
    leave_pending: bool,
) -> PlannedProgram:
    wanted = [full_wish(layout, decider.sizes) if layout else {} for layout in outputs]
    given = [
        layout or Layout.replicated(program.aval(i).ndim)
        for i, layout in zip(program.inputs, inputs, strict=True)
    ]
    estimate = _Forward(program, decider, {}, True).run(given, [None] * len(outputs))
    wishes = wishes_of(program, estimate, wanted, decider.sizes)
    chosen = [
        layout or as_wished(program.aval(i), wishes.get(i, Wished()).wish, decider.sizes)
        for i, layout in zip(program.inputs, inputs, strict=True)
    ]
    stacks = stack_wishes(estimate, wishes, decider.sizes)
    last = _Forward(program, decider, wishes, leave_pending, _reduced(estimate), stacks)
    planned = _watched(last.run(chosen, outputs))
    small = int(decider.model.latency * decider.model.link_bandwidth)
    return _watched(bucket_moves(_watched(hoist_reductions(planned)), small))


def _watched(planned: PlannedProgram) -> PlannedProgram:
    for watch in AFTER_EACH_PASS:
        watch(planned)
    return planned


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection for a while: planning makes many objects and no garbage cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Forward:
    """One forward pass: decides operation by operation."""

    def __init__(
        self,
        program: Program,
        decider: Decider,
        wishes: Mapping[int, Wished],
        leave_pending: bool,
        reduced: Mapping[int, Layout] | None = None,
        stacks: Mapping[int, Wish] | None = None,
    ) -> None:
        self.program, self.decider, self.wishes = program, decider, wishes
        self.reduced, self.stacks = reduced or {}, stacks or {}
        self.leave_pending = leave_pending
        self.there: dict[int, tuple[Layout, ...]] = {}  # the layouts in which a value is there
        self.moves: list[Move] = []
        self.arguments = frozenset(program.inputs)
        self.gathered: set[tuple[int, Layout]] = set()  # arguments that the forward pass gathered
        self.backward = False
        self.uses: Counter[int] = Counter()
        for node in program.nodes:
            self.uses.update({ref for ref in node.ins if not isinstance(ref, Constant)})

    def run(self, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> PlannedProgram:
        program = self.program
        for number, layout in zip(program.inputs, inputs, strict=True):
            self.there[number] = (layout,)
        for number in program.constants:
            self.there[number] = (Layout.replicated(program.aval(number).ndim),)
        nodes = [self._planned(node) for node in program.nodes]
        self.moves = []
        final = tuple(
            self._brought(ref, wanted or self._settled(ref))
            for ref, wanted in zip(program.outputs, outputs, strict=True)
        )
        return PlannedProgram(
            program, self.decider.sizes, tuple(inputs), tuple(nodes), tuple(self.moves), final
        )

    def layouts(self, ref: Ref) -> tuple[Layout, ...]:
        """The layouts in which an operand is there."""
        return (Layout.replicated(ref.aval.ndim),) if isinstance(ref, Constant) else self.there[ref]

    def _expected(self, ref: Ref) -> tuple[Layout, ...]:
        """The layouts in which an operand is there, or will be for another operation anyway."""
        there = self.layouts(ref)
        if isinstance(ref, Constant) or ref not in self.reduced or not there[-1].partial:
            return there
        soon = wished(self.reduced[ref], self.wish(ref), self.decider.sizes)
        return (*there, soon)

    def wish(self, value: int) -> Wish:
        """What is wished of a value."""
        return self.wishes.get(value, Wished()).wish

    def stack_wish(self, value: int) -> Wish:
        """What is wished of what a loop stacks, or of sums of it that pass pending."""
        return {**self.stacks.get(value, {}), **self.wish(value)}

    def _settled(self, ref: Ref) -> Layout:
        """The layout of an output that may have any."""
        there = self.layouts(ref)[0]
        return there if self.leave_pending else there.without_partial()

    def _brought(self, ref: Ref, layout: Layout) -> Layout:
        """Makes an operand be there in a layout, by the cheapest move."""
        if isinstance(ref, Constant):
            return layout
        there = self.there[ref]
        # What it was gathered from may be gone: a pending value, once reduced, is taken reduced.
        again = self.backward and (ref, layout) in self.gathered and len(there) > 1
        if layout not in there or again:
            there = tuple(t for t in there if t != layout)
            aval = self.program.aval(ref)
            seconds = [self.decider.reshard_seconds(src, layout, aval) for src in there]
            src = there[seconds.index(min(seconds))]
            self.moves.append(Move(ref, src, layout, again))
            self._remember_gather(ref, src, layout)
            # Once reduced, a value is taken reduced: else its consumers reduce it again.
            kept = [t for t in there if set(t.partial) <= set(layout.partial)]
            self.there[ref] = (*kept, layout)
        return layout

    def _remember_gather(self, ref: int, src: Layout, layout: Layout) -> None:
        """An argument that the forward pass gathers is gathered again in the backward pass.

        So it is whole only where it is used, and what lies between the two uses has the memory.
        """
        self.gathered.discard((ref, layout))
        fewer = len(layout.shard_axes) < len(src.shard_axes)
        if fewer and not self.backward and ref in self.arguments:
            self.gathered.add((ref, layout))

    def _planned(self, node: Node) -> PlannedNode:
        self.moves = []
        self.backward = node.backward
        if node.bodies is not None:
            planned = plan_control_flow(self, node, propagate)
        elif is_annotation(node):
            planned = self._annotated(node)
        elif node.name == "shard_map":
            planned = self._manual(node)
        else:
            planned = self._by_rule(node)
        for value, layout in zip(node.outs, planned.results, strict=True):
            self.there[value] = (layout,)
        return planned

    def bring_all(self, refs: Sequence[Ref], layouts: Sequence[Layout]) -> tuple[Move, ...]:
        """Makes operands be there in these layouts; the moves that it takes."""
        self.moves = []
        for ref, layout in zip(refs, layouts, strict=True):
            self._brought(ref, layout)
        return tuple(self.moves)

    def _annotated(self, node: Node) -> PlannedNode:
        (there, *_) = self.layouts(node.ins[0])
        layout = annotated_layout(node, self.decider.sizes, self.decider.around, there)
        moves = self.bring_all(node.ins, (layout,))
        return PlannedNode(node, None, moves, (layout,), (layout,), why="annotation")

    def _manual(self, node: Node) -> PlannedNode:
        """A region that the user wrote for one device: between reshards to its specs."""
        avals = [self.program.aval(ref) for ref in node.ins]
        outs = [self.program.avals[value] for value in node.outs]
        operands, results = manual_layouts(node, avals, outs, self.decider.sizes)
        moves = self.bring_all(node.ins, operands)
        return PlannedNode(node, None, moves, operands, results, why="manual")

    def _by_rule(self, node: Node) -> PlannedNode:
        avals = [self.program.aval(ref) for ref in node.ins]
        outs = [self.program.avals[value] for value in node.outs]
        rule = self.decider.rule_of(node, avals)
        if rule is None:
            operands = tuple(Layout.replicated(aval.ndim) for aval in avals)
            results = tuple(Layout.replicated(aval.ndim) for aval in outs)
            moves = self.bring_all(node.ins, operands)
            return PlannedNode(node, None, moves, operands, results, why="no rule: replicated")
        there = tuple(self._expected(ref) for ref in node.ins)
        wishes = tuple(self.wishes.get(value, Wished()) for value in node.outs)
        uses = tuple(1 if isinstance(r, Constant) else self.uses[r] for r in node.ins)
        choice = self.decider.choose(node, rule, avals, outs, there, wishes, uses)
        moves = self.bring_all(node.ins, choice.expanded.operands)
        return PlannedNode(
            node,
            rule,
            moves,
            choice.expanded.operands,
            choice.expanded.results,
            choice.expanded.axes,
            asked=(there, wishes, uses),
        )


def _reduced(estimate: PlannedProgram) -> dict[int, Layout]:
    """The pending values that some operation needs reduced, with the layout that it takes.

    So the operations before that one need not carry them on pending, to reduce what they make too.
    """
    moves = [*(move for node in estimate.nodes for move in node.moves), *estimate.moves]
    return {move.value: move.dst for move in moves if move.src.partial and not move.dst.partial}
