"""The ways in which a whole program runs on blocks without a word between devices.

A `Flow` is one such way along one mesh axis: a placement for every input and output, and for every
operation the factor that the axis cuts. It is the rule of the program, made from the rules of its
operations as a relational join: each operation has rows (operand placements, result placements),
and rows that agree on the values between them make a flow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from meshpar.compiler.emitted import emitted_primitives
from meshpar.compiler.options import Cut, expand
from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.compiler.program import Constant, Node, Program, Ref
from meshpar.placements.layout import Layout
from meshpar.placements.types import Partial, Placement, ReduceType, Replicate, Shard
from meshpar.rules import find_rule
from meshpar.rules.rule import Rule

__all__ = ["Flow", "Flows", "flows_of"]

REPLICATE = Replicate()
_MOST = 1024  # flows that are followed; to leave some out is sound
_PROBE = {"axis": 2}  # a mesh on which one operation is tried


@dataclass(frozen=True, slots=True)
class Flow:
    """One way along one mesh axis.

    Args:
      inputs: the placement of each input; `None` where the program does not read it.
      outputs: the placement of each output.
      cuts: what the axis does in each operation.
      located: whether some operation must know where its block begins.
    """

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]
    cuts: tuple[Cut, ...]
    located: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every input is whole on each device."""
        return all(p in (None, REPLICATE) for p in self.inputs)


@dataclass(frozen=True, slots=True)
class Flows:
    """A program with its rules and flows.

    Args:
      program: the program.
      rules: the rule of each operation, `None` where it has none.
      flows: every flow; the first has every input replicated.
    """

    program: Program
    rules: tuple[Rule | None, ...]
    flows: tuple[Flow, ...]

    def joined(
        self,
        chosen: Mapping[str, Flow],
        given: Sequence[Layout],
        sizes: Mapping[str, int],
    ) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
        """Input and output layouts of one flow per mesh axis; `None` where they do not fit.

        Args:
          chosen: mesh axis -> its flow; axes that are not in it do nothing. Where several axes come
            to cut one dim, an earlier one is further outside.
          given: layouts of the inputs, whose nesting of axes is kept.
          sizes: the mesh's axes.
        """
        program = self.program
        there: dict[int, Layout] = {}
        hints = {
            value: _hint(layout, {axis: flow.inputs[i] for axis, flow in chosen.items()})
            for i, (value, layout) in enumerate(zip(program.inputs, given, strict=True))
        }

        def layout_of(ref: Ref) -> Layout | None:
            if isinstance(ref, Constant) or ref in program.constants:
                return Layout.replicated(program.aval(ref).ndim)
            return there.get(ref)

        for i, (node, rule) in enumerate(zip(program.nodes, self.rules, strict=True)):
            if rule is None:
                operands = tuple(Layout.replicated(program.aval(ref).ndim) for ref in node.ins)
                results = tuple(Layout.replicated(program.avals[v].ndim) for v in node.outs)
            else:
                nested = [
                    () if isinstance(ref, Constant) else (there.get(ref) or hints.get(ref),)
                    for ref in node.ins
                ]
                known = [tuple(x for x in layouts if x is not None) for layouts in nested]
                option = {axis: flow.cuts[i] for axis, flow in chosen.items()}
                expanded = expand(rule, option, known, sizes)
                if expanded is None:
                    return None
                operands, results = expanded.operands, expanded.results
            for ref, layout in zip(node.ins, operands, strict=True):
                now = layout_of(ref)
                if now is None and not isinstance(ref, Constant):
                    there[ref] = layout
                elif now != layout and not isinstance(ref, Constant):
                    return None  # that of a literal was settled when the flow was made
            there.update(zip(node.outs, results, strict=True))
        inputs = tuple(there.get(v) or hint for v, hint in zip(program.inputs, given, strict=True))
        there.update(zip(program.inputs, inputs, strict=True))
        outputs = [layout_of(ref) for ref in program.outputs]
        assert None not in outputs, "every output is an input or made by an operation"
        return inputs, tuple(layout for layout in outputs if layout is not None)


def _hint(given: Layout, placements: Mapping[str, Placement | None]) -> Layout:
    """How axes nest on an input: those that stay as they were, the new ones inside them."""
    dims = [[a for a in axes if placements.get(a) == Shard(d)] for d, axes in enumerate(given.dims)]
    for axis, placement in placements.items():
        if isinstance(placement, Shard) and axis not in dims[placement.dim]:
            dims[placement.dim].append(axis)
    return Layout(tuple(tuple(axes) for axes in dims))


@dataclass(frozen=True, slots=True)
class _Row:
    """What one mesh axis may do in one operation."""

    cut: Cut
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    located: bool = False


def flows_of(program: Program) -> Flows:
    """Every flow of a program, by joining the rows of its operations from the first to the last."""
    rules: list[Rule | None] = []
    table: list[_Partial] = [_Partial({}, (), False)]
    last = _last_uses(program)
    for position, node in enumerate(program.nodes):
        avals = [program.aval(ref) for ref in node.ins]
        rule = None if node.bodies is not None else find_rule(node.name, avals, node.params)
        rules.append(rule)
        rows = list(_rows(program, node, rule))
        grown = (
            new for partial in table for row in rows for new in partial.joined(program, node, row)
        )
        live = [v for v, use in last.items() if use > position]
        unique: dict[tuple[Placement | None, ...], _Partial] = {}
        for partial in grown:
            key = tuple(partial.states.get(v) for v in live)
            if key not in unique or (unique[key].located and not partial.located):
                unique[key] = partial
        # Doing nothing comes first; what leaves much pending is the least likely to be of use.
        likely = sorted(unique, key=lambda key: sum(isinstance(p, Partial) for p in key))
        table = [unique[key] for key in likely[:_MOST]]
    flows = [partial.flow(program) for partial in table]
    flows.sort(key=lambda flow: (not flow.is_replicated, _cut_outputs(flow), flow.located))
    return Flows(program, tuple(rules), tuple(flows))


