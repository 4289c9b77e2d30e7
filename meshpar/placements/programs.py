"""TEMPORARY: replaced by the real step programs."""

import jax

from meshpar.placements.blocks import storage_sharding
from meshpar.placements.storage import from_storage, to_storage


def reshard_storage(storage, src, dst, shape, mesh):
    if src == dst:
        return storage
    assert not src.partial and not dst.partial
    return jax.jit(
        lambda s: to_storage(from_storage(s, shape, src, mesh.axis_sizes), dst, mesh.axis_sizes),
        out_shardings=storage_sharding(dst, mesh),
    )(storage)
