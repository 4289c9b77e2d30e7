"""Layouts that the user asks for inside a program: annotations, and regions for one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshpar.compiler.program import Node
from meshpar.placements.annotate import PRIMITIVE
from meshpar.placements.layout import Layout

__all__ = ["Surroundings", "annotated_layout", "is_annotation", "manual_layouts"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The axes in which a program differs from the mesh that its annotations name.

    Args:
      outer: axes of that mesh, at one coordinate of which the program runs; annotations may name
        them, and cut nothing over them.
      open: axes of the program that no mesh has; an annotation leaves open what they cut.
    """

    outer: Mapping[str, int] = field(default_factory=dict)
    open: frozenset[str] = frozenset()


def is_annotation(node: Node) -> bool:
    """Whether an operation only asks for a layout.

    `mp.shard_tensor`, `mp.reshard` and `jax.lax.with_sharding_constraint` ask.
    """
    return node.name in (PRIMITIVE, "sharding_constraint")


def annotated_layout(
    node: Node, sizes: Mapping[str, int], around: Surroundings, there: Layout
) -> Layout:
    """The layout that an annotation asks for.

    Args:
      node: the annotation.
      sizes: the program's axes.
      around: in what they differ from those of the mesh.
      there: the layout in which its operand is there.

    Raises:
      NotImplementedError: it names another mesh than the program's, or cuts over an outer axis.
    """
    asked, found = _asked(node)
    own = {axis: size for axis, size in sizes.items() if axis not in around.open}
    if found != own and around != Surroundings():
        beside = {axis for axis, size in found.items() if size == 1 or axis in around.outer}
        beside -= set(own)
        cut = beside & {*asked.shard_axes, *asked.partial_axes} & set(around.outer)
        if cut:
            raise NotImplementedError(
                f"{node.name} over mesh axis {', '.join(map(repr, sorted(cut)))} at {node.where}: "
                "its ranks compute different parts of the program, and each holds its values whole "
                "along it; place them over the other axes"
            )
        found = {axis: size for axis, size in found.items() if axis not in beside}
        asked = _without(asked, beside)
    _check_mesh(node, found, own)
    return _kept_open(asked, there, around.open)


def _kept_open(asked: Layout, there: Layout, axes: frozenset[str]) -> Layout:
    """The layout asked for, with the axes that it leaves open as they are."""
    if axes.isdisjoint((*there.shard_axes, *there.partial_axes)):
        return asked
    dims = []
    for mine, before in zip(asked.dims, there.dims, strict=True):
        kept = [axis for axis in before if axis in mine or axis in axes]
        dims.append((*kept, *(axis for axis in mine if axis not in kept)))
    pending = [entry for entry in there.partial if entry[0] in axes]
    return Layout(tuple(dims), (*asked.partial, *pending))


def _without(layout: Layout, axes: set[str]) -> Layout:
    dims = tuple(tuple(axis for axis in dim if axis not in axes) for dim in layout.dims)
    return Layout(dims, tuple(entry for entry in layout.partial if entry[0] not in axes))


def _asked(node: Node) -> tuple[Layout, dict[str, int]]:
    """What an annotation asks for, and the axes of the mesh that it names."""
    if node.name == PRIMITIVE:
        return node.params["layout"], dict(node.params["mesh"].axis_sizes)
    sharding = node.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        raise NotImplementedError(
            f"with_sharding_constraint to a {type(sharding).__name__} inside mp.jit, at "
            f"{node.where}: give a NamedSharding on the program's mesh, or mp.shard_tensor"
        )
    ndim = node.eqn.outvars[0].aval.ndim
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if entry is free else entry for entry in sharding.spec))
    return Layout.from_spec(spec, ndim), dict(sharding.mesh.shape)


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
