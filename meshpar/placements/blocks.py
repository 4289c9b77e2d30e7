"""Which part of a tensor each rank holds: local shapes, blocks, and the storage of uneven dims.

Axes on a dim nest: the outermost cuts the dim into blocks of `ceil(n / k)` rows, the next one cuts
each block likewise, and so on. So giving up the innermost axis of a dim, or adding one, never moves
data between blocks, whatever the sizes. `ceil(ceil(n / a) / b) == ceil(n / (a * b))`, so the local
size does not depend on the order.

The storage of a tensor is the evenly divisible array whose shards are the local blocks, padded at
the end to one local shape; axes with a pending reduction come first, one slice per coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import NamedSharding, PartitionSpec

from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout

__all__ = [
    "block_of",
    "is_even",
    "local_shape",
    "partial_axes_in_order",
    "shards_on",
    "storage_shape",
    "storage_sharding",
    "storage_spec",
]

Shape = tuple[int, ...]


def shards_on(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """The number of shards that some mesh axes cut a dim into."""
    return math.prod(sizes[axis] for axis in axes)


def is_even(shape: Shape, layout: Layout, sizes: Mapping[str, int]) -> bool:
    """Whether every shard of every dim has the same size."""
    cuts = (shards_on(axes, sizes) for axes in layout.dims)
    return all(size % cut == 0 for size, cut in zip(shape, cuts, strict=True))


def local_shape(shape: Shape, layout: Layout, sizes: Mapping[str, int]) -> Shape:
    """The shape of the (padded) block that each device holds."""
    cuts = (shards_on(axes, sizes) for axes in layout.dims)
    return tuple(-(-size // cut) for size, cut in zip(shape, cuts, strict=True))


def block_of(
    shape: Shape, layout: Layout, sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> tuple[slice, ...]:
    """The global index range of the rows that the device at a coordinate holds, padding excluded.

    Example:
      >>> layout = Layout((("a", "b"),))
      >>> block_of((10,), layout, {"a": 2, "b": 4}, {"a": 1, "b": 2})
      (slice(9, 10, None),)
    """
    box: list[slice] = []
    for size, axes in zip(shape, layout.dims, strict=True):
        start, stop = 0, size
        block = size
        for axis in axes:
            block = -(-block // sizes[axis])
            start = min(start + coordinate[axis] * block, stop)
            stop = min(start + block, stop)
        box.append(slice(start, stop))
    return tuple(box)


def partial_axes_in_order(layout: Layout, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes with a pending reduction in the order of the mesh, which is that of the storage."""
    return tuple(axis for axis in sizes if axis in layout.partial_axes)


def storage_shape(shape: Shape, layout: Layout, sizes: Mapping[str, int]) -> Shape:
    """The global shape of the storage: pending axes first, then the padded dims."""
    stacked = tuple(sizes[axis] for axis in partial_axes_in_order(layout, sizes))
    local = local_shape(shape, layout, sizes)
    cuts = (shards_on(axes, sizes) for axes in layout.dims)
    return stacked + tuple(size * cut for size, cut in zip(local, cuts, strict=True))


def storage_spec(layout: Layout, sizes: Mapping[str, int]) -> PartitionSpec:
    """The `PartitionSpec` of the storage."""
    entries = [*partial_axes_in_order(layout, sizes)]
    dims = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in layout.dims]
    return PartitionSpec(*entries, *dims)


def storage_sharding(layout: Layout, mesh: ProcessMesh) -> NamedSharding:
    """The `NamedSharding` of the storage, on the mesh with Auto axes.

    Raises:
      MeshError: the mesh names more devices than there are.
    """
    return NamedSharding(mesh.jax_mesh, storage_spec(layout, mesh.axis_sizes))
