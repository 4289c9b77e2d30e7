"""The collectives inside an operation's own local program, found by tracing it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from meshpar._jax import closed, sub_jaxprs, without_dead_code
from meshpar.compiler.partition import run_node
from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.placements.blocks import local_shape, shards_on
from meshpar.placements.turns import turns_of

__all__ = ["emitted_collectives", "emitted_primitives"]

Sent = tuple[str, tuple[str, ...], int, int]
"""Kind, mesh axes, bytes that each device sends in one execution, number of executions."""

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "all_gather_invariant": "all_gather",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
}


def emitted_collectives(
    planned: PlannedProgram, node: PlannedNode, used: Collection[int]
) -> list[Sent]:
    """The collectives that a rule's own program holds, or a region for one device.

    Args:
      planned: the program that the operation is in.
      node: the operation.
      used: the values that are taken: what makes only others is not run.
    """
    if node.why == "manual":
        return list(_sent(node.node.params["jaxpr"], planned))
    talks = (
        bool(node.node.eqn.effects) and bool(node.node.outs)
        if node.rule is None
        else node.rule.emit is not None and any(node.axes.values())
    )
    if not talks or node.bodies:
        return []
    taken = [value in used for value in node.node.outs]
    return list(_sent(without_dead_code(_traced(planned, node), taken), planned))


def emitted_primitives(planned: PlannedProgram, node: PlannedNode) -> frozenset[str]:
    """What a rule's own program asks of the mesh: collectives, and `axis_index` for its place.

    Args:
      planned: the program that the operation is in.
      node: the operation.
    """
    return frozenset(_asked(_traced(planned, node)))


def _traced(planned: PlannedProgram, node: PlannedNode) -> Any:
    """The jaxpr of an operation on its blocks."""
    blocks = [
        jax.ShapeDtypeStruct(local_shape(tuple(aval.shape), layout, planned.sizes), aval.dtype)
        for aval, layout in (
            (planned.program.aval(ref), layout)
            for ref, layout in zip(node.node.ins, node.operands, strict=True)
        )
    ]
    mesh = AbstractMesh(
        tuple(planned.sizes.values()),
        tuple(planned.sizes),
        axis_types=(AxisType.Auto,) * len(planned.sizes),
    )
    local = jax.shard_map(
        lambda *xs: tuple(run_node(planned, node, list(xs))),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    return jax.make_jaxpr(local)(*blocks)


def _asked(jaxpr: Any) -> Iterator[str]:
    inner, _ = closed(jaxpr)
    for eqn in inner.eqns:
        if eqn.primitive.name in _KINDS or eqn.primitive.name == "axis_index":
            yield eqn.primitive.name
        elif eqn.primitive.name == "shard_map":
            yield from _asked(eqn.params["jaxpr"])
        else:
            bodies = sub_jaxprs(eqn)
            for body in bodies.bodies if bodies is not None else ():
                yield from _asked(body)


def _sent(jaxpr: Any, planned: PlannedProgram, times: Fraction = Fraction(1)) -> Iterator[Sent]:
    inner, _ = closed(jaxpr)
    for eqn in inner.eqns:
        kind = _KINDS.get(eqn.primitive.name)
        if kind is not None:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            n = shards_on(axes, planned.sizes)
            for var in eqn.invars:
                size = math.prod(var.aval.shape) * np.dtype(var.aval.dtype).itemsize
                yield kind, axes, _bytes(kind, size, n), math.ceil(times)
        elif eqn.primitive.name == "shard_map":
            yield from _sent(eqn.params["jaxpr"], planned, times)
        else:
            bodies = sub_jaxprs(eqn)
            for body in bodies.bodies if bodies is not None else ():
                yield from _sent(body, planned, times * turns_of(eqn))


def _bytes(kind: str, size: int, n: int) -> int:
    sent = {
        "all_reduce": 2 * size * (n - 1) / n,
        "all_gather": size * (n - 1),
        "ppermute": size,
    }
    return math.ceil(sent.get(kind, size * (n - 1) / n))
