"""Between a tensor's value and its storage: in traced code, from the host, and back to it.

See `blocks` for what the storage of a layout is. Nothing here builds a whole tensor on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.mesh import ProcessMesh, ranked_devices
from meshpar.placements.blocks import (
    block_of,
    local_shape,
    shards_on,
    storage_shape,
    storage_sharding,
)
from meshpar.placements.layout import Layout

__all__ = ["from_storage", "place_blocks", "read_block", "to_storage"]

Shape = tuple[int, ...]


def to_storage(x: jax.Array, layout: Layout, sizes: Mapping[str, int]) -> jax.Array:
    """The storage of a value whose layout has no pending reduction, in traced code.

    Args:
      x: global shape; its dims are padded, block by block.
    """
    for dim, axes in enumerate(layout.dims):
        if x.shape[dim] % shards_on(axes, sizes):
            x = _pad_blocks(x, dim, axes, sizes)
    return x


def from_storage(
    storage: jax.Array, shape: Shape, layout: Layout, sizes: Mapping[str, int]
) -> jax.Array:
    """The value that `to_storage` stored, in traced code.

    Args:
      storage: padded dims, no stacked ones.
      shape: the global shape.
    """
    for dim, axes in enumerate(layout.dims):
        if shape[dim] % shards_on(axes, sizes):
            storage = _cut_blocks(storage, dim, shape[dim], axes, sizes)
    return storage


def _levels(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """For each axis on a dim, outermost first: the size that it cuts, and the block it makes."""
    levels: list[tuple[int, int]] = []
    for axis in axes:
        levels.append((size, -(-size // sizes[axis])))
        size = levels[-1][1]
    return levels


def _pad_blocks(
    x: jax.Array, dim: int, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> jax.Array:
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    outer = 1
    for axis, (size, block) in zip(axes, _levels(x.shape[dim], axes, sizes), strict=True):
        x = x.reshape(*before, outer, size, *after)
        pad = [(0, 0, 0)] * x.ndim
        pad[dim + 1] = (0, sizes[axis] * block - size, 0)
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), pad)
        outer *= sizes[axis]
    return x.reshape(*before, -1 if x.size else outer * x.shape[dim + 1], *after)


def _cut_blocks(
    x: jax.Array, dim: int, size: int, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> jax.Array:
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    levels = _levels(size, axes, sizes)
    for position in reversed(range(len(axes))):
        whole, block = levels[position]
        outer = shards_on(axes[:position], sizes)
        x = x.reshape(*before, outer, sizes[axes[position]] * block, *after)
        x = jax.lax.slice_in_dim(x, 0, whole, axis=dim + 1)
    return x.reshape(*before, size, *after)


def place_blocks(
    block: Callable[[tuple[slice, ...]], np.ndarray | jax.Array],
    shape: Shape,
    dtype: np.dtype,
    layout: Layout,
    mesh: ProcessMesh,
) -> jax.Array:
    """Builds the storage on the devices from blocks of the value.

    Args:
      block: global index range -> that part of the value.
      shape: the global shape.
      dtype: the dtype of the value.
      layout: without pending reductions.
      mesh: a mesh whose devices are there.
    """
    sizes = mesh.axis_sizes
    padded = local_shape(shape, layout, sizes)
    devices = ranked_devices()

    def local(rank: int) -> jax.Array:
        part = block(block_of(shape, layout, sizes, mesh.coordinate(rank)))
        if part.shape != padded:
            pad = [(0, size - there) for size, there in zip(padded, part.shape, strict=True)]
            part = np.pad(np.asarray(part), pad)
        return jax.device_put(part, devices[rank])

    sharding = storage_sharding(layout, mesh)
    mine = [r for r in mesh.process_ids if devices[r].process_index == jax.process_index()]
    return jax.make_array_from_single_device_arrays(
        storage_shape(shape, layout, sizes), sharding, [local(r) for r in mine], dtype=dtype
    )


def read_block(
    storage: jax.Array,
    shape: Shape,
    layout: Layout,
    mesh: ProcessMesh,
    box: tuple[slice, ...],
) -> np.ndarray:
    """A part of the value on the host, from the shards that this process holds.

    Args:
      storage: of a layout without pending reductions.
      box: the global index range to read.
    """
    sizes = mesh.axis_sizes
    rank_of = {device: rank for rank, device in enumerate(ranked_devices())}
    out = np.empty([s.stop - s.start for s in box], dtype=storage.dtype)
    done: set[tuple[tuple[int, int], ...]] = set()
    for shard in storage.addressable_shards:
        held = block_of(shape, layout, sizes, mesh.coordinate(rank_of[shard.device]))
        block = tuple((h.start, h.stop) for h in held)
        if block in done:
            continue
        done.add(block)
        part = [
            slice(max(h.start, b.start), min(h.stop, b.stop))
            for h, b in zip(held, box, strict=True)
        ]
        if any(p.start >= p.stop for p in part):
            continue
        from_shard = tuple(
            slice(p.start - h.start, p.stop - h.start) for p, h in zip(part, held, strict=True)
        )
        to_out = tuple(
            slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box, strict=True)
        )
        out[to_out] = np.asarray(shard.data)[from_shard]
    return out
