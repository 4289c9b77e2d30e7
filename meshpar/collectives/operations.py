"""The collectives that move and combine arrays."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.arrays import as_array, moving
from meshpar.collectives.call import Call, calling
from meshpar.collectives.lists import check_alike, filled, per_leaf, rows_of_each
from meshpar.collectives.reduce_op import ReduceOp, check_reduction
from meshpar.collectives.split_sizes import checked_split_sizes
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = [
    "all_gather",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

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
    with calling("all_reduce(tensor)", group, timeout, tensor=tensor) as call:

        def one(leaf: Any) -> jax.Array:
            x = as_array(leaf)
            return call.run("all_reduce", x, check_reduction(op, x))

        return call.done(lambda: jax.tree.map(one, tensor), sync_op)


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
    with calling("reduce(tensor)", group, timeout, tensor=tensor, dst=dst) as call:
        call.check_rank("dst", dst)

        def one(leaf: Any) -> jax.Array:
            x = as_array(leaf)
            return call.run("reduce", x, dst, check_reduction(op, x))

        return call.done(lambda: jax.tree.map(one, tensor), sync_op)


def broadcast(
    tensor: Any,
    src: int,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Every rank gets the arrays of rank `src`, bit for bit.

    Args:
      tensor: an array, or a pytree of arrays, of the same shapes on all ranks; what the ranks other
        than `src` hold does not matter.
      src: a global rank of the group, read as `dst` of `reduce`.
      group: the ranks; `None` is the world. A rank outside keeps its array.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      The arrays of `src`.

    Raises:
      CollectiveError: `src` is outside the group, or no ranks here.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> run = mp.spmd(lambda x: mp.broadcast(x, src=0), mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3]))
      Array([3], dtype=int32)

    Follows `paddle.distributed.broadcast` (3.3.1), which writes into `tensor`.
    """
    with calling("broadcast(tensor)", group, timeout, tensor=tensor, src=src) as call:
        call.check_rank("src", src)

        def one(leaf: Any) -> jax.Array:
            return moving(lambda x: call.run("broadcast", x, src), leaf)

        return call.done(lambda: jax.tree.map(one, tensor), sync_op)


def all_gather(
    tensor_list: Any,
    tensor: Any = None,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Every rank gets the arrays of all ranks.

    Args:
      tensor_list: the list to fill, empty or with one item for each rank; an array here asks for
        one array, joined along dim 0. With this argument alone, `all_gather(x)`, it is the `tensor`
        and a new list is returned.
      tensor: an array, or a pytree of arrays, of the same shapes on all ranks.
      group: the ranks; `None` is the world. A rank outside gets zeros.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      The list, in the group's rank order, filled in place as well; or the joined array.

    Raises:
      CollectiveError: a list of another length, or no ranks here.

    Bytes sent per rank for s bytes and n ranks: s*(n-1).

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> run = mp.spmd(lambda x: mp.all_gather(x), mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3]))
      [Array([3], dtype=int32)]

    Follows `paddle.distributed.all_gather` (3.3.1).
    """
    target, source = (None, tensor_list) if tensor is None else (tensor_list, tensor)
    with calling("all_gather(tensor)", group, timeout, tensor=source) as call:
        call.check_target("tensor_list", target)

        def one(leaf: Any) -> list[jax.Array]:
            return moving(partial(call.run, "all_gather"), leaf)

        return call.done(lambda: filled(target, per_leaf(one, source)), sync_op)


def gather(
    tensor: Any,
    gather_list: list[Any] | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Rank `dst` gets the arrays of all ranks.

    Args:
      tensor: an array, or a pytree of arrays, of the same shapes on all ranks.
      gather_list: the list to fill, empty or with one item for each rank.
      dst: a global rank of the group, read as `dst` of `reduce`.
      group: the ranks; `None` is the world.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      On `dst` the list, in the group's rank order, filled in place as well. Elsewhere an empty list
      between processes, and zeros inside a region, where all ranks run one program.

    Raises:
      CollectiveError: a list of another length, `dst` outside the group, or no ranks here.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> run = mp.spmd(lambda x: mp.gather(x, dst=0), mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3]))
      [Array([3], dtype=int32)]

    Follows `paddle.distributed.gather` (3.3.1).
    """
    with calling("gather(tensor)", group, timeout, tensor=tensor, dst=dst) as call:
        call.check_rank("dst", dst)
        call.check_target("gather_list", gather_list)

        def one(leaf: Any) -> list[jax.Array]:
            return moving(lambda x: call.run("gather", x, dst), leaf)

        def gathered() -> list[Any]:
            values = per_leaf(one, tensor)
            return filled(gather_list if values else None, values)

        return call.done(gathered, sync_op)


