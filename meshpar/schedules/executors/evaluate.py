"""Programs as values: run as they are, sliced, and with their calls spliced in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from meshpar._jax import bind_at
from meshpar.compiler.program import Constant, Node, Program, Ref

__all__ = [
    "depending_on",
    "named",
    "run_program",
    "sliced",
    "splice",
    "values_of",
    "without_calls",
]


def run_program(program: Program, *args: Any) -> list[Any]:
    """Runs a program on values, all of it on one device.

    Args:
      program: what runs.
      *args: one value for each of its inputs.
    """
    env: dict[int, Any] = dict(program.constants)
    env.update(zip(program.inputs, args, strict=True))

    def read(ref: Ref) -> Any:
        return ref.value if isinstance(ref, Constant) else env[ref]

    for node in program.nodes:
        outs = bind_at(node.eqn, *map(read, node.ins))
        env.update(zip(node.outs, outs, strict=True))
    return [
        jnp.asarray(ref.value, ref.aval.dtype) if isinstance(ref, Constant) else env[ref]
        for ref in program.outputs
    ]


def values_of(refs: Iterable[Ref]) -> set[int]:
    """The numbers of the values among operands."""
    return {ref for ref in refs if not isinstance(ref, Constant)}


def depending_on(program: Program, inputs: Collection[int]) -> set[int]:
    """The values that are computed from some of a program's inputs, these included."""
    tainted = set(inputs)
    for node in program.nodes:
        touched = [p for p, ref in enumerate(node.ins) if _is_one_of(ref, tainted)]
        if touched and node.bodies is not None and node.bodies.kind == "scan":
            tainted |= {node.outs[k] for k in _of_loop(node, touched)}
        elif touched:
            tainted.update(node.outs)
    return tainted


def _is_one_of(ref: Ref, values: Collection[int]) -> bool:
    return not isinstance(ref, Constant) and ref in values


def _of_loop(node: Node, touched: Sequence[int]) -> set[int]:
    """The positions of a loop's results that depend on operands at some positions."""
    assert node.bodies is not None, "a loop has a body"
    body, (consts,), carried = node.bodies.bodies[0], node.bodies.consts, node.bodies.carry
    at = set(touched)
    while True:
        inside = depending_on(body, [body.inputs[p] for p in at])
        outs = {k for k, ref in enumerate(body.outputs) if _is_one_of(ref, inside)}
        more = {consts + k for k in outs if k < carried} - at
        if not more:
            return outs | {p - consts for p in at if consts <= p < consts + carried}
        at |= more


def sliced(program: Program, inputs: Sequence[int], outputs: Sequence[Ref]) -> Program:
    """What of a program makes some of its values from some of its inputs."""
    needed = values_of(outputs)
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if not needed.isdisjoint(node.outs):
            kept.append(node)
            needed |= values_of(node.ins)
    return Program(program.avals, tuple(inputs), program.constants, kept[::-1], tuple(outputs))


def without_calls(program: Program) -> Program:
    """The same program with `jax.checkpoint` spliced in, also inside loops.

    What is to be computed again then is part of the program, and can be split like the rest.
    """
    out = Program(list(program.avals), program.inputs, dict(program.constants))
    names: dict[int, Ref] = {}
    _append(out, program.nodes, names)
    out.outputs = tuple(named(ref, names) for ref in program.outputs)
    return out


def splice(program: Program, inner: Program, operands: Sequence[Ref]) -> tuple[Ref, ...]:
    """Appends the operations of another program to one.

    Args:
      program: gets them, in place.
      inner: the other, with numbers of its own.
      operands: what its inputs are here.

    Returns:
      What its outputs are here.
    """
    names: dict[int, Ref] = dict(zip(inner.inputs, operands, strict=True))
    for number, value in inner.constants.items():
        names[number] = new = program.new(inner.avals[number])
        program.constants[new] = value
    _append(program, inner.nodes, names, inner)
    return tuple(named(ref, names) for ref in inner.outputs)


def _append(
    out: Program, nodes: Sequence[Node], names: dict[int, Ref], inner: Program | None = None
) -> None:
    """Appends operations; those of another program get new numbers."""
    for node in nodes:
        ins = tuple(named(ref, names) for ref in node.ins)
        if node.bodies is not None and node.bodies.kind == "call":
            results = splice(out, node.bodies.bodies[0], ins)
            names.update(zip(node.outs, results, strict=True))
            continue
        outs = node.outs
        if inner is not None:
            outs = tuple(out.new(inner.avals[value]) for value in node.outs)
            names.update(zip(node.outs, outs, strict=True))
        bodies = None if node.bodies is None else node.bodies.map(without_calls)
        out.nodes.append(replace(node, ins=ins, outs=outs, bodies=bodies))


def named(ref: Ref, names: Mapping[int, Ref]) -> Ref:
    """An operand under its new number, where it has one."""
    return ref if isinstance(ref, Constant) else names.get(ref, ref)
