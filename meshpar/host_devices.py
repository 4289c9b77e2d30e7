"""`set_host_device_count`: several CPU devices in one process, asked for in time."""

from __future__ import annotations

import os

import jax

from meshpar._jax import backend_is_up
from meshpar.xla_flags import HOST_DEVICES, with_host_devices

__all__ = ["set_host_device_count"]


def set_host_device_count(count: int) -> None:
    """Makes the CPU appear as `count` devices; the first thing to do in a notebook.

    The flag is added to `XLA_FLAGS`, where other flags are kept; an earlier count is replaced.

    Args:
      count: the number of devices, at least 1.

    Raises:
      ValueError: `count` is below 1.
      RuntimeError: JAX's backend has started with another number; nothing changes then.

    Example:
      >>> set_host_device_count(jax.device_count())  # as many as there are: nothing to do
    """
    if count < 1:
        raise ValueError(f"set_host_device_count({count}): there must be at least one device")
    if backend_is_up():
        there = len(jax.devices("cpu"))
        if there == count:
            return
        raise RuntimeError(
            f"set_host_device_count({count}) comes too late: JAX's backend is up with {there} CPU "
            f"device(s). Restart the kernel and call it before anything else uses JAX, or start "
            f"Python with XLA_FLAGS={HOST_DEVICES}={count}"
        )
    os.environ["XLA_FLAGS"] = with_host_devices(os.environ.get("XLA_FLAGS", ""), count)
