"""The collectives that combine the ranks' arrays."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import jax

from meshpar.collectives.arrays import as_array, per_array
from meshpar.collectives.call import calling
from meshpar.collectives.lists import check_alike, items_of_each
from meshpar.collectives.reduce_op import ReduceOp, check_reduction
from meshpar.mesh import Group

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

Timeout = float | timedelta | None


def all_reduce(
    tensor: Any,
    op: ReduceOp | int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Combines the ranks' arrays element by element; every rank gets the result.

    Args:
      tensor: an array, or a pytree of arrays, of the same shapes on all ranks.
      op: how they are combined; see `ReduceOp` for what it takes of each dtype.
      group: the ranks; `None` is the world. A rank outside keeps its array.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      The combined arrays, of the same shapes and dtypes.

    Raises:
      CollectiveError: a wrong operation, dtype or group, or no ranks here.

    Bytes sent per rank for s bytes and n ranks: 2*s*(n-1)/n; PROD gathers, s*(n-1).

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> total = mp.spmd(mp.all_reduce, mesh, [[mp.Shard(0)]], [mp.Replicate()])
      >>> total(np.array([3.0]))
      Array([3.], dtype=float32)

    Follows `paddle.distributed.all_reduce` (3.3.1), which writes into `tensor`.
    """
    with calling("all_reduce(tensor)", group, timeout, sync_op, tensor=tensor) as call:

        def one(leaf: Any) -> jax.Array:
            x = as_array(leaf)
            return call.run("all_reduce", x, check_reduction(op, x))

        return call.done(per_array, one, tensor)


def reduce(
    tensor: Any,
    dst: int,
    op: ReduceOp | int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Combines the ranks' arrays element by element; rank `dst` gets the result.

    Args:
      tensor: an array, or a pytree of arrays, of the same shapes on all ranks.
      dst: a global rank of the group. In a region, where a group of a mesh's axes stands for every
        line along them, it is the member at that rank's coordinate in each.
      op: how they are combined.
      group: the ranks; `None` is the world.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      The combined arrays on `dst`, the given ones elsewhere.

    Raises:
      CollectiveError: as `all_reduce`, or `dst` is outside the group.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> run = mp.spmd(lambda x: mp.reduce(x, dst=0), mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3]))
      Array([3], dtype=int32)

    Follows `paddle.distributed.reduce` (3.3.1). XLA has no reduction to one rank: it sends what
    `all_reduce` sends.
    """
    with calling("reduce(tensor)", group, timeout, sync_op, tensor=tensor, dst=dst) as call:
        call.check_rank("dst", dst)

        def one(leaf: Any) -> jax.Array:
            x = as_array(leaf)
            return call.run("reduce", x, dst, check_reduction(op, x))

        return call.done(per_array, one, tensor)


def reduce_scatter(
    tensor: Any,
    tensor_list: Sequence[Any] | jax.Array | None = None,
    op: ReduceOp | int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Combines the ranks' lists item by item; the i-th rank gets the i-th result.

    Args:
      tensor: an array (or pytree) like the result, or `None`. With this argument alone,
        `reduce_scatter(xs)`, it is the `tensor_list`.
      tensor_list: one item for each rank, of equal shapes, or one array whose dim 0 is cut into
        equal parts.
      op: how they are combined.
      group: the ranks; `None` is the world. A rank outside gets zeros in a region.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      This rank's combined item.

    Raises:
      CollectiveError: a list of another length, items of differing shapes, a wrong operation or
        dtype, or no ranks here.

    Bytes sent per rank for items of s bytes and n ranks: s*(n-1).

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> run = mp.spmd(lambda x: mp.reduce_scatter([x]), mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3]))
      Array([3], dtype=int32)

    Follows `paddle.distributed.reduce_scatter` (3.3.1), which writes into `tensor`.
    """
    like, source = (None, tensor) if tensor_list is None else (tensor, tensor_list)
    with calling(
        "reduce_scatter(tensor_list)", group, timeout, sync_op, tensor_list=source
    ) as call:
        items = items_of_each("tensor_list", source, call.group.nranks)
        check_alike("tensor_list", items, like)

        def one(*leaves: Any) -> jax.Array:
            xs = [as_array(leaf) for leaf in leaves]
            return call.run("reduce_scatter", xs, check_reduction(op, xs[0]))

        return call.done(jax.tree.map, one, *items)
