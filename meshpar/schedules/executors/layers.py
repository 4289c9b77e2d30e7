"""Finds the equal layers of a traced model, between what comes before and after them.

Unrolled layers are a run of equal pieces between places where one value alone goes on; scanned
layers are the turns of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.compiler.program import Constant, Node, Program
from meshpar.errors import MeshparError
from meshpar.placements.annotate import PRIMITIVE
from meshpar.schedules.executors.evaluate import depending_on, values_of
from meshpar.schedules.executors.loops import is_loop

__all__ = ["LayerError", "Layers", "cuts", "find_layers"]


class LayerError(MeshparError):
    """A model in which no run of equal layers was found."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a program.

    Args:
      body: one layer: (x, own values, shared values) -> x.
      x: what goes into the first.
      out: what comes out of the last.
      own: for each layer its own values, such as parameters and random state; a single entry of
        stacked values where the layers are the turns of a loop.
      shared: the values that all take.
      count: how many layers there are.
      last: the position of the last operation that belongs to them.
    """

    body: Program
    x: int
    out: int
    own: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    count: int
    last: int

    @property
    def stacked(self) -> bool:
        """Whether the layers are the turns of a loop."""
        return len(self.own) == 1 and self.count > 1


def find_layers(
    program: Program, params: Collection[int], batch: Collection[int], least: int
) -> Layers:
    """The longest run of equal layers.

    Args:
      program: the forward pass of a model, to its loss or its outputs.
      params: the inputs that are trained.
      batch: the inputs that are the batch.
      least: how many layers there must be.

    Raises:
      LayerError: there are fewer.
    """
    known = _Known(depending_on(program, params), depending_on(program, batch))
    found = _scanned(program, known.active) or _unrolled(program, known, batch)
    if found is None or found.count < least:
        many = "no run of equal layers" if found is None else f"{found.count} equal layers"
        raise LayerError(
            f"there are fewer layers than stages: {many} for {least} stages.",
            because="a stage is one or more of a run of layers of the same form, each of which "
            "passes one array on to the next",
            instead=f'{least} layers, or ProcessMesh(range({found.count}), ["pp"])'
            if found
            else "layers that are calls of one module class on one array, x = layer(x)",
        )
    return found


@dataclass(frozen=True, slots=True)
class _Known:
    """What values depend on."""

    params: set[int]
    batch: set[int]

    @property
    def active(self) -> set[int]:
        return self.params & self.batch


# --- scanned --------------------------------------------------------------------------------------


def _scanned(program: Program, active: set[int]) -> Layers | None:
    best: Layers | None = None
    for position, node in enumerate(program.nodes):
        if is_loop(node) and not active.isdisjoint(node.outs):
            found = _loop(node, position, active)
            if found is not None and (best is None or found.count > best.count):
                best = found
    return best


def _loop(node: Node, position: int, active: set[int]) -> Layers | None:
    assert node.bodies is not None, "a loop has a body"
    body, (consts,), carried = node.bodies.bodies[0], node.bodies.consts, node.bodies.carry
    carry = range(consts, consts + carried)
    moving = [p for p in carry if node.outs[p - consts] in active]
    fixed = [p for p, ref in enumerate(node.ins) if p not in moving]
    if len(moving) != 1 or node.params["reverse"] or carried != 1:
        return None
    (at,) = moving
    refs = [node.ins[p] for p in fixed]
    values = {p: ref for p, ref in enumerate(node.ins) if not isinstance(ref, Constant)}
    if len(values) < len(node.ins) or any(ref in active for ref in refs):
        return None
    own, shared = [p for p in fixed if p > at], [p for p in fixed if p < at]
    inputs = tuple(body.inputs[p] for p in (at, *own, *shared))
    one = Program(body.avals, inputs, body.constants, body.nodes, (body.outputs[at - consts],))
    stacks, ones = tuple(values[p] for p in own), tuple(values[p] for p in shared)
    out, length = node.outs[at - consts], node.params["length"]
    return Layers(one, values[at], out, (stacks,), ones, length, position)


# --- unrolled -------------------------------------------------------------------------------------


def _unrolled(program: Program, known: _Known, batch: Collection[int]) -> Layers | None:
    # The first layer may begin with an array of the batch, while that has no other use.
    starts = [None, *(v for v in batch if jnp.issubdtype(program.avals[v].dtype, jnp.floating))]
    runs = [_longest_run(program, known, cuts(program, known.active, v)) for v in starts]
    _, layers = max(runs, key=lambda run: run[0])
    if not layers:
        return None
    first = layers[0]
    # What all layers take alike, such as tables of positions, need not be stacked.
    alike = [
        len(set(row)) == 1 and row[0] not in known.params
        for row in zip(*(layer.own for layer in layers), strict=True)
    ]
    shared = (*(v for v, same in zip(first.own, alike, strict=True) if same), *first.shared)
    own = tuple(
        tuple(v for v, same in zip(layer.own, alike, strict=True) if not same) for layer in layers
    )
    nodes, numbers = _with_numbers(program, [layer.nodes for layer in layers])
    own = tuple((*mine, *more) for mine, more in zip(own, numbers, strict=True))
    inputs = (first.x, *own[0], *shared)
    body = Program(program.avals, inputs, program.constants, nodes, (first.out,))
    last = layers[-1]
    return Layers(body, first.x, last.out, own, shared, len(layers), last.end - 1)


def _with_numbers(
    program: Program, layers: Sequence[Sequence[Node]]
) -> tuple[list[Node], list[tuple[int, ...]]]:
    """The first layer's operations, and the numbers in which the layers differ, as own values.

    Random keys are folded with numbers made of the names of modules (flax linen).
    """
    nodes, own = [], [list[int]() for _ in layers]
    for alike in zip(*layers, strict=True):
        ins = list(alike[0].ins)
        for k, refs in enumerate(zip(*(node.ins for node in alike), strict=True)):
            constants = [ref for ref in refs if isinstance(ref, Constant)]
            if len({_constant(ref.value) for ref in constants}) < 2:
                continue
            new = [program.new(ref.aval) for ref in constants]
            program.constants.update(zip(new, (ref.value for ref in constants), strict=True))
            ins[k] = new[0]
            for mine, value in zip(own, new, strict=True):
                mine.append(value)
        nodes.append(replace(alike[0], ins=tuple(ins)))
    return nodes, [tuple(mine) for mine in own]


def _longest_run(
    program: Program, known: _Known, places: list[tuple[int, int]]
) -> tuple[int, list[_Piece]]:
    """The run of equal layers with the most operations between some places, and their number."""
    pieces = [_Piece(program, known, lo, hi) for lo, hi in pairwise(places)]
    names: dict[Hashable, int] = {}
    kinds = [names.setdefault(piece.form, len(names)) for piece in pieces]
    best: tuple[int, int, int, int] | None = None  # operations, -period, start, count
    for start in range(len(kinds)):
        for period in range(1, (len(kinds) - start) // 2 + 1):
            count = 1
            while (
                kinds[start : start + period]
                == kinds[start + count * period : start + (count + 1) * period]
            ):
                count += 1
            if count > 1:
                size = places[start + count * period][0] - places[start][0]
                best = max(best or (0, 0, 0, 0), (size, -period, start, count))
    if best is None:
        return 0, []
    size, minus, start, count = best
    bounds = [places[start - minus * k] for k in range(count + 1)]
    layers = [_Piece(program, known, lo, hi) for lo, hi in pairwise(bounds)]
    return (size, layers) if len({layer.form for layer in layers}) == 1 else (0, [])


def cuts(program: Program, active: set[int], start: int | None = None) -> list[tuple[int, int]]:
    """The places where one active value alone goes on: (position of the next operation, value).

    Args:
      program: the program.
      active: the active values.
      start: an input that counts as one of them, with a place at the very beginning.
    """
    last_use: dict[int, int] = {}
    for position, node in enumerate(program.nodes):
        last_use.update(dict.fromkeys(values_of(node.ins), position))
    last_use.update(dict.fromkeys(values_of(program.outputs), len(program.nodes)))
    out, live = ([], set[int]()) if start is None else ([(0, start)], {start})
    for position, node in enumerate(program.nodes):
        live = {value for value in live if last_use.get(value, -1) > position}
        live |= {v for v in node.outs if v in active and last_use.get(v, -1) > position}
        if len(live) == 1 and (not out or out[-1][1] not in live):
            out.append((position + 1, next(iter(live))))
    return out


class _Piece:
    """The operations between two cuts; pieces of equal form compute the same.

    Args:
      program: the whole program.
      known: what values depend on.
      begin: the first cut.
      end: the second.
    """

    def __init__(
        self, program: Program, known: _Known, begin: tuple[int, int], end: tuple[int, int]
    ) -> None:
        self.x, self.out, self.end = begin[1], end[1], end[0]
        needed, nodes = {self.out}, list[Node]()
        # Operations that others need, such as the next random state, are not the layer's; what an
        # earlier one makes of parameters alone is.
        for position in reversed(range(end[0])):
            node = program.nodes[position]
            early = position < begin[0]
            mine = not early or known.params - known.batch >= set(node.outs)
            if mine and not needed.isdisjoint(node.outs):
                nodes.append(node)
                needed |= values_of(node.ins)
        self.nodes = nodes[::-1]
        made = {value for node in self.nodes for value in node.outs}
        outside = dict.fromkeys(
            ref
            for node in self.nodes
            for ref in node.ins
            if not isinstance(ref, Constant) and ref not in made and ref != self.x
        )
        constants = program.constants
        self.own = tuple(v for v in outside if v not in known.batch and v not in constants)
        self.shared = tuple(v for v in outside if v in known.batch)
        aval = program.avals[self.x]
        numbers: dict[int, Hashable] = {self.x: ("x", aval.shape, aval.dtype)}
        for k, value in enumerate(self.own):
            numbers[value] = ("own", k, program.avals[value].shape, program.avals[value].dtype)
        numbers |= {value: ("shared", value) for value in self.shared}
        numbers |= {v: _constant(constants[v]) for v in outside if v in constants}
        form: list[Hashable] = []
        for node in self.nodes:
            form.append(_form(node, numbers, number=_number))
            numbers |= {value: ("made", len(numbers), k) for k, value in enumerate(node.outs)}
        self.form = (tuple(form), numbers[self.out])


def _number(value: Any) -> Hashable:
    """A constant, of which layers may have different ones if it is one integer."""
    array = np.asarray(value)
    whole = array.ndim == 0 and array.dtype.kind in "iu"
    return ("number", str(array.dtype)) if whole else _constant(value)


def _form(
    node: Node, numbers: dict[int, Hashable], number: Callable[[Any], Hashable] | None = None
) -> Hashable:
    constant = number or _constant
    ins = tuple(
        constant(ref.value) if isinstance(ref, Constant) else numbers[ref] for ref in node.ins
    )
    outs = tuple((var.aval.shape, str(var.aval.dtype)) for var in node.eqn.outvars)
    if node.bodies is None:
        return node.name, _params(node), ins, outs
    return node.name, tuple(map(_body_form, node.bodies.bodies)), ins, outs


def _params(node: Node) -> Hashable:
    if node.name == PRIMITIVE:  # on whatever rank: the axes within a rank are the same on all
        asked = (node.params[name] for name in ("source", "layout", "priority"))
        return tuple(node.params["mesh"].axis_sizes.items()), *asked
    return node.key[2] if isinstance(node.key, tuple) else str(node.params)


def _body_form(program: Program) -> Hashable:
    numbers: dict[int, Hashable] = {v: ("in", k) for k, v in enumerate(program.inputs)}
    numbers |= {v: _constant(x) for v, x in program.constants.items()}
    form: list[Hashable] = []
    for node in program.nodes:
        form.append(_form(node, numbers))
        numbers |= {value: ("made", len(numbers), k) for k, value in enumerate(node.outs)}
    outs = tuple(
        _constant(r.value) if isinstance(r, Constant) else numbers[r] for r in program.outputs
    )
    return tuple(form), outs


def _constant(value: Any) -> Hashable:
    array = np.asarray(value)
    return ("constant", array.shape, str(array.dtype), array.tobytes())
