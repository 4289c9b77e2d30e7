"""Groups: making and finding them, and what they mean where a collective is called."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import jax

from meshpar._jax import is_tracer
from meshpar.collectives import processes
from meshpar.collectives.between.world import joined
from meshpar.collectives.region import Region, current_region
from meshpar.collectives.start import leave
from meshpar.errors import CollectiveError
from meshpar.mesh import Group, ranked_devices

__all__ = [
    "check_member",
    "destroy_process_group",
    "get_backend",
    "get_group",
    "is_available",
    "new_group",
    "process_group_of",
    "seconds",
    "world",
]


class _Groups:
    """The groups that `new_group` made, by number."""

    def __init__(self) -> None:
        self.by_id: dict[int, Group] = {}
        self.next_id = 1


_groups = _Groups()


def new_group(
    ranks: Iterable[int] | None = None,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    nccl_comm_init_option: int = 0,
    nccl_config: None = None,
) -> Group:
    """A group of some ranks, in ascending order.

    Args:
      ranks: its members; devices of the region where it is used inside `mp.spmd`, processes
        outside. `None` takes all that are there.
      backend: JAX chooses; what it chose may be named.
      timeout: seconds (or a `timedelta`) after which its collectives between processes raise.
      nccl_comm_init_option, nccl_config: only their defaults act; NCCL is XLA's.

    Returns:
      The group, also in processes that are not in it. Nothing is sent, so that processes may make
      groups in any order.

    Raises:
      CollectiveError: ranks that are negative or no integers, repeat, or are none at all.
      NotImplementedError: an option of NCCL.

    Example:
      >>> new_group([2, 0]).ranks
      (0, 2)

    Follows `paddle.distributed.new_group` (3.3.1).
    """
    if nccl_comm_init_option or nccl_config is not None:
        raise NotImplementedError(
            "new_group(nccl_comm_init_option, nccl_config): XLA sets NCCL up, by XLA_FLAGS and the "
            "NCCL_* variables of the environment"
        )
    if ranks is None:
        members = world(current_region()).ranks
    else:
        given = list(ranks)
        wrong = next((r for r in given if isinstance(r, bool) or not hasattr(r, "__index__")), None)
        if wrong is not None or not given or min(given) < 0 or len(set(given)) < len(given):
            raise CollectiveError(
                f"new_group(ranks={given}): a group has distinct ranks >= 0, at least one."
            )
        members = tuple(sorted(int(rank) for rank in given))
    _check_backend(backend, "new_group(backend)")
    group = Group(members, id=_groups.next_id, timeout=seconds(timeout))
    _groups.by_id[_groups.next_id] = group
    _groups.next_id += 1
    return group


def seconds(timeout: float | timedelta | None) -> float | None:
    """A time limit in seconds.

    Raises:
      CollectiveError: it is not positive.
    """
    if timeout is None:
        return None
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not limit > 0:
        raise CollectiveError(f"timeout={timeout!r}: a time limit is a number of seconds > 0.")
    return limit


def get_group(id: int = 0) -> Group | None:
    """The group with a number; 0 is the world. Warns and returns `None` where there is none.

    Example:
      >>> group = new_group([0, 1])
      >>> get_group(group.id) == group
      True

    Follows `paddle.distributed.get_group` (3.3.1).
    """
    region = current_region()
    if id == 0 and (region is not None or processes.is_initialized()):
        return world(region)
    if id in _groups.by_id:
        return _groups.by_id[id]
    warnings.warn(f"get_group({id}): there is no such group", stacklevel=2)
    return None


def destroy_process_group(group: Group | None = None) -> None:
    """Forgets a group made by `new_group`; without `group`, or with the world, leaves the job.

    All processes leave together: each waits for the others. Their arrays stay, until another
    `init_parallel_env` starts JAX's devices anew.

    Raises:
      CollectiveError: the group is not known (any more).

    Follows `paddle.distributed.destroy_process_group` (3.3.1).
    """
    if group is None or group.id == 0:
        _groups.by_id.clear()
        leave()
        return
    if group.id is None or _groups.by_id.pop(group.id, None) is None:
        raise CollectiveError(
            f"destroy_process_group({group!s}): no such group.",
            because="mp.new_group did not make it, or it is destroyed already",
        )


def get_backend(group: Group | None = None) -> str:
    """What carries a group's collectives, in Paddle's words: GLOO on CPU, NCCL on GPU, XLA on TPU.

    Example:
      >>> get_backend()
      'GLOO'

    Follows `paddle.distributed.get_backend` (3.3.1).
    """
    return {"cpu": "GLOO", "gpu": "NCCL"}.get(jax.default_backend(), "XLA")


def _check_backend(backend: str | None, where: str) -> None:
    if backend is None or backend.upper() == get_backend():
        return
    raise CollectiveError(
        f"{where}: {backend!r} is not there.",
        because=f"JAX runs on {jax.default_backend()}, whose collectives are {get_backend()}",
        instead="leave `backend` out",
    )


def is_available() -> bool:
    """Whether distributed computing is available; always.

    Example:
      >>> is_available()
      True

    Follows `paddle.distributed.is_available` (3.3.1).
    """
    return True


def world(region: Region | None) -> Group:
    """All ranks: the region's devices inside one, the processes outside.

    Raises:
      CollectiveError: neither in a region nor among processes.
    """
    if region is not None:
        return region.world
    job = joined()
    if job is None:
        raise CollectiveError(
            "there are no ranks here.",
            because="a rank is a device inside a region, and a process after "
            "mp.init_parallel_env(); this is neither",
            instead="mp.spmd(fn, mesh, in_placements, out_placements) runs fn on every device of a "
            "mesh; python -m meshpar.launch --nproc_per_node 2 script.py starts processes, which "
            "call mp.init_parallel_env()",
        )
    return job.everyone


def check_member(what: str, rank: Any, group: Group, region: Region | None) -> None:
    """Checks that a rank is a member of a group.

    In a region a group of a mesh's axes has members in every line along them, and a rank stands for
    the member at its coordinate.

    Raises:
      CollectiveError: it is not.
    """
    members = group.ranks
    if region is not None and group.mesh is not None:
        members = tuple(region.mesh.process_ids)
    if is_tracer(rank):
        raise CollectiveError(
            f"{what} is a traced value.",
            because="who sends to whom is known when the program is compiled",
            instead="an int; mp.get_rank() is traced inside a region, mp.get_world_size() is not",
        )
    if isinstance(rank, bool) or not hasattr(rank, "__index__") or rank not in members:
        raise CollectiveError(
            f"{what} is {rank!r}, which is not a rank of the group.",
            because=f"its ranks are {', '.join(map(str, members))}, numbered as in the world",
        )


def process_group_of(group: Group) -> Group:
    """The processes that a group stands for outside a region.

    Raises:
      CollectiveError: a process that is not there, or several devices of one process.
    """
    count = processes.process_count()
    if group.mesh is None:
        outside = [rank for rank in group.ranks if rank >= count]
        if outside:
            raise CollectiveError(
                f"rank {outside[0]} is not there.",
                because=f"there are {count} process(es), ranks 0 to {count - 1}",
            )
        return group
    devices = ranked_devices()
    owners = [devices[rank].process_index for rank in group.ranks]
    if len(set(owners)) < len(owners):
        raise CollectiveError(
            "outside a region a rank is a process, and here one process owns several devices.",
            group=group,
            because=f"its devices {list(group.ranks)} belong to the processes {owners}",
            instead="mp.spmd(fn, mesh, in_placements, out_placements), where a rank is a device",
        )
    return replace(group, ranks=tuple(owners), mesh=None, axes=())
