"""Sending to one rank and receiving from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import jax

from meshpar.collectives import between, inside
from meshpar.collectives.arrays import as_array, per_array
from meshpar.collectives.call import calling
from meshpar.collectives.groups import check_member, process_group_of, seconds, world
from meshpar.collectives.p2p_op import P2POp
from meshpar.collectives.processes import process_rank
from meshpar.collectives.region import current_region
from meshpar.collectives.task import Task
from meshpar.errors import CollectiveError, MeshparError
from meshpar.mesh import Group

__all__ = ["batch_isend_irecv", "irecv", "isend", "recv", "send"]

Timeout = float | timedelta | None


def send(
    tensor: Any,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Sends arrays to rank `dst`, which calls `recv` with arrays of these shapes and dtypes.

    Args:
      tensor: an array, or a pytree of arrays.
      dst: a global rank of the group.
      group: the ranks; `None` is the world.
      sync_op: False gives a `Task`.
      timeout: seconds until it raises.

    Returns:
      Nothing, or the task.

    Raises:
      CollectiveError: `dst` is outside the group; or inside a region, where all ranks run one
        program: `batch_isend_irecv` sends there.

    Follows `paddle.distributed.send` (3.3.1).
    """
    with calling("send(tensor)", group, timeout, tensor=tensor, dst=dst) as call:
        call.check_rank("dst", dst)

        def sent(terms: between.Terms | None = None) -> None:
            per_array(lambda x: call.run("send", as_array(x), dst, terms=terms), tensor)

        if call.region is not None or (sync_op and between.runs_here()):
            return sent()
        started = between.start(sent, (process_rank(), dst), call.terms.timeout)
        return started.result() if sync_op else call.task(started)


def recv(
    tensor: Any,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Receives arrays from rank `src`, which calls `send`.

    Args:
      tensor: an array, or a pytree of arrays, of the shapes and dtypes to be received.
      src: a global rank of the group.
      group: the ranks; `None` is the world.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises.

    Returns:
      The arrays of `src`.

    Raises:
      CollectiveError: `src` is outside the group; or inside a region, as `send`.

    Follows `paddle.distributed.recv` (3.3.1), which writes into `tensor`.
    """
    with calling("recv(tensor)", group, timeout, tensor=tensor, src=src) as call:
        call.check_rank("src", src)

        def got(terms: between.Terms | None = None) -> Any:
            return per_array(lambda x: call.run("recv", as_array(x), src, terms=terms), tensor)

        if call.region is not None or (sync_op and between.runs_here()):
            return got()
        started = between.start(got, (src, process_rank()), call.terms.timeout)
        return started.result() if sync_op else call.task(started)


def isend(tensor: Any, dst: int, group: Group | None = None, *, timeout: Timeout = None) -> Task:
    """`send` with `sync_op=False`.

    Follows `paddle.distributed.isend` (3.3.1).
    """
    return send(tensor, dst, group, sync_op=False, timeout=timeout)


def irecv(
    tensor: Any, src: int | None = None, group: Group | None = None, *, timeout: Timeout = None
) -> Task:
    """`recv` with `sync_op=False`; the task holds the arrays.

    Follows `paddle.distributed.irecv` (3.3.1).
    """
    return recv(tensor, 0 if src is None else src, group, sync_op=False, timeout=timeout)


def batch_isend_irecv(p2p_op_list: Sequence[P2POp], *, timeout: Timeout = None) -> list[Task]:
    """Runs sends and receives together, in whatever order the ranks list them.

    Args:
      p2p_op_list: what to send and receive. Inside a region each send needs the receive that is its
        other end, and both become one `ppermute`: `peer` is a function or table rank -> peer.
        Evaluated on the ranks of the group; for a group of a mesh's axes on those of its first
        line, and every line does likewise.
      timeout: seconds until it raises; between processes only.

    Returns:
      One task for each operation. The `result` of a receive is what came, or the given array where
      nothing comes; that of a send is the array sent.

    Raises:
      CollectiveError: an empty list, a peer outside the group, sends and receives that are not each
        other's ends, or that meet in one rank.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> def shifted(x):
      ...     right = mp.P2POp(mp.isend, x, lambda rank: (rank + 1) % mp.get_world_size())
      ...     left = mp.P2POp(mp.irecv, x, lambda rank: (rank - 1) % mp.get_world_size())
      ...     return mp.batch_isend_irecv([right, left])[1].wait()
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> mp.spmd(shifted, mesh, [[mp.Shard(0)]], [mp.Shard(0)])(np.array([3]))
      Array([3], dtype=int32)

    Follows `paddle.distributed.batch_isend_irecv` (3.3.1).
    """
    operations = list(p2p_op_list)
    try:
        if not operations or not all(isinstance(op, P2POp) for op in operations):
            raise CollectiveError("p2p_op_list is a list of one or more mp.P2POp.")
        limit = seconds(timeout)
        if current_region() is not None:
            return [Task(result) for result in inside.batch_isend_irecv(operations, limit)]
        pending = between.batch_isend_irecv(_among_processes(operations), limit)
        return [Task(started=one) for one in pending]
    except MeshparError as error:
        raise error.within("batch_isend_irecv(p2p_op_list)") from None


def _among_processes(operations: Sequence[P2POp]) -> list[P2POp]:
    """The operations with groups of processes, and peers that are in them."""
    everyone = world(None)
    out: list[P2POp] = []
    for op in operations:
        group = process_group_of(op.group or everyone)
        check_member(f"the peer of {op.kind}", op.peer, group, None)
        out.append(replace(op, tensor=jax.tree.map(as_array, op.tensor), group=group))
    return out
