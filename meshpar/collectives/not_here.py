"""Names of `paddle.distributed` that have no meaning here; each says what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from meshpar.mesh import Group

__all__ = [
    "create_nccl_config",
    "restart_process_group",
    "shutdown_process_group",
    "split",
]


def shutdown_process_group(group: Group | None = None) -> NoReturn:
    """Is not there: XLA owns the communicators of a group and gives no way to stop them.

    Raises:
      NotImplementedError: always.

    Follows `paddle.distributed.shutdown_process_group` (3.3.1).
    """
    raise NotImplementedError(
        "shutdown_process_group: XLA owns the communicators and keeps them; "
        "mp.destroy_process_group(group) forgets a group, and without one leaves the job"
    )


def restart_process_group(group: Group | None = None) -> NoReturn:
    """Is not there, as `shutdown_process_group` is not.

    Raises:
      NotImplementedError: always.

    Follows `paddle.distributed.restart_process_group` (3.3.1).
    """
    raise NotImplementedError(
        "restart_process_group: XLA owns the communicators, which are never stopped; "
        "mp.init_parallel_env() joins a job anew after mp.destroy_process_group()"
    )


def create_nccl_config(nccl_config: Mapping[str, int | str] | None = None) -> None:
    """`None`, as in Paddle wherever the collectives are not NCCL's.

    Args:
      nccl_config: NCCL's options.

    Raises:
      NotImplementedError: options on GPUs, where XLA sets NCCL up.

    Example:
      >>> create_nccl_config({"commName": "tp"})

    Follows `paddle.distributed.create_nccl_config` (3.3.1).
    """
    if nccl_config and jax.default_backend() == "gpu":
        raise NotImplementedError(
            "create_nccl_config(nccl_config): XLA sets NCCL up, by XLA_FLAGS and the NCCL_* "
            "variables of the environment"
        )


def split(
    x: Any,
    size: tuple[int, int],
    operation: str,
    axis: int = 0,
    num_partitions: int = 1,
    gather_out: bool = True,
    weight_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> NoReturn:
    """Is not there: in Paddle it makes a layer of a static program, whose weights are split.

    Raises:
      NotImplementedError: always.

    Follows `paddle.distributed.split` (3.3.1).
    """
    raise NotImplementedError(
        "split: a layer is split by the placements of its weights, mp.shard_tensor(kernel, mesh, "
        "[mp.Shard(1)]) or mp.shard_by_rules for a whole model; mp.jit and mp.to_static do the rest"
    )
