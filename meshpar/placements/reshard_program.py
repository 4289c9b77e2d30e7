"""A compiled reshard, from storage to storage."""

# JAX is partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax
from jax.typing import DTypeLike

from meshpar.mesh import ProcessMesh
from meshpar.placements.apply_steps import apply_steps
from meshpar.placements.blocks import local_shape, storage_spec
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps

__all__ = ["reshard_program", "reshard_storage"]


@lru_cache(maxsize=1024)
def reshard_program(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: DTypeLike, mesh: ProcessMesh
) -> Callable[[jax.Array], jax.Array]:
    """The jitted function that turns the storage of one layout into that of another.

    Args:
      src: the layout before.
      dst: the layout after.
      shape: the global shape of the tensor.
      dtype: its dtype.
      mesh: the mesh of both, whose devices are there.

    Returns:
      A function from storage to storage (see `blocks`). What it does is `reshard_steps`, and no
      other collective. Programs are cached; `reshard_program.cache_clear()` drops them.

    Raises:
      PlacementError: as `reshard_steps`.
      MeshError: the mesh names devices that are not there.
    """
    sizes = mesh.axis_sizes
    steps = planned_steps(src, dst, shape, dtype, sizes)
    after = local_shape(shape, dst, sizes)

    def reshard(storage: jax.Array) -> jax.Array:
        block = storage.reshape(storage.shape[len(src.partial) :])
        block = apply_steps(block, steps, shape, sizes)
        return block.reshape((1,) * len(dst.partial) + after)

    return jax.jit(
        jax.shard_map(
            reshard,
            mesh=mesh.jax_mesh,
            in_specs=storage_spec(src, sizes),
            out_specs=storage_spec(dst, sizes),
            check_vma=False,
        )
    )


def reshard_storage(
    storage: jax.Array, src: Layout, dst: Layout, shape: tuple[int, ...], mesh: ProcessMesh
) -> jax.Array:
    """The storage of `src` as that of `dst`, by the cached program, eager or traced."""
    if src == dst:
        return storage
    return reshard_program(src, dst, shape, storage.dtype, mesh)(storage)
