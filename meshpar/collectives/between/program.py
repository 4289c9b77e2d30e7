"""A compiled collective, over one device of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshpar._jax import array_type, assembled, own_block

__all__ = ["AXIS", "LENGTH", "Body", "Program"]

AXIS = "ranks"
"""The one axis of the mesh that a body runs over."""

LENGTH = 2048
"""How many numbers a program computes beside its collective, where it is not waited for: XLA runs
what takes less than a thousand operations at once, in the thread that starts it."""

Body = Callable[..., Any]
"""What each rank does, inside `shard_map` over `AXIS`: `(blocks, *static) -> blocks`, where blocks
are an array or a list of them; from blocks with dims it makes blocks with dims."""


@dataclass(frozen=True, slots=True)
class Program:
    """A collective for one shape, dtype and tuple of ranks.

    Args:
      compiled: takes the ranks' blocks, joined along dim 0.
      heavier: the same with something else to do: it takes and gives `LENGTH` numbers a rank, too.
      sharding: that of the joined blocks.
      aval: their type.
      scalar: whether a block has no dims; it travels as one of shape (1,).
      blocks: how many there are and of what dtype and shape, for messages.
    """

    compiled: Callable[[Any], Any]
    heavier: Callable[[Any, Any], tuple[Any, Any]]
    sharding: NamedSharding
    aval: Any  # of a type that JAX does not export
    scalar: bool
    blocks: str

    def text(self, action: str) -> str:
        """The call with this program, which is equal on all ranks that make it."""
        return f"{action} of {self.blocks}"

    def __call__(self, x: Any) -> Any:
        """Starts it on this rank's blocks; gives this rank's result, which may not be there yet."""
        model = x[0] if isinstance(x, list) else x
        if not model.size:
            return self._of_nothing(x)
        return self._owned(self.compiled(self._wholes(x)), model)

    def beside(self, numbers: jax.Array, x: Any) -> tuple[jax.Array | None, Any]:
        """Starts it so that it does not run in this thread.

        Args:
          numbers: `LENGTH` floats.
          x: this rank's blocks.

        Returns:
          Numbers that are there when it has ended, if there is anything to do; and the result.
        """
        model = x[0] if isinstance(x, list) else x
        if not model.size:
            return None, self._of_nothing(x)
        aval = array_type((LENGTH * self.sharding.num_devices,), numbers.dtype)
        whole = assembled(aval, self.sharding, [numbers])
        token, out = self.heavier(whole, self._wholes(x))
        return own_block(token, committed=True), self._owned(out, model)

    def _of_nothing(self, x: Any) -> Any:
        """The result for blocks without elements, for which nothing is sent."""
        ranks = self.sharding.num_devices
        struct = jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype)
        out = jax.eval_shape(self.compiled, jax.tree.map(lambda _: struct, x))
        return jax.tree.map(lambda y: jnp.zeros((y.shape[0] // ranks, *y.shape[1:]), y.dtype), out)

    def _wholes(self, x: Any) -> Any:
        # By hand, as jax.tree.map takes longer than all else here.
        return [self._whole(block) for block in x] if isinstance(x, list) else self._whole(x)

    def _whole(self, block: jax.Array) -> jax.Array:
        return assembled(self.aval, self.sharding, [block.reshape(1) if self.scalar else block])

    def _owned(self, out: Any, model: jax.Array) -> Any:
        # Free to move to another device where the caller's array was.
        committed = getattr(model, "committed", True)
        if isinstance(out, jax.Array):
            return self._own(out, committed)
        return [self._own(y, committed) for y in out]

    def _own(self, whole: jax.Array, committed: bool) -> jax.Array:
        mine = own_block(whole, committed)
        return mine.reshape(()) if self.scalar else mine
