"""Between the interpreter's states and the storage of a tensor on devices."""

from __future__ import annotations

import jax
import numpy as np

from meshpar.placements.blocks import block_of, local_shape, storage_shape, storage_sharding
from tests.placements.step_interpreter import coordinates


def to_storage(state, shape, layout, mesh, padding):
    """The storage whose blocks hold a state, with `padding` in the rows that are not there."""
    local = local_shape(shape, layout, mesh.axis_sizes)
    shards = []
    for at, device in zip(coordinates(mesh.axis_sizes), mesh.jax_mesh.devices.ravel(), strict=True):
        rows = state[at]
        block = np.full(local, padding, rows.dtype)
        block[tuple(slice(0, n) for n in rows.shape)] = rows
        shards.append(jax.device_put(block.reshape((1,) * len(layout.partial) + local), device))
    return jax.make_array_from_single_device_arrays(
        storage_shape(shape, layout, mesh.axis_sizes), storage_sharding(layout, mesh), shards
    )


def from_storage(storage, shape, layout, mesh):
    """The state that a storage holds: its blocks without the padding."""
    sizes = mesh.axis_sizes
    blocks = {shard.device: np.asarray(shard.data) for shard in storage.addressable_shards}
    state = {}
    for at, device in zip(coordinates(sizes), mesh.jax_mesh.devices.ravel(), strict=True):
        block = blocks[device].reshape(local_shape(shape, layout, sizes))
        rows = block_of(shape, layout, sizes, dict(zip(sizes, at, strict=True)))
        state[at] = block[tuple(slice(0, r.stop - r.start) for r in rows)]
    return state
