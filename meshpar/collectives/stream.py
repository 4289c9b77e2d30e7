"""The collectives of `paddle.distributed.stream`: with `use_calc_stream`, and giving tasks.

Streams are XLA's, so `use_calc_stream` decides nothing; it is checked as in Paddle, which takes it
with `sync_op=True` only. Each function returns a `Task` whose `wait()` gives the result.

Follows `paddle.distributed.communication.stream` (3.3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshpar.collectives import exchange, movement, point_to_point, reductions
from meshpar.collectives.reduce_op import ReduceOp
from meshpar.collectives.task import Task
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = [
    "all_gather",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def _check(name: str, sync_op: bool, use_calc_stream: bool) -> None:
    if use_calc_stream and not sync_op:
        raise CollectiveError(
            f"stream.{name}(use_calc_stream=True, sync_op=False): the compute stream has no task "
            "to wait for, so that it takes sync_op=True."
        )


def _task(result: Any, sync_op: bool) -> Task:
    return result if isinstance(result, Task) else Task(result, sync_op)


def all_reduce(
    tensor: Any,
    op: ReduceOp | int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.all_reduce` as a task."""
    _check("all_reduce", sync_op, use_calc_stream)
    return _task(reductions.all_reduce(tensor, op, group, sync_op), sync_op)


def reduce(
    tensor: Any,
    dst: int = 0,
    op: ReduceOp | int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.reduce` as a task."""
    _check("reduce", sync_op, use_calc_stream)
    return _task(reductions.reduce(tensor, dst, op, group, sync_op), sync_op)


def broadcast(
    tensor: Any,
    src: int,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.broadcast` as a task."""
    _check("broadcast", sync_op, use_calc_stream)
    return _task(movement.broadcast(tensor, src, group, sync_op), sync_op)


def all_gather(
    tensor_or_tensor_list: Any,
    tensor: Any = None,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.all_gather` as a task."""
    _check("all_gather", sync_op, use_calc_stream)
    return _task(movement.all_gather(tensor_or_tensor_list, tensor, group, sync_op), sync_op)


def gather(
    tensor: Any,
    gather_list: list[Any] | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.gather` as a task."""
    _check("gather", sync_op, use_calc_stream)
    return _task(movement.gather(tensor, gather_list, dst, group, sync_op), sync_op)


def scatter(
    tensor: Any,
    tensor_or_tensor_list: Any = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.scatter` as a task."""
    _check("scatter", sync_op, use_calc_stream)
    return _task(movement.scatter(tensor, tensor_or_tensor_list, src, group, sync_op), sync_op)


def reduce_scatter(
    tensor: Any,
    tensor_or_tensor_list: Any = None,
    op: ReduceOp | int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.reduce_scatter` as a task."""
    _check("reduce_scatter", sync_op, use_calc_stream)
    return _task(
        reductions.reduce_scatter(tensor, tensor_or_tensor_list, op, group, sync_op), sync_op
    )


def alltoall(
    out_tensor_or_tensor_list: Any,
    in_tensor_or_tensor_list: Any = None,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.alltoall` as a task."""
    _check("alltoall", sync_op, use_calc_stream)
    result = exchange.alltoall(out_tensor_or_tensor_list, in_tensor_or_tensor_list, group, sync_op)
    return _task(result, sync_op)


def alltoall_single(
    out_tensor: Any,
    in_tensor: Any = None,
    out_split_sizes: Sequence[Any] | None = None,
    in_split_sizes: Sequence[Any] | None = None,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.alltoall_single` as a task; as in Paddle, `out_split_sizes` comes first here."""
    _check("alltoall_single", sync_op, use_calc_stream)
    result = exchange.alltoall_single(
        out_tensor, in_tensor, in_split_sizes, out_split_sizes, group, sync_op
    )
    return _task(result, sync_op)


def send(
    tensor: Any,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.send` as a task."""
    _check("send", sync_op, use_calc_stream)
    return _task(point_to_point.send(tensor, dst, group, sync_op), sync_op)


def recv(
    tensor: Any,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task:
    """`mp.recv` as a task."""
    _check("recv", sync_op, use_calc_stream)
    return _task(point_to_point.recv(tensor, src, group, sync_op), sync_op)
