"""A process's array on the device whose collectives are the process's."""

from __future__ import annotations

from typing import Any

import jax

from meshpar.collectives.between.world import World
from meshpar.errors import CollectiveError

__all__ = ["placed"]


def placed(x: Any, world: World) -> Any:
    """`x`, an array or a list of arrays, on this process's first device.

    Raises:
      CollectiveError: it lies on devices of several processes, or is deleted.
    """
    if isinstance(x, list):
        return [placed(item, world) for item in x]
    if not isinstance(x, jax.Array):
        return jax.device_put(x, world.home)
    if x.is_deleted():
        raise CollectiveError(
            f"the array {x.dtype}{list(x.shape)} is deleted.",
            because="it was donated to a program, or its delete() was called",
            instead="the program's result in its place",
        )
    if x.sharding == world.home:
        return x
    if not x.is_fully_addressable:
        raise CollectiveError(
            "the array lies on devices of several processes.",
            array=f"{x.dtype}{list(x.shape)} on {x.sharding}",
            because="between processes each gives an array of its own",
            instead="mp.local_value(x) is this process's piece; mp.reshard and mp.jit work on the "
            "whole",
        )
    return jax.device_put(x, world.home)
