"""Which mesh a `DistModel` lies on, and which of its axes cut the batch and the ZeRO state."""

from __future__ import annotations

from meshpar.errors import MeshError
from meshpar.mesh import ProcessMesh, get_mesh
from meshpar.placements.values import mesh_of
from meshpar.training.adapters import Adapter
from meshpar.training.paths import named_leaves
from meshpar.training.rank_meshes import rank_meshes
from meshpar.training.stages import ShardingStage
from meshpar.training.strategy import Strategy

__all__ = ["data_axes", "mesh_for", "zero_axis"]

_DATA_AXES = ("dp", "fsdp", "sharding")
_ZERO_AXES = ("sharding", "fsdp", "dp")


def mesh_for(
    adapter: Adapter, stage: ShardingStage | None, strategy: Strategy
) -> tuple[ProcessMesh, dict[str, int]]:
    """The mesh of a model, and which leaves lie on the part of it that is one pipeline rank's.

    It is the one mesh of the placed leaves, else the optimizer's, else the default one; where
    leaves lie on parts of the default mesh along `Strategy.pipeline.axis`, that one.

    Returns:
      The mesh; name -> rank.
    """
    found: dict[ProcessMesh, str] = {}
    default, axis = get_mesh(), strategy.pipeline.axis
    staged = strategy.pipeline.enable and default is not None and axis in default.axis_sizes
    parts, ranks = rank_meshes(default, axis) if staged and default else {}, dict[str, int]()
    for name, leaf in (*named_leaves(adapter.params), *named_leaves(adapter.rest)):
        mesh = mesh_of(leaf)
        if mesh is None:
            continue
        if mesh in parts:
            ranks[name], mesh = parts[mesh], default
        if mesh is not None:
            found.setdefault(mesh, name)
    if stage is not None and stage.mesh is not None:
        found.setdefault(stage.mesh, f"the optimizer's {type(stage).__name__}")
    if len(found) > 1:
        (first, name), (second, other), *_ = found.items()
        raise MeshError(
            "its state lies on two meshes, and one program runs on one.",
            **{name: first, other: second},
            instead="shard_tensor or reshard all of it onto one mesh; or, for a pipeline, "
            "mp.set_mesh(mesh) of the whole mesh and layers on mesh.get_mesh_with_dim(axis)[rank], "
            "with Strategy.pipeline",
        )
    mesh = next(iter(found), None) or get_mesh()
    if mesh is None:
        raise MeshError(
            "there is no mesh: no parameter is placed on one, and no default is set.",
            instead='mp.set_mesh(mp.ProcessMesh(range(8), ["dp"])) before to_static, or place '
            "parameters with shard_tensor or shard_layer",
        )
    return mesh, ranks


def zero_axis(
    stage: ShardingStage | None, strategy: Strategy, mesh: ProcessMesh
) -> tuple[str | None, int]:
    """The axis that ZeRO cuts over, and the stage; (None, 0) without it."""
    sharding = strategy.sharding
    if stage is not None:
        axis, number = stage.axis_of(mesh), stage.stage
    elif sharding.enable:
        axis = next((name for name in _ZERO_AXES if name in mesh.axis_sizes), None)
        number = sharding.stage
        if axis is None:
            raise MeshError(
                f"Strategy.sharding needs a mesh axis named {', '.join(_ZERO_AXES)}.",
                mesh=mesh,
                instead='shard_optimizer(optimizer, ShardingStage1("the axis")) names any axis',
            )
    else:
        return None, 0
    if "degree" in sharding.changed() and sharding.degree != mesh.axis_sizes[axis]:
        raise MeshError(
            f"Strategy.sharding.degree is {sharding.degree}, and mesh axis {axis!r} has size "
            f"{mesh.axis_sizes[axis]}.",
            mesh=mesh,
        )
    return axis, number


def data_axes(strategy: Strategy, mesh: ProcessMesh) -> tuple[str, ...]:
    """The axes that cut dim 0 of a batch: the strategy's, or those of a known name."""
    if strategy.data_axes is None:
        return tuple(name for name in mesh.axis_names if name in _DATA_AXES)
    if isinstance(strategy.data_axes, str):
        raise TypeError(
            f"Strategy.data_axes = {strategy.data_axes!r}: it takes a tuple of axes, such as "
            f"({strategy.data_axes!r},)"
        )
    for axis in strategy.data_axes:
        if axis not in mesh.axis_sizes:
            raise MeshError(
                f"Strategy.data_axes names {axis!r}, which is no axis of the mesh.", mesh=mesh
            )
    return tuple(strategy.data_axes)
