"""Layouts that the user asks for inside a program: annotations, and regions for one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshpar.compiler.program import Node
from meshpar.placements.annotate import PRIMITIVE
from meshpar.placements.layout import Layout

__all__ = ["annotated_layout", "manual_layouts"]


def annotated_layout(node: Node, sizes: Mapping[str, int]) -> Layout | None:
    """The layout that an operation only asks for, or `None` for every other operation.

    `mp.shard_tensor`, `mp.reshard` and `jax.lax.with_sharding_constraint` ask.

    Raises:
      NotImplementedError: it names another mesh than the program's.
    """
    if node.name == PRIMITIVE:
        _check_mesh(node, dict(node.params["mesh"].axis_sizes), sizes)
        return node.params["layout"]
    if node.name != "sharding_constraint":
        return None
    sharding = node.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        raise NotImplementedError(
            f"with_sharding_constraint to a {type(sharding).__name__} inside mp.jit, at "
            f"{node.where}: give a NamedSharding on the program's mesh, or mp.shard_tensor"
        )
    _check_mesh(node, dict(sharding.mesh.shape), sizes)
    ndim = node.eqn.outvars[0].aval.ndim
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if entry is free else entry for entry in sharding.spec))
    return Layout.from_spec(spec, ndim)


def manual_layouts(
    node: Node, operands: Sequence[Any], results: Sequence[Any], sizes: Mapping[str, int]
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layouts of the operands and results of a `shard_map` over the program's mesh.

    Raises:
      NotImplementedError: it is over another mesh, or over some axes only.
    """
    mesh, manual = node.params["mesh"], node.params.get("manual_axes")
    _check_mesh(node, dict(mesh.shape), sizes)
    if manual is not None and set(manual) != set(sizes):
        raise NotImplementedError(
            f"shard_map over some axes ({', '.join(sorted(manual))}) inside mp.jit, at "
            f"{node.where}: make it manual over all of {', '.join(sizes)}"
        )

    def layouts(specs: Any, avals: Sequence[Any]) -> tuple[Layout, ...]:
        pairs = zip(specs, avals, strict=True)
        return tuple(Layout.from_spec(spec, aval.ndim) for spec, aval in pairs)

    return layouts(node.params["in_specs"], operands), layouts(node.params["out_specs"], results)


def _check_mesh(node: Node, found: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    if dict(found) != dict(sizes):
        raise NotImplementedError(
            f"{node.name} over the mesh {dict(found)} inside mp.jit over {dict(sizes)}, at "
            f"{node.where}: one program runs on one mesh; mp.reshard outside moves values between"
        )