def scatter(
    tensor: Any,
    tensor_list: Sequence[Any] | jax.Array | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    timeout: Timeout = None,
) -> Any:
    """Rank `src` hands each rank one array of its list.

    Args:
      tensor: an array (or pytree) like the one that this rank gets; `None` where `tensor_list` is
        given.
      tensor_list: on `src` one item for each rank, of equal shapes, or one array whose dim 0 is cut
        into equal parts. Between processes the other ranks leave it out; a region runs one program
        on all ranks, which gives it.
      src: a global rank of the group, read as `dst` of `reduce`.
      group: the ranks; `None` is the world. A rank outside keeps `tensor`, or gets zeros.
      sync_op: False gives a `Task` that holds the result.
      timeout: seconds until it raises; between processes only.

    Returns:
      This rank's item of the list of `src`.

    Raises:
      CollectiveError: a list of another length, items of differing shapes, `src` outside the
        group, or no ranks here.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> own = lambda x: mp.scatter(None, [x], src=0)
      >>> run = mp.spmd(own, mesh, [[mp.Shard(0)]], [mp.Shard(0)])
      >>> run(np.array([3]))
      Array([3], dtype=int32)

    Follows `paddle.distributed.scatter` (3.3.1), which writes into `tensor`.
    """
    arguments = {"tensor": tensor, "tensor_list": tensor_list, "src": src}
    with calling("scatter(tensor_list)", group, timeout, **arguments) as call:
        call.check_rank("src", src)
        if tensor_list is None:
            if tensor is None or call.region is not None or call.is_own_rank(src):
                raise CollectiveError(
                    "there is no list.",
                    because="rank src gives one item for each rank"
                    if tensor is not None
                    else "`tensor` says what this rank gets, or `tensor_list` does",
                )

            def received(leaf: Any) -> jax.Array:
                return moving(lambda x: call.run("scatter", None, src, like=x), leaf)

            return call.done(lambda: jax.tree.map(received, tensor), sync_op)
        items = _items(call, "tensor_list", tensor_list)
        check_alike("tensor_list", items, tensor)
        like = items[0] if tensor is None else tensor

        def one(*leaves: Any) -> jax.Array:
            return moving(lambda x, *xs: call.run("scatter", xs, src, like=x), *leaves)

        return call.done(lambda: jax.tree.map(one, like, *items), sync_op)


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
    with calling("reduce_scatter(tensor_list)", group, timeout, tensor_list=source) as call:
        items = _items(call, "tensor_list", source)
        check_alike("tensor_list", items, like)

        def one(*leaves: Any) -> jax.Array:
            xs = [as_array(leaf) for leaf in leaves]
            return call.run("reduce_scatter", xs, check_reduction(op, xs[0]))

        return call.done(lambda: jax.tree.map(one, *items), sync_op)


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
    with calling("alltoall(in_tensor_list)", group, timeout, in_tensor_list=source) as call:
        call.check_target("out_tensor_list", target)
        items = _items(call, "in_tensor_list", source)
        check_alike("in_tensor_list", items)

        def one(*leaves: Any) -> list[jax.Array]:
            return moving(lambda *xs: call.run("alltoall", xs), *leaves)

        def moved() -> Any:
            values = per_leaf(one, *items)
            if target is None and hasattr(source, "shape"):
                return jnp.concatenate(values)
            return filled(target, values)

        return call.done(moved, sync_op)


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
    with calling("alltoall_single(in_tensor)", group, timeout, in_tensor=source) as call:
        x = as_array(source)
        sizes = checked_split_sizes(x, in_split_sizes, out_split_sizes, like, call)
        return call.done(lambda: call.run("alltoall_single", x, *sizes), sync_op)


def _items(call: Call, what: str, given: Any) -> list[Any]:
    """A list with an item for each rank, or an array cut into one."""
    if hasattr(given, "shape"):
        return rows_of_each(as_array(given), call.group.nranks)
    if not isinstance(given, (list, tuple)):
        raise CollectiveError(
            f"{what} is a {type(given).__name__}; it is a list with an item for each rank, or one "
            "array whose dim 0 is cut."
        )
    call.check_length(what, given)
    return list(given)
