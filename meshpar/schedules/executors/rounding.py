"""Sums over microbatches of what is rounded to a narrower float type.

Where a result is a sum over devices that is rounded then, plans reduce first. Over microbatches,
which are computed one after the other, nothing can be reduced before the last: each one's term is
rounded, as it is in every pipeline of narrow parameters. Their sum is of float32 all the same
(`PipelineStep.sums`), and rounded once.
"""

from __future__ import annotations

from dataclasses import replace

import jax.extend.core as jex_core
import jax.numpy as jnp

from meshpar.compiler.program import Constant, Node, Program
from meshpar.rules.elementwise import elementwise
from meshpar.rules.registry import rule_for
from meshpar.rules.rule import SUM_LIKE, Aval, Pass, Rule

__all__ = ["rounded_by_term"]

# What a rounding is called where it is done term by term. Plans know operations by their names;
# what runs is the operation itself.
_ROUNDED = jex_core.Primitive("round_terms")


@rule_for(_ROUNDED.name)
def _round_terms(x: Aval, **_: object) -> Rule:
    """`ij->ij`, of pending sums too."""
    return elementwise(x, passes=(Pass(SUM_LIKE, (0,)),))


def rounded_by_term(program: Program) -> Program:
    """The program, in which pending sums stay pending when they are rounded; also in loops.

    One that rounds nothing is returned as it is.
    """
    nodes = [_named(node, program) for node in program.nodes]
    same = all(new is old for new, old in zip(nodes, program.nodes, strict=True))
    return program if same else replace(program, nodes=nodes)


def _named(node: Node, program: Program) -> Node:
    if node.bodies is not None:
        bodies = node.bodies.map(rounded_by_term)
        pairs = zip(bodies.bodies, node.bodies.bodies, strict=True)
        return node if all(new is old for new, old in pairs) else replace(node, bodies=bodies)
    if node.name != "convert_element_type" or isinstance(node.ins[0], Constant):
        return node
    old, new = program.avals[node.ins[0]].dtype, node.params["new_dtype"]
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return node
    narrower = jnp.finfo(new).nmant < jnp.finfo(old).nmant
    return replace(node, primitive=_ROUNDED, key=None) if narrower else node
