"""Why a value lies where it lies: the chain of reasons behind it, with the price of each choice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshpar.compiler.decide import Decider
from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.compiler.program import Constant
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout

__all__ = ["reasons"]

_LONGEST = 12  # steps back that are told


def reasons(
    planned: PlannedProgram,
    mesh: ProcessMesh,
    names: Mapping[str, int],
    name: str,
    model: DeviceModel,
) -> str:
    """The chain of reasons behind the placement of a named value.

    Args:
      planned: the program with its layouts.
      mesh: the mesh.
      names: name -> position of each input.
      name: an input, `out/<position>`, or `<input>.grad` for the gradient of an input.
      model: what things cost.

    Raises:
      KeyError: no value has that name.
    """
    makers = {v: node for node in planned.nodes for v in node.node.outs}
    value = _value_of(planned, names, name, makers)
    told = _Teller(planned, mesh, makers, {i: n for n, i in names.items()}, model)
    return "\n".join([f"{name}:", *(f"  {line}" for line in told.chain(value))])


def _value_of(
    planned: PlannedProgram,
    names: Mapping[str, int],
    name: str,
    makers: Mapping[int, PlannedNode],
) -> int:
    program = planned.program
    if name in names:
        return program.inputs[names[name]]
    kind, _, rest = name.rpartition("/")
    if kind == "out" and rest.isdigit() and int(rest) < len(program.outputs):
        ref = program.outputs[int(rest)]
        if not isinstance(ref, Constant):
            return ref
    if name.endswith(".grad") and name.removesuffix(".grad") in names:
        found = _gradient_of(planned, program.inputs[names[name.removesuffix(".grad")]], makers)
        if found is not None:
            return found
    known = [*names, *(f"out/{i}" for i in range(len(program.outputs)))]
    raise KeyError(
        f"plan.why({name!r}): no such value; names are {', '.join(known[:20])}"
        f"{', ...' if len(known) > 20 else ''}, and '<input>.grad' for a gradient"
    )


def _gradient_of(
    planned: PlannedProgram, value: int, makers: Mapping[int, PlannedNode]
) -> int | None:
    """The last value of the backward pass that has the input's type and meets it in the update."""
    aval = planned.program.avals[value]

    def alike(number: int) -> bool:
        other = planned.program.avals[number]
        return other.shape == aval.shape and other.dtype == aval.dtype

    def behind(number: int, depth: int) -> Iterator[int]:
        node = makers.get(number)
        if node is None or depth == 0:
            return
        if node.node.backward and alike(number):
            yield number
            return
        for ref in node.node.ins:
            if isinstance(ref, int) and alike(ref):
                yield from behind(ref, depth - 1)

    for node in reversed(planned.nodes):
        if value in node.node.ins and not node.node.backward:
            for ref in node.node.ins:
                if isinstance(ref, int) and ref != value:
                    found = next(behind(ref, 40), None)
                    if found is not None:
                        return found
    return next((v for v in reversed(list(makers)) if makers[v].node.backward and alike(v)), None)


class _Teller:
    """Tells, value by value, what made a layout."""

    def __init__(
        self,
        planned: PlannedProgram,
        mesh: ProcessMesh,
        makers: Mapping[int, PlannedNode],
        inputs: Mapping[int, str],
        model: DeviceModel,
    ) -> None:
        self._planned, self._mesh, self._makers = planned, mesh, makers
        self._inputs = {planned.program.inputs[i]: name for i, name in inputs.items()}
        self._given = dict(zip(planned.program.inputs, planned.inputs, strict=True))
        self._decider = Decider(mesh.axis_sizes, model)

    def chain(self, value: int) -> Iterator[str]:
        for _ in range(_LONGEST):
            node = self._makers.get(value)
            if node is None:
                name = self._inputs.get(value, "a constant")
                layout = self._given.get(value)
                yield f"{name} is {self._placed(layout) if layout else 'whole'}: given"
                return
            layout = node.results[node.node.outs.index(value)]
            rule = node.rule.notation() if node.rule is not None else node.why
            where = node.node.where or "an unknown line"
            yield f"{self._type(value)} is {self._placed(layout)}: {node.node.name} at {where}"
            yield f"    {rule}, from {', '.join(map(self._placed, node.operands)) or 'nothing'}"
            yield from self._prices(node)
            following = self._decisive(node, layout)
            if following is None:
                return
            value = following
        yield "... (and so on)"

    def _prices(self, node: PlannedNode) -> Iterator[str]:
        """The cheapest other option, and what it would have cost."""
        if node.rule is None or node.asked is None:
            return
        aval = self._planned.program.aval
        there, wishes, uses = node.asked
        ins = [aval(ref) for ref in node.node.ins]
        outs = [aval(v) for v in node.node.outs]
        others = self._decider.alternatives(node.rule, ins, outs, there, wishes, uses)
        ranked = sorted(others, key=lambda pair: pair[0].seconds)
        chosen = [c for c, _ in ranked if c.expanded.operands == node.operands]
        rest = [c for c, _ in ranked if c.expanded.operands != node.operands]
        if chosen and rest:
            other = rest[0]
            yield (
                f"    {chosen[0].seconds * 1e6:.3g} us; the next best, "
                f"{', '.join(map(self._placed, other.expanded.operands))}, would take "
                f"{other.seconds * 1e6:.3g} us"
            )

    def _decisive(self, node: PlannedNode, layout: Layout) -> int | None:
        """The operand whose layout shares most axes with the result's, of equals the largest.

        So a chain goes on through data rather than through masks.
        """
        axes = {*layout.shard_axes, *layout.partial_axes}
        best, most = None, (0, 0)
        for ref, operand in zip(node.node.ins, node.operands, strict=True):
            if isinstance(ref, int):
                shared = len(axes & {*operand.shard_axes, *operand.partial_axes})
                key = (shared, _bytes(self._planned.program.avals[ref]))
                if shared and key > most:
                    best, most = ref, key
        return best

    def _placed(self, layout: Layout) -> str:
        return str(layout.placements(self._mesh))

    def _type(self, value: int) -> str:
        aval: Any = self._planned.program.avals[value]
        return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _bytes(aval: Any) -> int:
    item = np.dtype(aval.dtype).itemsize if isinstance(aval.dtype, np.dtype) else 8
    return math.prod(aval.shape) * item
