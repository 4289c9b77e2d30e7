"""`create_sharded`: an nnx module whose values are made where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from meshpar.errors import MeshError
from meshpar.mesh import ProcessMesh, get_mesh
from meshpar.placements.annotate import annotation_of
from meshpar.training.state import Arrays, slots_of

__all__ = ["create_sharded"]

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


def create_sharded(build: Callable[[], ModuleT], mesh: ProcessMesh | None = None) -> ModuleT:
    """Builds an nnx module with each value created on the devices that hold it, never whole on one.

    `build` is traced twice, once for the shapes and once for the program that makes the values.
    Random values come out as they would on one device.

    Args:
      build: makes the module and says where its values lie, by `shard_tensor` or `shard_layer`;
        values of which nothing is said are replicated.
      mesh: the mesh; that of the annotations, else the default one, where it is left out.

    Returns:
      The module; values with uneven dims are `DistTensor`s.

    Raises:
      MeshError: no mesh, or values on different ones.

    Example:
      >>> import meshpar as mp
      >>> def build():
      ...     layer = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      ...     layer.kernel = mp.shard_tensor(layer.kernel, mesh, [mp.Shard(1)])
      ...     return layer
      >>> mesh = mp.ProcessMesh([0], ["tp"])
      >>> mp.placements_of(create_sharded(build).kernel.get_value())
      [Shard(1)]
    """
    graphs: list[Any] = []  # nnx does not export the type of a graph definition
    known: list[Any] = []

    def state() -> Any:
        graph, values = nnx.split(build())
        graphs.append(graph)
        known[:] = [annotation_of(leaf) for leaf in jax.tree.leaves(values)]
        return values

    avals = jax.eval_shape(state)
    meshes = {annotation[0] for annotation in known if annotation is not None}
    if mesh is not None:
        meshes.add(mesh)
    if len(meshes) > 1:
        raise MeshError(
            "create_sharded(build): values lie on different meshes.",
            meshes=", ".join(map(str, meshes)),
        )
    home = next(iter(meshes), None) or get_mesh()
    if home is None:
        raise MeshError(
            "create_sharded(build): there is no mesh.",
            instead="create_sharded(build, mesh), or shard_tensor inside build",
        )
    slots = slots_of(avals, home)
    slots = slots.with_layouts(
        slot.layout if annotation is None else annotation[1].without_partial()
        for slot, annotation in zip(slots.leaves, known, strict=True)
    )

    def create() -> Arrays:
        return slots.pack(state())

    arrays = jax.jit(create, out_shardings=slots.shardings)()
    return nnx.merge(graphs[-1], slots.wrapped(arrays))
