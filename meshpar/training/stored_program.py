"""A function of logical values as a jitted program of their storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from meshpar.compiler.lower import plan_function, shard_mapped
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.storage import from_storage, to_storage
from meshpar.training.state import Slot

__all__ = ["stored_program"]


def stored_program(
    fn: Callable[..., list[Any]],
    inputs: Sequence[Slot],
    outputs: Sequence[Layout],
    mesh: ProcessMesh,
    partitioner: Literal["meshpar", "xla"],
    *,
    donated: int = 0,
) -> Callable[..., list[jax.Array]]:
    """The program of a function.

    Args:
      fn: from leaves to leaves, logical values.
      inputs: what each argument is and where it lies.
      outputs: where each result shall lie.
      mesh: the mesh.
      partitioner: who decides what lies where in between.
      donated: how many of the arguments, from the first, give their memory.
    """
    sizes, donate = mesh.axis_sizes, tuple(range(donated))

    def by_xla(*storages: jax.Array) -> list[jax.Array]:
        given = zip(storages, inputs, strict=True)
        made = fn(*(from_storage(x, slot.shape, slot.layout, sizes) for x, slot in given))
        return [to_storage(x, layout, sizes) for x, layout in zip(made, outputs, strict=True)]

    if partitioner == "xla":
        where = [storage_sharding(layout, mesh) for layout in outputs]
        return jax.jit(by_xla, donate_argnums=donate, out_shardings=where)
    structs = [jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in inputs]
    layouts, names = [slot.layout for slot in inputs], [slot.name for slot in inputs]
    plan, _, _ = plan_function(fn, structs, layouts, lambda *_: outputs, names, mesh, donate)
    return jax.jit(shard_mapped(plan.planned, mesh), donate_argnums=donate)
