"""Keeps programs of one device and of several in order, in a process of several CPU devices.

XLA runs the programs of one CPU device one after the other where one thread starts them, and
likewise those of several devices; but it does not order the two kinds. Their collectives would meet
in gloo, which takes whatever comes first. A collective between processes is a program of one
device, and a step of all: so an empty program of all devices stands between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar._jax import array_type, assembled

__all__ = ["Fence"]


class Fence:
    """The empty program.

    Args:
      devices: all of this process.
      length: that of the array on each device.
    """

    def __init__(self, devices: Sequence[Any], length: int) -> None:
        mesh = Mesh(np.array(devices, dtype=object), ("local",), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec("local"))
        self._aval = array_type((length * len(devices),), np.dtype(np.float32))
        zeros = np.zeros(length, np.float32)
        self._zeros = [jax.device_put(zeros, device) for device in devices]
        # Something has to be computed: JAX hands on what a program returns as it is.
        self._program = jax.jit(lambda x: -x)

    def raised(self) -> jax.Array:
        """An array that is there once all programs of several devices started before have ended."""
        return self._run(self._zeros[0]).addressable_data(0)

    def hold(self, token: jax.Array) -> None:
        """Lets the programs of several devices that are started from here on wait for an array."""
        self._run(token)

    def _run(self, first: jax.Array) -> jax.Array:
        return self._program(assembled(self._aval, self._sharding, [first, *self._zeros[1:]]))
