"""`Task`: the result of a collective that was not waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from meshpar._jax import is_tracer

__all__ = ["Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """What `sync_op=False` and `mp.stream` give: arrays that JAX is still computing.

    Args:
      result: the arrays, as the call would return them.
      sync: whether the call was made with `sync_op=True`.

    Arrays are ordered by data: using `result` is always right, with or without `wait`.

    Follows the tasks of `paddle.distributed` (3.3.1).
    """

    result: Any
    sync: bool = False

    def wait(self) -> Any:
        """Waits for the arrays and returns them; inside a region there is nothing to wait for."""
        if not self._is_traced():
            jax.block_until_ready(self.result)
        return self.result

    def synchronize(self) -> None:
        """Waits for the arrays."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the arrays are there; inside a region always, as they are values of a program."""
        if self._is_traced():
            return True
        arrays: list[Any] = [x for x in jax.tree.leaves(self.result) if isinstance(x, jax.Array)]
        return all(x.is_ready() for x in arrays)  # which JAX's stubs do not show

    def is_sync(self) -> bool:
        """Whether the call was made with `sync_op=True`."""
        return self.sync

    def _is_traced(self) -> bool:
        return any(is_tracer(x) for x in jax.tree.leaves(self.result))
