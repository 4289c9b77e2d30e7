"""The region that is being traced: over which mesh, along which of its axes.

JAX knows which axes a `shard_map` covers, not which ranks they stand for, so `mp.spmd` says that
while it calls its function.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import AbstractMesh

from meshpar.errors import CollectiveError
from meshpar.mesh import Group, ProcessMesh

__all__ = ["Region", "current_region", "entered"]


@dataclass(frozen=True)
class Region:
    """Code of one device, run by all devices along some axes of a mesh.

    Args:
      mesh: the mesh.
      axes: the axes that it covers, in the order of the mesh. Where other axes are left out, a rank
        is a row of devices, named by its first one.
    """

    mesh: ProcessMesh
    axes: tuple[str, ...]

    @cached_property
    def grid(self) -> np.ndarray:
        """The ranks, one dim for each covered axis."""
        covered = tuple(slice(None) if a in self.axes else 0 for a in self.mesh.axis_names)
        return self.mesh.mesh[covered]

    @cached_property
    def world(self) -> Group:
        """The group of all ranks."""
        return Group(tuple(self.grid.ravel().tolist()), self.mesh, self.axes, id=0)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Covered axis -> size."""
        return dict(zip(self.axes, self.grid.shape, strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Covered axis -> the coordinate of any rank of the mesh."""
        at = self.mesh.coordinate(rank)
        return {axis: at[axis] for axis in self.axes}

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"a region of {math.prod(self.grid.shape)} ranks over {sizes}"


Shape = tuple[tuple[str, int], ...]


class _Regions:
    """The regions being traced, innermost last, and the meshes that have had regions.

    JAX calls some functions of a region (the backward pass of a `jax.custom_vjp`) after its
    function has returned: then the axes are there, and the mesh is one that had such axes.
    """

    def __init__(self) -> None:
        self.stack: ContextVar[tuple[Region, ...]] = ContextVar("meshpar_regions", default=())
        self.meshes: dict[Shape, set[ProcessMesh]] = {}


_regions = _Regions()


@contextlib.contextmanager
def entered(region: Region) -> Iterator[None]:
    """Makes a region the current one."""
    shape = tuple(region.mesh.axis_sizes.items())
    _regions.meshes.setdefault(shape, set()).add(region.mesh)
    token = _regions.stack.set((*_regions.stack.get(), region))
    try:
        yield
    finally:
        _regions.stack.reset(token)


def current_region() -> Region | None:
    """The region that is being traced, that of `mp.spmd` or of a `jax.shard_map`; `None` outside.

    In a `jax.shard_map` of the user's own, ranks are positions in its mesh.

    Raises:
      CollectiveError: JAX traces a part of a region later, and which one is not known.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.manual_axes:
        return None
    axes = tuple(str(axis) for axis in context.manual_axes)
    stack = _regions.stack.get()
    if stack and stack[-1].axes == axes and _shape(context) == _mesh_shape(stack[-1].mesh):
        return stack[-1]
    meshes = _regions.meshes.get(_shape(context), set())
    if len(meshes) > 1:
        raise CollectiveError(
            "which mesh this code runs over is not known.",
            meshes=", ".join(sorted(map(repr, meshes))),
            because="outside the function of an mp.spmd (in a jax.shard_map, or a derivative that "
            "JAX traces later) only the names of the axes are, and these meshes share them",
            instead="mp.spmd for jax.shard_map, or other names for the axes of one mesh",
        )
    if meshes:
        return Region(next(iter(meshes)), axes)
    sizes = tuple(size for _, size in _shape(context))
    names = [name for name, _ in _shape(context)]
    return Region(ProcessMesh(np.arange(math.prod(sizes)).reshape(sizes), names), axes)


def _shape(context: AbstractMesh) -> Shape:
    return tuple((str(name), size) for name, size in context.shape.items())


def _mesh_shape(mesh: ProcessMesh) -> Shape:
    return tuple(mesh.axis_sizes.items())
