"""`mp.explain`: a program's communication beside XLA's and beside a lower bound."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from meshpar.compiler.hlo import collectives_in_hlo, sent_bytes, touched_axes
from meshpar.compiler.jit import Jitted, jit
from meshpar.compiler.plan import Plan
from meshpar.compiler.planned import PlannedProgram
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import local_shape
from meshpar.placements.layout import Layout

__all__ = ["Explanation", "explain"]

Totals = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""(Kind, mesh axes) -> (number, bytes that each device sends)."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Communication of one function in three columns.

    Args:
      plan: what meshpar does; loops are multiplied out.
      xla: what XLA's partitioner made of the same placements; a loop's body counts once.
      lower_bound: bytes that some device must be sent; see `explain`.
    """

    plan: Plan
    xla: Totals
    lower_bound: int

    def rows(self) -> list[tuple[str, str, tuple[int, int], tuple[int, int]]]:
        """Kind, axes, meshpar's (number, bytes), XLA's (number, bytes)."""
        order = self.plan.mesh.axis_names
        mine: Counter[tuple[str, tuple[str, ...]]] = Counter()
        numbers: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for (kind, axes), (number, sent) in self.plan.totals().items():
            key = (kind, tuple(sorted(axes, key=order.index)))
            numbers[key] += number
            mine[key] += sent
        keys = sorted({*mine, *self.xla})
        return [
            (
                key[0],
                ", ".join(key[1]),
                (numbers[key], mine[key]),
                self.xla.get(key, (0, 0)),
            )
            for key in keys
        ]

    def table(self) -> Table:
        """The comparison as a rich table."""
        table = Table(title=f"at least {self.lower_bound:,} bytes must be sent to some device")
        for column in ("kind", "axes", "meshpar", "bytes", "XLA", "bytes"):
            table.add_column(column, justify="left" if column in ("kind", "axes") else "right")
        for kind, axes, (count, sent), (other_count, other_sent) in self.rows():
            table.add_row(kind, axes, str(count), f"{sent:,}", str(other_count), f"{other_sent:,}")
        total, other = self.plan.bytes, sum(sent for _, sent in self.xla.values())
        table.add_row("total", "", "", f"{total:,}", "", f"{other:,}")
        return table

    def __repr__(self) -> str:
        console = Console(width=110, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get().rstrip()

    def _repr_html_(self) -> str:
        head = "".join(
            f"<th>{c}</th>" for c in ("kind", "axes", "meshpar", "bytes", "XLA", "bytes")
        )
        body = "".join(
            f"<tr><td>{kind}</td><td>{html.escape(axes)}</td><td>{a}</td><td>{b:,}</td>"
            f"<td>{c}</td><td>{d:,}</td></tr>"
            for kind, axes, (a, b), (c, d) in self.rows()
        )
        title = f"at least {self.lower_bound:,} bytes must be sent to some device"
        return f"<table><caption>{title}</caption><tr>{head}</tr>{body}</table>"


def explain(
    fn: Callable[..., Any], *args: Any, mesh: ProcessMesh | None = None, **kwargs: Any
) -> Explanation:
    """Compares what meshpar plans, what XLA's partitioner would do, and a lower bound.

    XLA's column is read from the program that it compiles for the same placements of arguments, and
    of results where these are asked for. The lower bound takes it that each element of an output
    depends on all of the arguments behind it. A device whose block does so must be sent as many
    bytes as the block has, or as the parts that it does not hold have if they are fewer. The bound
    is the largest over the outputs, since the same bytes may serve several.

    Args:
      fn: a function, or what `mp.jit` made of one.
      *args: its arguments, placed on devices that are there.
      mesh: the mesh; without it that of the arguments, else the default one.
      **kwargs: keyword arguments.

    Example:
      >>> import meshpar as mp
      >>> x = mp.shard_tensor(np.ones((4, 2)), mp.ProcessMesh([0], ["dp"]), [mp.Shard(0)])
      >>> mp.explain(lambda x: x.sum(), x).lower_bound
      0
    """
    partitioned = fn if isinstance(fn, Jitted) else jit(fn, mesh=mesh)
    plan = partitioned.plan(*args, **kwargs)
    text = partitioned.with_partitioner("xla").lower(*args, **kwargs).compile().as_text()
    xla: Counter[tuple[str, tuple[str, ...]]] = Counter()
    numbers: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for kind, found in collectives_in_hlo(text).items():
        for one in found:
            name = "ppermute" if kind == "collective_permute" else kind
            key = (name, touched_axes(one.groups, plan.mesh))
            numbers[key] += 1
            xla[key] += sent_bytes(kind, one, plan.mesh.size)
    return Explanation(plan, {k: (numbers[k], xla[k]) for k in xla}, _lower_bound(plan.planned))


def _lower_bound(planned: PlannedProgram) -> int:
    """The largest, over outputs, of what a device must be sent for its block of that output."""
    program, sizes = planned.program, planned.sizes
    behind: dict[int, frozenset[int]] = {v: frozenset({v}) for v in program.inputs}
    for node in planned.nodes:
        needs = frozenset[int]().union(
            *(behind.get(ref, frozenset()) for ref in node.node.ins if isinstance(ref, int))
        )
        behind.update(dict.fromkeys(node.node.outs, needs))
    layouts = dict(zip(program.inputs, planned.inputs, strict=True))

    def held(value: int, layout: Layout) -> int:
        aval = program.avals[value]
        return _bytes(aval, local_shape(aval.shape, layout, sizes))

    def missing(value: int) -> int:
        mine = held(value, layouts[value])
        if layouts[value].partial:
            return mine  # the others' contributions, reduced
        return _bytes(program.avals[value], program.avals[value].shape) - mine

    bound = 0
    for ref, layout in zip(program.outputs, planned.outputs, strict=True):
        if not isinstance(ref, int) or layout.partial:
            continue
        needs = behind.get(ref, frozenset())
        cut = {a for v in needs for a in (*layouts[v].shard_axes, *layouts[v].partial_axes)}
        # Along an axis that cuts arguments and not the output, devices need what others hold.
        if any(sizes[axis] > 1 for axis in cut - {*layout.shard_axes}):
            bound = max(bound, min(held(ref, layout), sum(map(missing, needs))))
    return bound


def _bytes(aval: Any, shape: tuple[int, ...]) -> int:
    item = np.dtype(aval.dtype).itemsize if isinstance(aval.dtype, np.dtype) else 8
    return math.prod(shape) * item
