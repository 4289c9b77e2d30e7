"""The collectives that move arrays from one rank to all, or from all to one or all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import jax

from meshpar.collectives.arrays import moving, per_array
from meshpar.collectives.call import calling
from meshpar.collectives.lists import check_alike, check_target, filled, items_of_each, per_leaf
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["all_gather", "broadcast", "gather", "scatter"]

Timeout = float | timedelta | None


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
    with calling("broadcast(tensor)", group, timeout, sync_op, tensor=tensor, src=src) as call:
        call.check_rank("src", src)

        def one(leaf: Any) -> jax.Array:
            return moving(lambda x: call.run("broadcast", x, src), leaf)

        return call.done(per_array, one, tensor)


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
    with calling("all_gather(tensor)", group, timeout, sync_op, tensor=source) as call:
        check_target("tensor_list", target, call.group.nranks)

        def one(leaf: Any) -> list[jax.Array]:
            return moving(partial(call.run, "all_gather"), leaf)

        return call.done(filled, target, per_leaf(one, source))


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
    with calling("gather(tensor)", group, timeout, sync_op, tensor=tensor, dst=dst) as call:
        call.check_rank("dst", dst)
        check_target("gather_list", gather_list, call.group.nranks)

        def one(leaf: Any) -> list[jax.Array]:
            return moving(lambda x: call.run("gather", x, dst), leaf)

        def gathered() -> list[Any]:
            values = per_leaf(one, tensor)
            return filled(gather_list if values else None, values)

        return call.done(gathered)


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
    with calling("scatter(tensor_list)", group, timeout, sync_op, **arguments) as call:
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

            return call.done(per_array, received, tensor)
        items = items_of_each("tensor_list", tensor_list, call.group.nranks)
        check_alike("tensor_list", items, tensor)
        like = items[0] if tensor is None else tensor

        def one(*leaves: Any) -> jax.Array:
            return moving(lambda x, *xs: call.run("scatter", xs, src, like=x), *leaves)

        return call.done(jax.tree.map, one, like, *items)
