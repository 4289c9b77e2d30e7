"""`DataParallel`: a model of each process, whose gradients are averaged between processes.

On a mesh there is no need for it: `mp.to_static` splits the batch and reduces the gradients inside
the compiled step. It is for training loops that are written for one process, and so came from
Paddle or PyTorch.
"""

# Flax and JAX are partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar._jax import is_tracer
from meshpar.collectives.groups import process_group_of, world
from meshpar.collectives.movement import broadcast
from meshpar.collectives.processes import is_initialized
from meshpar.collectives.reduce_op import ReduceOp
from meshpar.collectives.reductions import all_reduce
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["DataParallel"]


class DataParallel(nnx.Module):
    """A model whose gradients are averaged over the processes of a group.

    All processes begin with the state of the group's first one. The gradient of its parameters is
    averaged where `nnx.grad` or `jax.grad` runs as it stands, outside `jax.jit`; inside, where
    nothing can be sent between processes, `average_gradients` does it afterwards:

        grads = ddp.average_gradients(nnx.jit(nnx.grad(loss))(ddp.layers, batch))

    In a process alone it is the model and nothing more.

    Args:
      layers: the model, a flax nnx module.
      strategy: taken, as in Paddle, where it is for its static programs.
      comm_buffer_size: MB of gradients that one collective carries.
      last_comm_buffer_size: taken, as in Paddle; the last collective carries what is left.
      find_unused_parameters: taken, as in Paddle; a parameter that the model did not use has a
        gradient of zeros here, with which all ranks take part.
      group: the processes; `None` is the world.

    Raises:
      CollectiveError: this process is outside the group, or the ranks' models differ in shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> ddp = DataParallel(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
      >>> ddp(jnp.ones((3, 2))).shape
      (3, 1)

    Follows `paddle.DataParallel` (3.3.1).
    """

    def __init__(
        self,
        layers: nnx.Module,
        strategy: Any = None,
        comm_buffer_size: int = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Group | None = None,
    ) -> None:
        self.layers = layers
        self._bytes = int(comm_buffer_size * 2**20)
        self._group: Group | None = None
        self._averages = True
        if is_initialized():
            chosen = world(None) if group is None else process_group_of(group)
            self._group = chosen if chosen.nranks > 1 else None
        if self._group is not None:
            state = nnx.state(layers)
            nnx.update(layers, broadcast(state, self._group.ranks[0], self._group))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        layers: Any = self.layers
        if self._group is None or not self._averages:
            return layers(*args, **kwargs)
        graph, params, rest = nnx.split(layers, nnx.Param, ...)
        leaves, tree = jax.tree.flatten(params)
        leaves = _averaging(self._group, self._bytes)(tuple(leaves))
        model: Any = nnx.merge(graph, jax.tree.unflatten(tree, leaves), rest)
        out = model(*args, **kwargs)
        nnx.update(layers, nnx.state(model, nnx.Not(nnx.Param)))
        return out

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients stay those of this process, to be added up over several batches."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    def average_gradients(self, grads: Any) -> Any:
        """A pytree of gradients, or of anything else, averaged over the processes.

        Raises:
          CollectiveError: inside `jax.jit`.
        """
        if self._group is None:
            return grads
        leaves, tree = jax.tree.flatten(grads)
        return jax.tree.unflatten(tree, _averages_of(leaves, self._group, self._bytes))


def _averaging(group: Group, limit: int) -> Any:
    """The identity of a tuple of arrays, whose cotangents are averaged over a group."""

    @jax.custom_vjp
    def same(xs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return xs

    def backward(_: None, cotangents: Sequence[jax.Array]) -> tuple[tuple[jax.Array, ...]]:
        return (tuple(_averages_of(cotangents, group, limit)),)

    same.defvjp(lambda xs: (xs, None), backward)
    return same


def _averages_of(xs: Sequence[jax.Array], group: Group, limit: int) -> list[jax.Array]:
    """The averages of arrays over a group, many of them in one collective."""
    if any(is_tracer(x) for x in xs):
        raise CollectiveError(
            "DataParallel: gradients are not averaged inside jax.jit.",
            group=group,
            because="a compiled program of one process sends nothing to the others",
            instead="grads = ddp.average_gradients(nnx.jit(nnx.grad(loss))(ddp.layers, batch)); "
            "or mp.to_static on a mesh of all processes, which needs no DataParallel",
        )
    tasks = [
        (bucket, all_reduce(_joined([xs[i] for i in bucket]), ReduceOp.AVG, group, sync_op=False))
        for bucket in _buckets(xs, limit)
    ]
    out: dict[int, jax.Array] = {}
    for bucket, task in tasks:
        whole, start = task.wait(), 0
        for i in bucket:
            out[i] = whole[start : start + xs[i].size].reshape(xs[i].shape)
            start += xs[i].size
    return [out[i] for i in range(len(xs))]


@jax.jit
def _joined(xs: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in xs])


def _buckets(xs: Sequence[jax.Array], limit: int) -> list[list[int]]:
    """Positions of arrays of one dtype: single ones, or several of no more bytes than the limit."""
    buckets: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(xs):
        bucket, held = last.get(x.dtype, ([], limit))
        if held + x.nbytes > limit:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(i)
        last[x.dtype] = (bucket, held + x.nbytes)
    return buckets
