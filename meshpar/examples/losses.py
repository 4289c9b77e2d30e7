"""The losses of a training run, read a step late so that the devices need not wait for Python."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

import jax

__all__ = ["Losses"]


class Losses:
    """The losses of the steps that were started.

    Args:
      stop_at_nan: whether a loss that is not finite is an error.
      path: a file that gets a line `step loss` for each, `None` for none. A run that goes on adds
        its lines: of two with one number, the later counts.
    """

    def __init__(self, *, stop_at_nan: bool, path: str | None = None) -> None:
        self._stop_at_nan = stop_at_nan
        self._path = None if path is None else Path(path)
        self._waiting: deque[tuple[int, jax.Array]] = deque()

    def add(self, number: int, loss: jax.Array) -> None:
        """The loss of a step, from 1, which may not be there yet."""
        self._waiting.append((number, loss))

    def read(self, *, keep: int = 0) -> float | None:
        """The newest loss but for `keep` newer ones, if there is one that was not read before.

        Raises:
          FloatingPointError: a loss is not finite.
        """
        value = None
        while len(self._waiting) > keep:
            number, loss = self._waiting.popleft()
            value = float(loss)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(f"{number} {value!r}\n")
            if self._stop_at_nan and not math.isfinite(value):
                raise FloatingPointError(f"The loss of step {number} is {value}")
        return value
