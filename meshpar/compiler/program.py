"""`Program`: a traced function as a flat list of operations on numbered values."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.extend.core as jex_core

from meshpar._jax import (
    SubJaxprs,
    closed,
    inlined_call,
    is_backward,
    source_line,
    sub_jaxprs,
)
from meshpar.compiler.transposed_products import transposed_products

__all__ = ["Constant", "Node", "Program", "Ref", "program_of"]


class Constant(NamedTuple):
    """An operand that is a literal of the jaxpr."""

    value: Any  # a numpy scalar or array
    aval: Any


Ref = int | Constant
"""An operand: a value's number, or a literal."""


@dataclass(slots=True)
class Node:
    """One operation.

    Args:
      primitive: the JAX primitive.
      params: its parameters.
      ins: operands.
      outs: the numbers of the results.
      eqn: the equation it comes from, for name stack and source line.
      bodies: the programs of the functions that it calls, for control flow.
      key: equal for operations that a rule cannot tell apart; `None` where that is not known.
      called_at: the user's line of the call that it was spliced in from, if it was.
    """

    primitive: Any  # jax.extend.core.Primitive
    params: dict[str, Any]
    ins: tuple[Ref, ...]
    outs: tuple[int, ...]
    eqn: Any  # jax.extend.core.JaxprEqn
    bodies: SubJaxprs[Program] | None = None
    key: Hashable = None
    called_at: str = ""

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass of `jax.grad`."""
        return is_backward(self.eqn)

    @property
    def where(self) -> str:
        """The user's line, as `file.py:41`."""
        return source_line(self.eqn) or self.called_at  # what JAX itself jits has no line inside


@dataclass(slots=True)
class Program:
    """A function as operations on values that are numbered from 0.

    Args:
      avals: shape and dtype of each value.
      inputs: the numbers of the arguments.
      constants: the numbers of captured arrays, and these.
      nodes: the operations, in order.
      outputs: what it returns.
    """

    avals: list[Any] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: tuple[Ref, ...] = ()

    def aval(self, ref: Ref) -> Any:
        """Shape and dtype of an operand."""
        return ref.aval if isinstance(ref, Constant) else self.avals[ref]

    def used(self) -> frozenset[int]:
        """The numbers of the values that an operation or the caller takes."""
        refs = itertools.chain(self.outputs, *(node.ins for node in self.nodes))
        return frozenset(ref for ref in refs if not isinstance(ref, Constant))

    def new(self, aval: Any) -> int:
        """The number of a new value."""
        self.avals.append(aval)
        return len(self.avals) - 1


def program_of(jaxpr: Any) -> Program:
    """The program of a closed jaxpr: calls are spliced in, control flow keeps its bodies."""
    program = Program()
    jaxpr, consts = closed(jaxpr)
    env: dict[Any, Ref] = {}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = number = program.new(var.aval)
        program.constants[number] = const
    program.inputs = tuple(program.new(var.aval) for var in jaxpr.invars)
    env.update(zip(jaxpr.invars, program.inputs, strict=True))
    program.outputs = _splice(program, jaxpr, env)
    _drop_dead(program)
    return program


def _drop_dead(program: Program) -> None:
    """Drops operations whose results nobody takes, as JAX does when it traces the local program."""
    needed = {ref for ref in program.outputs if not isinstance(ref, Constant)}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if node.eqn.effects or not needed.isdisjoint(node.outs):
            kept.append(node)
            needed.update(ref for ref in node.ins if not isinstance(ref, Constant))
    program.nodes = kept[::-1]


def _splice(
    program: Program, jaxpr: Any, env: dict[Any, Ref], called_at: str = ""
) -> tuple[Ref, ...]:
    def read(atom: Any) -> Ref:
        if isinstance(atom, jex_core.Literal):
            return Constant(atom.val, atom.aval)
        return env[atom]

    for eqn in transposed_products(jaxpr):
        call = inlined_call(eqn)
        if call is not None:
            inner, consts = closed(call[0])
            scope: dict[Any, Ref] = {}
            for var, const in zip(inner.constvars, consts, strict=True):
                scope[var] = number = program.new(var.aval)
                program.constants[number] = const
            scope.update(zip(inner.invars, map(read, call[1]), strict=True))
            line = source_line(eqn) or called_at
            env.update(zip(eqn.outvars, _splice(program, inner, scope, line), strict=True))
            continue
        ins = tuple(read(atom) for atom in eqn.invars)
        bodies = sub_jaxprs(eqn)
        outs = tuple(program.new(var.aval) for var in eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
        programs = None if bodies is None else bodies.map(program_of)
        key = None if bodies is not None else _key(eqn)
        program.nodes.append(
            Node(eqn.primitive, eqn.params, ins, outs, eqn, programs, key, called_at)
        )
    return tuple(read(atom) for atom in jaxpr.outvars)


def _key(eqn: Any) -> Hashable:
    key = (
        eqn.primitive.name,
        tuple((atom.aval.shape, atom.aval.dtype) for atom in eqn.invars),
        tuple(eqn.params.items()),
    )
    try:
        hash(key)
    except TypeError:  # a parameter that holds a list or an array
        return None
    return key
