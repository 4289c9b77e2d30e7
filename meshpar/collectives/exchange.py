"""The collectives that move something from each rank to each other one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.arrays import as_array, moving
from meshpar.collectives.call import calling
from meshpar.collectives.lists import check_alike, check_target, filled, items_of_each, per_leaf
from meshpar.collectives.split_sizes import checked_split_sizes
from meshpar.mesh import Group

__all__ = ["alltoall", "alltoall_single"]

Timeout = float | timedelta | None


def alltoall(
    out_tensor_list: Any,
    in_tensor_list: Any = None,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """The j-th item of the i-th rank becomes the i-th item of the j-th rank.

    Args:
      out_tensor_list: the list to fill, empty or with one item for each rank; an array here asks
        for one array, joined along dim 0. With this argument alone, `alltoall(xs)`, it is the
        `in_tensor_list` and a new list is returned.
      in_tensor_list: one item for each rank, of equal shapes, or one array whose dim 0 is cut into
        equal parts; then one array is returned.
      group: the ranks; `None` is the world. A rank outside gets zeros in a region.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      The list, in the group's rank order, filled in place as well; or the joined array.

    Raises:
      CollectiveError: a list of another length, items of differing shapes, or no ranks here.

    Bytes sent per rank for items of s bytes and n ranks: s*(n-1).

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> run = mp.spmd(lambda x: mp.alltoall([x]), mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3]))
      [Array([3], dtype=int32)]

    Follows `paddle.distributed.alltoall` (3.3.1).
    """
    single = in_tensor_list is None
    target, source = (None, out_tensor_list) if single else (out_tensor_list, in_tensor_list)
    with calling(
        "alltoall(in_tensor_list)", group, timeout, sync_op, in_tensor_list=source
    ) as call:
        check_target("out_tensor_list", target, call.group.nranks)
        items = items_of_each("in_tensor_list", source, call.group.nranks)
        check_alike("in_tensor_list", items)

        def one(*leaves: Any) -> list[jax.Array]:
            return moving(lambda *xs: call.run("alltoall", xs), *leaves)

        def moved() -> Any:
            values = per_leaf(one, *items)
            if target is None and hasattr(source, "shape"):
                return jnp.concatenate(values)
            return filled(target, values)

        return call.done(moved)


def alltoall_single(
    out_tensor: Any,
    in_tensor: Any = None,
    in_split_sizes: Sequence[Any] | None = None,
    out_split_sizes: Sequence[Any] | None = None,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Cuts an array along dim 0, one part for each rank, and exchanges the parts.

    Args:
      out_tensor: an array like the result, or `None`. With this argument alone,
        `alltoall_single(x)`, it is the `in_tensor`.
      in_tensor: an array of shape `(rows, ...)`.
      in_split_sizes: the rows for each rank; equal parts where left out. Inside a region the whole
        table, `table[i][j]` the rows that the i-th rank sends to the j-th, the same on all ranks.
      out_split_sizes: the rows from each rank; between processes where `in_split_sizes` is given,
        inside a region never, as the table says it.
      group: the ranks; `None` is the world. A rank outside gets zeros in a region.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      The parts that this rank got, joined along dim 0 in the group's rank order. Inside a region,
      with a table, two arrays: the parts, followed by zero rows up to the most that any rank gets,
      and the number of rows from each rank, int32 of shape `(n,)`. There `in_tensor` has as many
      rows as any rank sends at most; those beyond what this rank sends do not matter.

    Raises:
      CollectiveError: sizes that do not add up to the rows, a dim that cannot be divided, or no
        ranks here.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> run = mp.spmd(lambda x: mp.alltoall_single(x), mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3, 4]))
      Array([3, 4], dtype=int32)

    Follows `paddle.distributed.alltoall_single` (3.3.1).
    """
    single = in_tensor is None
    like, source = (None, out_tensor) if single else (out_tensor, in_tensor)
    with calling("alltoall_single(in_tensor)", group, timeout, sync_op, in_tensor=source) as call:
        x = as_array(source)
        sizes = checked_split_sizes(x, in_split_sizes, out_split_sizes, like, call)
        return call.done(call.run, "alltoall_single", x, *sizes)
