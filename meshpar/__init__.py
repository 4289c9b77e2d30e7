"""meshpar: an SPMD compiler frontend for JAX.

The public names, each imported from its module at first use (PEP 562): `import meshpar` loads
neither flax nor optax. `__init__.pyi` is the same table for type checkers and editors.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    name: module
    for module, names in {
        "meshpar.collectives.exchange": "alltoall alltoall_single",
        "meshpar.collectives.gloo": "gloo_barrier gloo_init_parallel_env gloo_release",
        "meshpar.collectives.gradients": "grad local value_and_grad",
        "meshpar.collectives.groups": (
            "destroy_process_group get_backend get_group is_available new_group"
        ),
        "meshpar.collectives.movement": "all_gather broadcast gather scatter",
        "meshpar.collectives.not_here": (
            "create_nccl_config restart_process_group shutdown_process_group split"
        ),
        "meshpar.collectives.objects": (
            "all_gather_object broadcast_object_list recv_object_list scatter_object_list "
            "send_object_list"
        ),
        "meshpar.collectives.p2p_op": "P2POp",
        "meshpar.collectives.parallel_env": "ParallelEnv",
        "meshpar.collectives.parallel_mode": "ParallelMode",
        "meshpar.collectives.point_to_point": "batch_isend_irecv irecv isend recv send",
        "meshpar.collectives.processes": "is_initialized",
        "meshpar.collectives.ranks": "get_rank get_world_size",
        "meshpar.collectives.reduce_op": "ReduceOp",
        "meshpar.collectives.reductions": "all_reduce reduce reduce_scatter",
        "meshpar.collectives.spmd": "spmd",
        "meshpar.collectives.start": "init_parallel_env",
        "meshpar.collectives.synchronize": "barrier wait",
        "meshpar.collectives.task": "Task",
        "meshpar.compiler.check": "check",
        "meshpar.compiler.explain": "explain",
        "meshpar.compiler.infer": "Inferred TensorSpec infer_backward infer_forward",
        "meshpar.compiler.jit": "jit",
        "meshpar.compiler.operations.registry": "Operation infer_reference",
        "meshpar.compiler.no_rule": "NoRuleWarning",
        "meshpar.errors": (
            "CollectiveError CollectiveTimeout DistTensorError MeshError MeshparError PeerError "
            "PlacementError"
        ),
        "meshpar.host_devices": "set_host_device_count",
        "meshpar.launch.spawn": "SpawnContext SpawnError spawn",
        "meshpar.mesh": "Group ProcessMesh get_mesh set_mesh",
        "meshpar.placements.dist_tensor": "DistTensor",
        "meshpar.placements.layout": "Layout",
        "meshpar.placements.local": "dtensor_from_local local_value",
        "meshpar.placements.reshard": "reshard unshard_dtensor",
        "meshpar.placements.search": "reshard_steps",
        "meshpar.placements.shard": "dtensor_from_fn shard_tensor show_placements",
        "meshpar.placements.types": "Partial Placement ReduceType Replicate Shard",
        "meshpar.placements.values": "mesh_of placements_of",
        "meshpar.schedules.executors.arguments": "PipelineError",
        "meshpar.schedules.executors.pipeline": "pipeline",
        "meshpar.training.batch": "ReplicatedBatchWarning",
        "meshpar.training.checkpoint": "checkpoint_contents load_state_dict save_state_dict",
        "meshpar.training.create": "create_sharded",
        "meshpar.training.data_parallel": "DataParallel",
        "meshpar.training.dataloader": "ShardDataloader shard_dataloader",
        "meshpar.training.dist_model": "DistModel",
        "meshpar.training.layers": "shard_by_rules shard_layer",
        "meshpar.training.programs": "RecompileWarning",
        "meshpar.training.split_point": "SplitPoint",
        "meshpar.training.stages": "ShardingStage1 ShardingStage2 ShardingStage3 shard_optimizer",
        "meshpar.training.strategy": "Strategy",
        "meshpar.training.to_static": "to_static",
    }.items()
    for name in names.split()
}
_MODULES = {
    "launch": "meshpar.launch",
    "models": "meshpar.models",
    "rules": "meshpar.rules",
    "schedules": "meshpar.schedules",
    "stream": "meshpar.collectives.stream",
}

# The names are strings, and the stub lists them.
__all__ = [*_HOME, *_MODULES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOME:
        found = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        found = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'meshpar' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
