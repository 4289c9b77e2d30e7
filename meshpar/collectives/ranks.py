"""Which rank this is, of how many."""

from __future__ import annotations

import jax

from meshpar.collectives import inside, processes
from meshpar.collectives.call import calling
from meshpar.collectives.groups import process_group_of
from meshpar.collectives.region import current_region
from meshpar.errors import MeshparError
from meshpar.mesh import Group

__all__ = ["get_rank", "get_world_size"]


def get_rank(group: Group | None = None) -> int | jax.Array:
    """The rank that runs this code.

    Args:
      group: `None` asks for the rank in the world, else for the position in the group.

    Returns:
      Inside a region a traced int32 scalar, that of the device; outside an int, that of the
      process, 0 where it runs alone. -1 outside the group.

    Raises:
      CollectiveError: the group has nothing to do with the region.

    Example:
      >>> import meshpar as mp
      >>> get_rank()
      0

    Follows `paddle.distributed.get_rank` (3.3.1).
    """
    if current_region() is not None:
        with calling("get_rank(group)", group) as call:
            return inside.rank() if group is None else inside.position(call.group)
    rank = processes.process_rank()
    return rank if group is None else _of_processes("get_rank(group)", group).get_group_rank(rank)


def get_world_size(group: Group | None = None) -> int:
    """The number of ranks of the world, or of a group.

    Args:
      group: `None` asks for the world: the devices of the region inside one, the processes
        outside, 1 where this one runs alone.

    Returns:
      An int, also inside a region; -1 for a group of processes that this one is not in.

    Example:
      >>> import meshpar as mp
      >>> get_world_size()
      1

    Follows `paddle.distributed.get_world_size` (3.3.1).
    """
    region = current_region()
    if region is not None:
        return region.world.nranks if group is None else group.nranks
    if group is None:
        return processes.process_count()
    own = _of_processes("get_world_size(group)", group)
    return own.nranks if own.get_group_rank(processes.process_rank()) >= 0 else -1


def _of_processes(call: str, group: Group) -> Group:
    try:
        return process_group_of(group)
    except MeshparError as error:
        raise error.within(call) from None
