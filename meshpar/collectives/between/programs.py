"""The compiled programs of collectives, each over one device of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar._jax import array_type, joined, like_uncommitted
from meshpar.collectives.between.world import World

__all__ = ["AXIS", "Body", "Program", "program_of"]

AXIS = "ranks"
"""The one axis of the mesh that a body runs over."""

Body = Callable[..., Any]
"""What each rank does, inside `shard_map` over `AXIS`: `(blocks, *static) -> blocks`, where blocks
are an array or a list of them; from blocks with dims it makes blocks with dims."""

_KEPT = 1024  # programs; the oldest go first


@dataclass(frozen=True, slots=True)
class Program:
    """A collective for one shape, dtype and tuple of ranks.

    Args:
      compiled: takes the ranks' blocks, joined along dim 0.
      sharding: that of the joined blocks.
      aval: their type.
      scalar: whether a block has no dims; it travels as one of shape (1,).
      blocks: how many there are and of what dtype and shape, for messages.
    """

    compiled: Callable[[Any], Any]
    sharding: NamedSharding
    aval: Any  # of a type that JAX does not export
    scalar: bool
    blocks: str

    def text(self, action: str) -> str:
        """The call with this program, which is equal on all ranks that make it."""
        return f"{action} of {self.blocks}"

    def __call__(self, x: Any) -> Any:
        """Runs it on this rank's blocks; gives this rank's result, once it is there."""
        model = x[0] if isinstance(x, list) else x
        if not model.size:
            return self._of_nothing(x)
        out = self.compiled(
            [self._whole(block) for block in x] if isinstance(x, list) else self._whole(x)
        )
        if isinstance(out, jax.Array):
            return self._own(out, model)
        return [self._own(y, model) for y in out]

    def _of_nothing(self, x: Any) -> Any:
        """The result for blocks without elements, for which nothing is sent."""
        ranks = self.sharding.num_devices
        struct = jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype)
        out = jax.eval_shape(self.compiled, jax.tree.map(lambda _: struct, x))
        return jax.tree.map(lambda y: jnp.zeros((y.shape[0] // ranks, *y.shape[1:]), y.dtype), out)

    def _whole(self, block: jax.Array) -> jax.Array:
        if self.scalar:
            block = block.reshape(1)
        return joined(self.aval, self.sharding, block)

    def _own(self, whole: jax.Array, model: jax.Array) -> jax.Array:
        # Waiting here makes errors of XLA those of this call, and bounds the programs in flight.
        mine = whole.addressable_data(0).block_until_ready()
        return like_uncommitted(mine.reshape(()) if self.scalar else mine, model)


def program_of(
    world: World, body: Body, static: tuple[Any, ...], ranks: tuple[int, ...], x: Any
) -> Program:
    """The program of a body for arrays like `x`, compiled when it is first run."""
    model, count = (x[0], len(x)) if isinstance(x, list) else (x, 0)
    key = (body, static, ranks, count, model.shape, model.dtype)
    found = world.programs.get(key)
    if found is None:
        shown = f"{model.dtype}{list(model.shape)}"
        shown = f"{count} arrays {shown}" if isinstance(x, list) else shown
        found = _make(world, body, static, ranks, model, shown)
        with world.lock:
            world.programs[key] = found
            if len(world.programs) > _KEPT:
                world.programs.popitem(last=False)
    return found


def _make(
    world: World,
    body: Body,
    static: tuple[Any, ...],
    ranks: tuple[int, ...],
    model: jax.Array,
    shown: str,
) -> Program:
    devices = np.array([world.devices[rank] for rank in ranks], dtype=object)
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    spec, shape = PartitionSpec(AXIS), model.shape

    def of_each(blocks: Any) -> Any:
        out = body(jax.tree.map(lambda x: x.reshape(shape), blocks), *static)
        return jax.tree.map(lambda y: y if shape else y.reshape(1), out)

    mapped = jax.shard_map(of_each, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    rows = shape[0] if shape else 1
    aval = array_type((rows * len(ranks), *shape[1:]), model.dtype)
    return Program(jax.jit(mapped), NamedSharding(mesh, spec), aval, not shape, shown)
