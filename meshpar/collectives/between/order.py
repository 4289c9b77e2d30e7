"""The order in which programs with collectives run: that in which this process starts them.

XLA has no names for its collectives: those of one set of devices meet in the order in which each
process runs them. So every program is started in the caller's thread, in program order, be it a
collective that is not waited for or a step of the user's, and whoever waits does so afterwards. On
GPUs and TPUs that is all: starting does not block there, and a device runs one program after the
other. On CPUs two things are different.

- A small program runs at once, in the thread that starts it, until the others come. One that is not
  waited for gets some work beside it, `LENGTH` numbers to compute, which XLA then takes for large
  enough to run it in another thread.
- Only programs that one thread starts on one device stay in their order. Those of several devices
  are kept in it by a `Fence`, those of other threads by waiting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import jax
import numpy as np

from meshpar._jax import is_ready
from meshpar.collectives.between.fence import Fence
from meshpar.collectives.between.program import LENGTH, Program

__all__ = ["Order"]


class Order:
    """Starts programs, one thread at a time.

    Args:
      device: the device whose collectives are this process's.
    """

    def __init__(self, device: Any) -> None:
        self.turn = threading.RLock()
        self._quick = device.platform != "cpu"
        self._last: jax.Array | None = None  # of the last program that was not waited for
        self._thread = 0
        if self._quick:
            return
        local = jax.local_devices(backend="cpu")
        self._zeros = jax.device_put(np.zeros(LENGTH, np.float32), device)
        others = [d for d in local if d != device]
        self._fence = Fence([device, *others], LENGTH) if others else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way that was not waited for."""
        if self._last is not None and is_ready(self._last):
            self._last = None
        return self._last is None

    def clear(self, until: float | None) -> bool:
        """Waits for programs that must have ended before the next one is started.

        Args:
          until: `time.monotonic()` when it gives up.

        Returns:
          Whether they have.
        """
        if self._quick:
            return True
        if self._fence is not None:
            return _there(self._fence.raised(), until)
        if self._last is None or self._thread == threading.get_ident():
            return True
        return _there(self._last, until)

    def start(self, program: Program, x: Any, *, waits: bool) -> Any:
        """Starts a program behind all that were started before; `clear` comes first.

        Args:
          program: it.
          x: this rank's blocks.
          waits: whether the caller waits for the result at once, in this thread.

        Returns:
          This rank's result, which may not be there yet.
        """
        if self._quick or waits:
            return program(x)
        token, out = program.beside(self._zeros, x)
        if token is not None:
            self._last, self._thread = token, threading.get_ident()
            if self._fence is not None:
                self._fence.hold(token)
        return out


def _there(x: jax.Array, until: float | None) -> bool:
    """Waits for an array, which may be that of a program that failed: it is raised elsewhere."""
    begin = time.monotonic()
    while until is not None and not is_ready(x):
        now = time.monotonic()
        if now > until:
            return False
        time.sleep(min(max((now - begin) / 10, 2e-5), 2e-3))
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        x.block_until_ready()
    return True
