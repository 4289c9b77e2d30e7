"""Collectives of Python objects, which are pickled; between processes only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from meshpar.collectives.call import Call, calling
from meshpar.collectives.lists import check_length
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

Timeout = float | timedelta | None


def _check_place(call: Call) -> None:
    if call.region is not None:
        raise CollectiveError(
            "Python objects do not travel inside a region.",
            because="the region is one compiled program of arrays, and its ranks share their "
            "objects already",
            instead="the object itself; or between processes, outside mp.spmd",
        )


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group | None = None, *, timeout: Timeout = None
) -> list[Any]:
    """Every rank gets the objects of all ranks.

    Args:
      object_list: the list to fill, in the group's rank order.
      obj: what this rank gives; it is pickled.
      group: the processes; `None` is the world.
      timeout: seconds until it raises.

    Returns:
      The list.

    Raises:
      CollectiveError: inside a region, or no processes here.

    Follows `paddle.distributed.all_gather_object` (3.3.1).
    """
    with calling("all_gather_object(obj)", group, timeout) as call:
        _check_place(call)
        object_list[:] = call.run("all_gather_object", obj)
        return object_list


def broadcast_object_list(
    object_list: list[Any], src: int, group: Group | None = None, *, timeout: Timeout = None
) -> list[Any]:
    """The items of the list become those of rank `src`.

    Args:
      object_list: as long on every rank.
      src: a global rank of the group.
      group: the processes; `None` is the world.
      timeout: seconds until it raises.

    Returns:
      The list.

    Raises:
      CollectiveError: `src` is outside the group; inside a region; or no processes here.

    Follows `paddle.distributed.broadcast_object_list` (3.3.1).
    """
    with calling("broadcast_object_list(object_list)", group, timeout, src=src) as call:
        _check_place(call)
        call.check_rank("src", src)
        object_list[:] = call.run("broadcast_object_list", object_list, src)
        return object_list


def scatter_object_list(
    out_object_list: list[Any],
    in_object_list: Sequence[Any] | None = None,
    src: int = 0,
    group: Group | None = None,
    *,
    timeout: Timeout = None,
) -> list[Any]:
    """Rank `src` hands each rank one object of its list.

    Args:
      out_object_list: becomes a list of that one object.
      in_object_list: on `src` one object for each rank.
      src: a global rank of the group.
      group: the processes; `None` is the world.
      timeout: seconds until it raises.

    Returns:
      `out_object_list`.

    Raises:
      CollectiveError: a list of another length on `src`; `src` is outside the group; inside a
        region; or no processes here.

    Follows `paddle.distributed.scatter_object_list` (3.3.1).
    """
    with calling("scatter_object_list(in_object_list)", group, timeout, src=src) as call:
        _check_place(call)
        call.check_rank("src", src)
        if call.is_own_rank(src):
            check_length("in_object_list", in_object_list or (), call.group.nranks)
        out_object_list[:] = [call.run("scatter_object_list", in_object_list, src)]
        return out_object_list


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group | None = None,
    dst_in_group: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Sends objects to one rank, which calls `recv_object_list` with a list as long.

    Args:
      object_list: what is sent.
      dst: a global rank of the group; or
      group: the processes; `None` is the world.
      dst_in_group: a position in the group.
      timeout: seconds until it raises.

    Raises:
      CollectiveError: an empty list; both or neither of `dst` and `dst_in_group`, or one outside
        the group; inside a region; or no processes here.

    Follows `paddle.distributed.send_object_list` (3.3.1).
    """
    with calling("send_object_list(object_list)", group, timeout, dst=dst) as call:
        _check_place(call)
        rank = _one_of(call, "dst", dst, dst_in_group)
        _check_not_empty(object_list)
        call.run("send_object_list", list(object_list), rank)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group | None = None,
    src_in_group: int | None = None,
    *,
    timeout: Timeout = None,
) -> list[Any]:
    """Receives the objects of a `send_object_list`.

    Args:
      object_list: as long as the list that is sent; its items are replaced.
      src: a global rank of the group; or
      group: the processes; `None` is the world.
      src_in_group: a position in the group.
      timeout: seconds until it raises.

    Returns:
      The list.

    Raises:
      CollectiveError: as `send_object_list`.

    Follows `paddle.distributed.recv_object_list` (3.3.1).
    """
    with calling("recv_object_list(object_list)", group, timeout, src=src) as call:
        _check_place(call)
        rank = _one_of(call, "src", src, src_in_group)
        _check_not_empty(object_list)
        object_list[:] = call.run("recv_object_list", len(object_list), rank)
        return object_list


def _one_of(call: Call, what: str, rank: int | None, position: int | None) -> int:
    if (rank is None) == (position is None):
        raise CollectiveError(f"give one of {what} and {what}_in_group.")
    if position is not None:
        if not 0 <= position < call.group.nranks:
            raise CollectiveError(
                f"{what}_in_group={position} is not there.",
                because=f"the group has the positions 0 to {call.group.nranks - 1}",
            )
        return call.group.ranks[position]
    call.check_rank(what, rank)
    assert rank is not None, "one of the two is given"
    return rank


def _check_not_empty(objects: Sequence[Any]) -> None:
    if not objects:
        raise CollectiveError("object_list is empty; its length is the number of objects.")
