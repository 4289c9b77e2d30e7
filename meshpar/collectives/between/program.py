"""A compiled collective, over one device of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.between.runnable import Runnable

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
      plain: takes this rank's blocks.
      heavier: the same with something else to do: it takes and gives `LENGTH` numbers, too.
      widened: makes a block of shape (1,) of one without dims, which travels so.
      results: what it gives for blocks without elements, for which nothing is sent; a pytree of
        their types. `None` where there are elements.
      blocks: how many there are and of what dtype and shape, for messages.
    """

    plain: Runnable
    heavier: Runnable
    widened: Callable[[jax.Array], jax.Array] | None
    results: Any
    blocks: str

    def text(self, action: str) -> str:
        """The call with this program, which is equal on all ranks that make it."""
        return f"{action} of {self.blocks}"

    def __call__(self, x: Any) -> Any:
        """Starts it on this rank's blocks; gives this rank's result, which may not be there yet."""
        if self.results is not None:
            return self._of_nothing()
        return self.plain(*self._fitted(x))

    def beside(self, numbers: jax.Array, x: Any) -> tuple[jax.Array | None, Any]:
        """Starts it so that it does not run in this thread.

        Args:
          numbers: `LENGTH` floats.
          x: this rank's blocks.

        Returns:
          Numbers that are there when it has ended, if there is anything to do; and the result.
        """
        if self.results is not None:
            return None, self._of_nothing()
        blocks, bound = self._fitted(x)
        return self.heavier([numbers, *blocks], bound)

    def _of_nothing(self) -> Any:
        return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), self.results)

    def _fitted(self, x: Any) -> tuple[list[jax.Array], bool]:
        """The blocks as they travel, and whether the caller's are bound to their device."""
        blocks: list[jax.Array] = x if isinstance(x, list) else [x]
        bound = blocks[0].committed
        if self.widened is None:
            return blocks, bound
        return [self.widened(block) for block in blocks], bound
