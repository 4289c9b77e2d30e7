"""ZeRO as placements: what each stage cuts, and `shard_optimizer`.

Follows "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import optax

from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import shards_on
from meshpar.placements.layout import Layout

__all__ = [
    "ShardedOptimizer",
    "ShardingStage",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "cut_over",
    "shard_optimizer",
]


@dataclass(frozen=True, slots=True)
class ShardingStage:
    """Base of `ShardingStage1` to `ShardingStage3`.

    Args:
      sharding_mesh_dim: the mesh axis, by name or position.
      mesh: the mesh; that of the parameters where it is left out.
    """

    sharding_mesh_dim: str | int
    mesh: ProcessMesh | None = None
    stage: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.mesh is not None:
            self.mesh.axis_index(self.sharding_mesh_dim)  # raises where there is no such axis

    def axis_of(self, mesh: ProcessMesh) -> str:
        """The name of the axis on a mesh.

        Raises:
          MeshError: the mesh has no such axis.
        """
        return mesh.axis_names[mesh.axis_index(self.sharding_mesh_dim)]


@dataclass(frozen=True, slots=True)
class ShardingStage1(ShardingStage):
    """Optimizer state is cut over a mesh axis; parameters and gradients stay as they are.

    Each leaf is cut on the first dim that the axis divides, within the cuts that the parameter has
    already; a leaf without such a dim stays as the parameter lies.

    Args:
      sharding_mesh_dim: the mesh axis, by name or position.
      mesh: the mesh; that of the parameters where it is left out.

    Example:
      >>> import optax
      >>> shard_optimizer(optax.adam(1e-3), ShardingStage1("dp")).stage
      ShardingStage1(sharding_mesh_dim='dp', mesh=None)

    Follows `paddle.distributed.ShardingStage1` (3.3.1).
    """

    stage: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class ShardingStage2(ShardingStage):
    """Stage 1, and gradients are cut likewise before the update.

    Their reduction is then a reduce-scatter where the backend forms one; XLA on CPU does not.

    Follows `paddle.distributed.ShardingStage2` (3.3.1).
    """

    stage: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class ShardingStage3(ShardingStage):
    """Stage 2, and the parameters themselves are cut likewise, and gathered where they are used.

    Follows `paddle.distributed.ShardingStage3` (3.3.1).
    """

    stage: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class ShardedOptimizer:
    """What `shard_optimizer` returns: an optax transformation that says how its state lies."""

    transformation: optax.GradientTransformation
    stage: ShardingStage | None

    def init(self, params: Any) -> Any:
        """The optimizer state of a pytree of parameters, as optax."""
        return self.transformation.init(params)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """Updates and new state, as optax."""
        update = optax.with_extra_args_support(self.transformation).update
        return update(updates, state, params, **extra)


def shard_optimizer(
    optimizer: optax.GradientTransformation,
    shard_fn: ShardingStage | None = None,
    gradient_accumulation_steps: int = 1,
) -> ShardedOptimizer:
    """Says how an optimizer's state lies; `to_static` places it so.

    Args:
      optimizer: any optax transformation.
      shard_fn: `ShardingStage1`, `2` or `3`; `None` lays each leaf as its parameter.
      gradient_accumulation_steps: the mean of the gradients of so many steps makes one update
        (`optax.MultiSteps`); the accumulated gradients lie as the optimizer state does.

    Returns:
      An object with optax's `init` and `update`.

    Raises:
      TypeError: `shard_fn` is not a stage, or `optimizer` not an optax transformation.
      ValueError: fewer than one accumulation step.

    Example:
      >>> import optax
      >>> shard_optimizer(optax.sgd(0.1)).stage is None
      True

    Follows `paddle.distributed.shard_optimizer` (3.3.1), where AdamW and SGD only are accepted.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"shard_optimizer(optimizer): a {type(optimizer).__name__} is no optax transformation, "
            "such as optax.adamw(1e-3)"
        )
    if shard_fn is not None and not isinstance(shard_fn, ShardingStage):
        raise TypeError(
            f"shard_optimizer(shard_fn): {shard_fn!r} is not None, ShardingStage1, ShardingStage2 "
            'or ShardingStage3, such as ShardingStage1("dp")'
        )
    if gradient_accumulation_steps < 1:
        raise ValueError(
            f"shard_optimizer(gradient_accumulation_steps={gradient_accumulation_steps}): at least "
            "1, which updates at every step"
        )
    if gradient_accumulation_steps > 1:
        steps = optax.MultiSteps(optimizer, gradient_accumulation_steps)
        optimizer = steps.gradient_transformation()
    return ShardedOptimizer(optimizer, shard_fn)


def cut_over(axis: str, shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout with one more cut: over `axis`, on the first dim that it divides.

    Example:
      >>> cut_over("dp", (3, 8), Layout(((), ("tp",))), {"dp": 2, "tp": 2})
      Layout(dims=((), ('tp', 'dp')), partial=())
    """
    if axis in layout.shard_axes:
        return layout
    for dim, axes in enumerate(layout.dims):
        if shape[dim] and shape[dim] % shards_on((*axes, axis), sizes) == 0:
            return layout.with_dim(dim, (*axes, axis))
    return layout
