"""Collectives between processes, which do not exist yet: each raises `NotImplementedError`.

The signatures are those of `meshpar.collectives.inside`; `x` is one array of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from meshpar.collectives.p2p_op import P2POp

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]


def _missing(name: str) -> Callable[..., NoReturn]:
    def operation(*args: Any) -> NoReturn:
        raise NotImplementedError(f"{name} between processes")

    return operation


all_reduce = _missing("all_reduce")  # (x, op, group, timeout) -> Array
reduce = _missing("reduce")  # (x, dst, op, group, timeout) -> Array, the input where not dst
broadcast = _missing("broadcast")  # (x, src, group, timeout) -> Array
all_gather = _missing("all_gather")  # (x, group, timeout) -> list of arrays, in group rank order
gather = _missing("gather")  # (x, dst, group, timeout) -> list of arrays, empty where not dst
scatter = _missing("scatter")  # (xs | None, src, group, timeout, like) -> Array
reduce_scatter = _missing("reduce_scatter")  # (xs, op, group, timeout) -> Array
alltoall = _missing("alltoall")  # (xs, group, timeout) -> list of arrays
alltoall_single = _missing("alltoall_single")  # (x, in_sizes, out_sizes, group, timeout) -> Array
send = _missing("send")  # (x, dst, group, timeout) -> None
recv = _missing("recv")  # (like, src, group, timeout) -> Array
barrier = _missing("barrier")  # (group, timeout) -> None
all_gather_object = _missing("all_gather_object")  # (object, group, timeout) -> list of objects
gather_object = _missing("gather_object")  # (object, dst, group, timeout) -> list of objects
broadcast_object_list = _missing("broadcast_object_list")  # (objects, src, group, timeout) -> list
scatter_object_list = _missing("scatter_object_list")  # (objects, src, group, timeout) -> object
send_object_list = _missing("send_object_list")  # (objects, dst, group, timeout) -> None
recv_object_list = _missing("recv_object_list")  # (count, src, group, timeout) -> list


def batch_isend_irecv(operations: Sequence[P2POp], timeout: float | None) -> list[Any]:
    """Each operation is a `P2POp`; gives one result for each, what `irecv` received."""
    raise NotImplementedError("batch_isend_irecv between processes")
