"""The arguments of a partitioned function: leaves, their names, and where they shall lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshpar.errors import MeshError, PlacementError
from meshpar.mesh import ProcessMesh, get_mesh
from meshpar.placements.layout import Layout
from meshpar.placements.types import Placement
from meshpar.placements.values import mesh_of

__all__ = ["asked_layouts", "is_placements", "leaf_names", "mesh_for"]


def is_placements(x: object) -> bool:
    """Whether `x` is a list of placements, one leaf of `in_placements`, or `None`."""
    return x is None or (isinstance(x, (list, tuple)) and all(isinstance(p, Placement) for p in x))


def leaf_names(tree: Any, root: str = "") -> list[str]:
    """Names of the leaves of a pytree, as `params/w1/kernel`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)

    def text(key: Any) -> str:
        for attribute in ("name", "key", "idx"):
            if hasattr(key, attribute):
                return str(getattr(key, attribute))
        return str(key)

    return ["/".join([root, *map(text, path)]).strip("/") for path, _ in paths]


def asked_layouts(
    asked: Any, tree: Any, mesh: ProcessMesh, what: str, ndims: Sequence[int]
) -> list[Layout | None]:
    """For each leaf of a pytree the layout that is asked for, if one is.

    Args:
      asked: a list of placements, `None`, or a pytree of those that is a prefix of `tree`.
      tree: the arguments, or the outputs.
      mesh: the mesh.
      what: what is asked for, for error messages.
      ndims: the number of dims of each leaf.

    Raises:
      PlacementError: the prefix does not fit, or placements do not fit their leaf.
    """
    try:
        spread = jax.tree.broadcast(asked, tree, is_leaf=is_placements)
    except ValueError as error:
        raise PlacementError(f"{what} does not fit.", because=str(error).splitlines()[0]) from None
    leaves = jax.tree.structure(tree).flatten_up_to(spread)
    names = leaf_names(tree, what)
    out: list[Layout | None] = []
    for name, placements, ndim in zip(names, leaves, ndims, strict=True):
        try:
            out.append(None if placements is None else Layout.of(placements, mesh, ndim))
        except PlacementError as error:
            raise error.within(name, mesh=mesh) from None
    return out


def mesh_for(leaves: Sequence[Any], given: ProcessMesh | None, call: str) -> ProcessMesh:
    """The mesh that a call runs on: the given one, that of its arguments, or the default.

    Raises:
      MeshError: there is none, or arguments lie on different ones.
    """
    found: Mapping[ProcessMesh, int] = {
        mesh: i for i, leaf in enumerate(leaves) if (mesh := mesh_of(leaf)) is not None
    }
    if given is not None:
        return given
    if len(found) > 1:
        raise MeshError(
            f"{call}: the arguments lie on {len(found)} meshes.",
            meshes=", ".join(map(repr, found)),
            instead="mp.reshard(x, mesh, placements) moves an argument to another mesh",
        )
    mesh = next(iter(found), None) or get_mesh()
    if mesh is None:
        raise MeshError(
            f"{call}: no mesh is known.",
            because="no argument lies on one, and none was set",
            instead="mp.shard_tensor an argument, mp.set_mesh(mesh), or pass mesh=mesh",
        )
    return mesh
