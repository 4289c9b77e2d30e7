"""What is known of a placed value: its storage, its layout and its mesh."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from meshpar._jax import is_tracer
from meshpar.mesh import ProcessMesh
from meshpar.placements.annotate import annotation_of
from meshpar.placements.blocks import is_even, storage_shape, storage_sharding
from meshpar.placements.dist_tensor import DistTensor
from meshpar.placements.layout import Layout
from meshpar.placements.types import Placement

__all__ = [
    "Placed",
    "Value",
    "describe",
    "layout_of",
    "mesh_of",
    "placed",
    "placements_of",
    "process_mesh_of",
    "wrap",
]

Value = jax.Array | DistTensor


class Placed(NamedTuple):
    """A placed value, whichever of the two types holds it."""

    storage: jax.Array
    shape: tuple[int, ...]
    layout: Layout
    mesh: ProcessMesh


def wrap(storage: jax.Array, shape: tuple[int, ...], layout: Layout, mesh: ProcessMesh) -> Value:
    """The storage itself where a `jax.Array` can hold the layout, else a `DistTensor` around it."""
    asked = storage_sharding(layout, mesh)
    if (
        0 in storage.shape and storage.sharding != asked
    ):  # XLA gives what has no elements back whole
        storage = jax.device_put(storage, asked)
    if layout.partial or not is_even(shape, layout, mesh.axis_sizes):
        return DistTensor(storage, shape, layout, mesh)
    if storage.sharding == asked:
        return storage
    # Equivalent, but spelled otherwise: XLA drops axes of size 1, and the caller asked for them.
    shards = [shard.data for shard in storage.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, asked, shards)


def placed(x: object) -> Placed | None:
    """A value that lies on a mesh, with storage on Auto axes; `None` for every other one."""
    if isinstance(x, DistTensor):
        return Placed(x.storage, x.shape, x.layout, x.process_mesh)
    if is_tracer(x) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return None
    sharding = x.sharding
    if not isinstance(sharding.mesh, Mesh):
        return None
    mesh, layout = process_mesh_of(sharding.mesh), Layout.from_spec(sharding.spec, x.ndim)
    auto = storage_sharding(layout, mesh)
    if layout.partial or sharding.mesh != auto.mesh:
        shards = [shard.data for shard in x.addressable_shards]
        stacked = (1,) * len(layout.partial)
        x = jax.make_array_from_single_device_arrays(
            storage_shape(x.shape, layout, mesh.axis_sizes),
            auto,
            [data.reshape(*stacked, *data.shape) for data in shards] if stacked else shards,
        )
        return Placed(x, x.shape[len(stacked) :], layout, mesh)
    return Placed(x, x.shape, layout, mesh)


@functools.lru_cache(maxsize=256)
def process_mesh_of(mesh: Mesh) -> ProcessMesh:
    """`ProcessMesh.from_jax`, remembered."""
    return ProcessMesh.from_jax(mesh)


def layout_of(x: object) -> Layout | None:
    """The `Layout` of a placed value or of an annotated tracer; `None` for every other one."""
    known = annotation_of(x)
    if known is not None:
        return known[1]
    if isinstance(x, DistTensor):
        return x.layout
    if is_tracer(x) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return None
    return Layout.from_spec(x.sharding.spec, x.ndim)


def mesh_of(x: object) -> ProcessMesh | None:
    """The mesh that a value lies on; `None` where it lies on none.

    Args:
      x: a `jax.Array`, a `DistTensor`, or a tracer that `shard_tensor` or `reshard` annotated.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> mp.mesh_of(mp.shard_tensor(np.ones(3), mesh, [mp.Shard(0)])) == mesh
      True
      >>> mp.mesh_of(np.ones(3)) is None
      True

    The counterpart of Paddle's `Tensor.process_mesh`.
    """
    known = annotation_of(x)
    if known is not None:
        return known[0]
    if isinstance(x, DistTensor):
        return x.process_mesh
    if is_tracer(x) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return None
    mesh = x.sharding.mesh
    return process_mesh_of(mesh) if isinstance(mesh, Mesh) else None


def placements_of(x: object) -> list[Placement] | None:
    """The placements of a value, one per axis of `mesh_of(x)`; `None` where it lies on no mesh.

    Args:
      x: a `jax.Array`, a `DistTensor`, or a tracer that `shard_tensor` or `reshard` annotated.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([[0]], ["dp", "tp"])
      >>> mp.placements_of(mp.shard_tensor(np.ones((3, 4)), mesh, [mp.Shard(-1)]))
      [Shard(1), Replicate()]

    The counterpart of Paddle's `Tensor.placements`.
    """
    mesh, layout = mesh_of(x), layout_of(x)
    return None if mesh is None or layout is None else layout.placements(mesh)


def describe(x: object) -> str:
    """Type, shape and placements of a value in one line, for error messages."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        return f"a {type(x).__name__}"
    text = f"{dtype}[{', '.join(map(str, shape))}]"
    placements = placements_of(x)
    return text if placements is None else f"{text}, {placements} on {mesh_of(x)!s}"
