"""`Task`: the result of a collective that was not waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from meshpar._jax import is_ready, is_tracer

__all__ = ["Started", "Task"]


class Started(Protocol):
    """A call that was started."""

    def result(self) -> Any:
        """Waits for its result, or raises its error."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """What `sync_op=False` and `mp.stream` give: a result that may still be on its way.

    Between processes the call has been started when the task is there, behind all that this process
    started before, steps of `jax.jit` and `mp.jit` among it; what is started later, and computes
    with arrays, waits for it. The first call of its kind (operation, shape, dtype and group) waits
    for the other ranks, which agree on it. In a process of several CPU devices each call waits for
    the programs that were started before it.

    Args:
      value: the arrays, as the call would return them, where it has returned.
      sync: whether the call was made with `sync_op=True`.
      started: the call, where it may still run: one between processes with `sync_op=False`.

    Example:
      >>> import jax.numpy as jnp
      >>> Task(jnp.ones(2)).wait()
      Array([1., 1.], dtype=float32)

    Follows the tasks of `paddle.distributed` (3.3.1).
    """

    value: Any = None
    sync: bool = False
    started: Started | None = None

    @property
    def result(self) -> Any:
        """The arrays, as the call would return them; waits until they are there."""
        return self.value if self.started is None else self.started.result()

    def wait(self) -> Any:
        """Waits for the arrays and returns them; inside a region there is nothing to wait for.

        Raises:
          CollectiveError: what the call would have raised.
        """
        result = self.result
        return result if self._is_traced() else jax.block_until_ready(result)

    def synchronize(self) -> None:
        """Waits for the arrays."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended; inside a region always, as it gives values of a program."""
        if self.started is not None:
            return self.started.done()
        if self._is_traced():
            return True
        arrays = [x for x in jax.tree.leaves(self.value) if isinstance(x, jax.Array)]
        return all(map(is_ready, arrays))

    def is_sync(self) -> bool:
        """Whether the call was made with `sync_op=True`."""
        return self.sync

    def _is_traced(self) -> bool:
        return any(is_tracer(x) for x in jax.tree.leaves(self.value))