def _cut_outputs(flow: Flow) -> int:
    return sum(p != REPLICATE for p in flow.outputs) if flow.is_replicated else 0


def _last_uses(program: Program) -> dict[int, int]:
    """Value -> the position of the last operation that reads it; inputs and outputs live on."""
    end = len(program.nodes) + 1
    last = {
        ref: i for i, node in enumerate(program.nodes) for ref in node.ins if isinstance(ref, int)
    }
    kept = [*program.inputs, *(ref for ref in program.outputs if isinstance(ref, int))]
    return {**last, **dict.fromkeys(kept, end)}


@dataclass(frozen=True, slots=True)
class _Partial:
    """A flow up to some operation."""

    states: dict[int, Placement]
    cuts: tuple[Cut, ...]
    located: bool

    def joined(self, program: Program, node: Node, row: _Row) -> Iterator[_Partial]:
        """With one more operation, if its row agrees."""
        states = dict(self.states)
        for ref, placement in zip(node.ins, row.operands, strict=True):
            if isinstance(ref, Constant) or ref in program.constants:
                if placement != REPLICATE and not _reduces_to_itself(ref, placement):
                    return
            elif states.setdefault(ref, placement) != placement:
                return
        states.update(zip(node.outs, row.results, strict=True))
        yield _Partial(states, (*self.cuts, row.cut), self.located or row.located)

    def flow(self, program: Program) -> Flow:
        """The flow, of the whole program."""
        inputs = tuple(self.states.get(v) for v in program.inputs)
        outputs = tuple(
            REPLICATE if isinstance(ref, Constant) else self.states.get(ref, REPLICATE)
            for ref in program.outputs
        )
        return Flow(inputs, outputs, self.cuts, self.located)


_IDEMPOTENT = frozenset(ReduceType) - {ReduceType.kRedSum, ReduceType.kRedProd}


def _reduces_to_itself(ref: Ref, placement: Placement) -> bool:
    """Whether a literal that every device has may count as pending: as 0 is a sum of zeros."""
    if not isinstance(ref, Constant) or not isinstance(placement, Partial):
        return False
    return placement.kind in _IDEMPOTENT or (
        placement.kind is ReduceType.kRedSum and not np.any(ref.value)
    )


def _rows(program: Program, node: Node, rule: Rule | None) -> Iterator[_Row]:
    """Nothing; a pending reduction that passes; each factor cut, where devices need not talk."""
    nothing = (REPLICATE,) * len(node.ins), (REPLICATE,) * len(node.outs)
    yield _Row(Cut(), *nothing)
    if rule is None:
        return
    for number, passing in enumerate(rule.passes):
        for kind in sorted(passing.kinds):
            operands = tuple(
                Partial(kind) if i in passing.operands else REPLICATE for i in range(len(node.ins))
            )
            yield _Row(Cut(None, number, kind), operands, (Partial(kind),) * len(node.outs))
    for factor in rule.factors:
        row = _factor_row(program, node, rule, factor)
        if row is not None:
            yield row


def _factor_row(program: Program, node: Node, rule: Rule, factor: str) -> _Row | None:
    kind = rule.reduce.get(factor)
    reduced = REPLICATE if kind is None else Partial(kind)
    pending = rule.contributes.get(factor, ())
    operands: list[Placement] = []
    results: list[Placement] = []
    for i, dims in enumerate((*rule.operands, *rule.results)):
        at = [d for d, names in enumerate(dims) if factor in names]
        if len(at) > 1:
            return None  # a diagonal: the axis would cut two dims of one tensor
        is_operand = i < len(rule.operands)
        uncut = reduced if not is_operand or i in pending else REPLICATE
        (operands if is_operand else results).append(Shard(at[0]) if at else uncut)
    located = False
    if rule.emit is not None:
        used = _primitives(program, node, rule, factor)
        if used is None or used - {"axis_index"}:
            return None
        located = bool(used)
    elif REPLICATE in results and any(p != REPLICATE for p in operands):
        return None  # every device would have another value
    return _Row(Cut(factor), tuple(operands), tuple(results), located)


@dataclass(frozen=True, slots=True)
class _Question:
    """An operation with a factor cut in two; equal for operations that a rule cannot tell apart."""

    key: Hashable
    factor: str
    program: Program = field(compare=False)
    node: Node = field(compare=False)
    rule: Rule = field(compare=False)


def _primitives(program: Program, node: Node, rule: Rule, factor: str) -> frozenset[str] | None:
    """What an operation's own program asks of the mesh when a factor is cut in two."""
    key = id(node) if node.key is None else node.key
    return _answered(_Question(key, factor, program, node, rule))


@lru_cache(maxsize=8192)
def _answered(question: _Question) -> frozenset[str] | None:
    program, node, rule = question.program, question.node, question.rule
    option = {"axis": Cut(question.factor)}
    expanded = expand(rule, option, [() for _ in node.ins], _PROBE)
    if expanded is None:
        return None
    planned = PlannedNode(
        node, rule, (), expanded.operands, expanded.results, expanded.axes, (), "probe"
    )
    whole = PlannedProgram(program, _PROBE, (), (planned,), (), ())
    return emitted_primitives(whole, planned)
