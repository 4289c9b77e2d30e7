"""`Plan`: every decision of a partitioned program, readable before it runs."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.emitted import emitted_collectives
from meshpar.compiler.memory import peak_bytes
from meshpar.compiler.planned import Move, PlannedProgram, in_buckets
from meshpar.compiler.program import Node
from meshpar.compiler.why import reasons
from meshpar.mesh import ProcessMesh
from meshpar.placements.apply_bucket import bucket_bytes
from meshpar.placements.layout import Layout
from meshpar.placements.turns import turns_of

__all__ = ["Collective", "Operation", "Plan"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program.

    Args:
      kind: all_reduce, reduce_scatter, all_gather, all_to_all or ppermute.
      axes: the mesh axes over which devices talk.
      bytes: what each device sends, in one execution.
      count: how often it runs, loops multiplied out; where devices differ, as the ranks of a
        pipeline do, on the one on which it runs most often.
      seconds: the estimated time of one execution.
      value: shape and dtype of what is moved.
      where: the user's source line.
      why: what needs it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    seconds: float
    value: str
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program.

    Args:
      name: the primitive.
      where: the user's source line.
      count: how often it runs, loops multiplied out.
      operands: type and placements of each operand.
      results: type and placements of each result.
      rule: the rule in einsum notation, or why there is none.
    """

    name: str
    where: str
    count: int
    operands: tuple[str, ...]
    results: tuple[str, ...]
    rule: str


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What a partitioned program does: layouts, collectives, bytes, memory.

    `print(plan)` shows its collectives, largest first; in Jupyter it is a table. Times and memory
    are estimates by the device model; kinds, axes and bytes are those of the compiled program.

    Args:
      planned: the program with its layouts.
      mesh: the mesh, whose devices need not be there.
      names: what the inputs are called, by position.
      model: the rates of the device.
      donated: the positions of inputs whose memory may be reused.
    """

    planned: PlannedProgram
    mesh: ProcessMesh
    names: tuple[str, ...]
    model: DeviceModel
    donated: tuple[int, ...] = ()

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, in the order of the program."""
        return tuple(self._collectives(self.planned, 1))

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Every operation, in the order of the program, those in bodies of loops included."""
        return tuple(self._operations(self.planned, 1))

    @cached_property
    def replicated(self) -> tuple[Operation, ...]:
        """The operations that every device computes whole because they have no rule."""
        return tuple(op for op in self.operations if op.rule.startswith("no rule"))

    def counts(self) -> dict[str, int]:
        """Kind -> number of executions."""
        out: Counter[str] = Counter()
        for collective in self.collectives:
            out[collective.kind] += collective.count
        return dict(out)

    def totals(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """(Kind, mesh axes) -> (number of executions, bytes that each device sends)."""
        out: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
        for c in self.collectives:
            count, sent = out.get((c.kind, c.axes), (0, 0))
            out[c.kind, c.axes] = (count + c.count, sent + c.count * c.bytes)
        return out

    @property
    def bytes(self) -> int:
        """What each device sends in one run."""
        return sum(c.count * c.bytes for c in self.collectives)

    @property
    def seconds(self) -> float:
        """The estimated time of all collectives, none of it overlapped."""
        return sum(c.count * c.seconds for c in self.collectives)

    @cached_property
    def peak_bytes(self) -> int:
        """The estimated peak memory per device: inputs, outputs and what is alive between them."""
        return peak_bytes(self.planned, self.donated)

    @property
    def title(self) -> str:
        """The plan in one line."""
        return (
            f"{len(self.collectives)} collectives, {_size(self.bytes)} sent per device, "
            f"about {self.seconds * 1e3:.3g} ms without overlap; "
            f"about {_size(self.peak_bytes)} of memory per device; on {self.mesh!s}"
        )

    def table(self, top: int = 20) -> Table:
        """The largest collectives as a rich table."""
        table = Table(title=self.title, title_justify="left")
        for column in ("sent", "times", "kind", "axes", "value", "where", "why"):
            table.add_column(column)
        rows = sorted(self.collectives, key=lambda c: -c.bytes * c.count)
        for c in rows[:top]:
            sent = _size(c.bytes * c.count)
            axes = ", ".join(c.axes)
            table.add_row(sent, str(c.count), c.kind, axes, c.value, c.where, c.why)
        if len(rows) > top:
            rest = sum(c.bytes * c.count for c in rows[top:])
            table.add_row(_size(rest), "", f"{len(rows) - top} more", "", "", "", "")
        for op in self.replicated:
            table.add_row("", str(op.count), op.name, "", op.results[0], op.where, op.rule)
        return table

    def __repr__(self) -> str:
        console = Console(width=140, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get().rstrip()

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{c}</th>" for c in ("sent", "times", "kind", "axes", "value", "where"))
        rows = sorted(self.collectives, key=lambda c: -c.bytes * c.count)[:20]
        body = "".join(
            f'<tr title="{html.escape(c.why)}"><td>{_size(c.bytes * c.count)}</td>'
            f"<td>{c.count}</td><td>{c.kind}</td><td>{html.escape(', '.join(c.axes))}</td>"
            f"<td>{html.escape(c.value)}</td><td>{html.escape(c.where)}</td></tr>"
            for c in rows
        )
        title = html.escape(self.title)
        return f"<table><caption>{title}</caption><tr>{head}</tr>{body}</table>"

    def to_json(self) -> str:
        """The plan as JSON: mesh, totals, inputs, outputs, operations and collectives."""
        names = dict(zip(self.names, map(self._placed, self.planned.inputs), strict=True))
        return json.dumps(
            {
                "mesh": dict(self.mesh.axis_sizes),
                "bytes": self.bytes,
                "seconds": self.seconds,
                "peak_bytes": self.peak_bytes,
                "inputs": names,
                "outputs": [self._placed(layout) for layout in self.planned.outputs],
                "collectives": [asdict(c) for c in self.collectives],
                "operations": [asdict(op) for op in self.operations],
            },
            indent=1,
        )

    def why(self, name: str) -> str:
        """The chain of reasons behind a value's placement, from the value back to what was given.

        Args:
          name: an input as in `names`, such as "params/w1"; "params/w1.grad" for its gradient; or
            "out/0" for the first output.

        Raises:
          KeyError: no value has that name.
        """
        positions = {name: i for i, name in enumerate(self.names)}
        return reasons(self.planned, self.mesh, positions, name, self.model)

    def diff(self, other: Plan) -> str:
        """What another plan sends more (+) or less (-) than this one, by kind and axes."""
        mine, theirs = self.totals(), other.totals()
        lines: list[str] = []
        for key in sorted({*mine, *theirs}):
            (count, sent), (new_count, new_sent) = mine.get(key, (0, 0)), theirs.get(key, (0, 0))
            if (count, sent) != (new_count, new_sent):
                lines.append(
                    f"{key[0]} over {', '.join(key[1])}: {new_count - count:+d} times, "
                    f"{new_sent - sent:+d} bytes"
                )
        return "\n".join(lines) or "the same collectives"

    def _placed(self, layout: Layout) -> str:
        return str(layout.placements(self.mesh))

    def _operations(self, planned: PlannedProgram, count: int) -> Iterator[Operation]:
        aval = planned.program.aval
        for node in planned.nodes:
            yield Operation(
                node.node.name,
                node.node.where,
                count,
                tuple(
                    f"{_type(aval(ref))} {self._placed(layout)}"
                    for ref, layout in zip(node.node.ins, node.operands, strict=True)
                ),
                tuple(
                    f"{_type(aval(ref))} {self._placed(layout)}"
                    for ref, layout in zip(node.node.outs, node.results, strict=True)
                ),
                node.rule.notation() if node.rule is not None else node.why,
            )
            for body in node.bodies:
                turns = math.ceil(count * turns_of(node.node.eqn))
                yield from self._operations(body, turns)

    def _collectives(self, planned: PlannedProgram, count: int) -> Iterator[Collective]:
        used = planned.program.used()
        makers = {value: node.node for node in planned.nodes for value in node.node.outs}
        for node in planned.nodes:
            name, where = node.node.name, node.node.where
            taker = "the annotation" if node.why == "annotation" else name
            yield from self._moves(planned, makers, node.moves, count, f"before {taker}", where)
            for kind, axes, sent, times in emitted_collectives(planned, node, used):
                seconds = self.model.collective_seconds(sent)
                value = _type(planned.program.avals[node.node.outs[0]])
                inside = f"inside {name}"
                yield Collective(kind, axes, sent, count * times, seconds, value, where, inside)
            for body in node.bodies:
                turns = math.ceil(count * turns_of(node.node.eqn))
                yield from self._collectives(body, turns)
        yield from self._moves(planned, makers, planned.moves, count, "for the output", "")

    def _moves(
        self,
        planned: PlannedProgram,
        makers: Mapping[int, Node],
        moves: Sequence[Move],
        count: int,
        reason: str,
        where: str,
    ) -> Iterator[Collective]:
        for together in in_buckets(moves):
            if len(together) > 1:
                yield self._bucket(planned, together, count, reason, where)
                continue
            (move,) = together
            aval = planned.program.aval(move.value)
            src, dst = self._placed(move.src), self._placed(move.dst)
            maker = makers.get(move.value)
            made = self._origin(planned, maker, move.value)
            for step in planned.steps(move):
                if step.is_collective:
                    yield Collective(
                        step.kind,
                        step.axes,
                        step.bytes,
                        count,
                        self.model.collective_seconds(step.bytes),
                        _type(aval),
                        where or (maker.where if maker else ""),
                        f"{src} -> {dst} {reason}; {made}",
                    )

    def _origin(self, planned: PlannedProgram, maker: Node | None, value: int) -> str:
        """What made a value, in a few words."""
        if maker is not None:
            return f"made by {maker.name}" + (f" at {maker.where}" if maker.where else "")
        if planned is self.planned and value in planned.program.inputs:
            return f"the argument {self.names[planned.program.inputs.index(value)]}"
        return "given"

    def _bucket(
        self, planned: PlannedProgram, moves: Sequence[Move], count: int, reason: str, where: str
    ) -> Collective:
        avals = [planned.program.aval(move.value) for move in moves]
        steps = [planned.steps(move)[0] for move in moves]
        sent = bucket_bytes(
            steps, [tuple(a.shape) for a in avals], avals[0].dtype.itemsize, planned.sizes
        )
        return Collective(
            steps[0].kind,
            steps[0].axes,
            sent,
            count,
            self.model.collective_seconds(sent),
            f"{len(moves)} small {avals[0].dtype} values",
            where,
            f"together, the first of them {reason}",
        )


def _type(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("the loop returns at its last unit")
