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
      CollectiveError: it lies on devices of several processes, is deleted, or is traced.
    """
    if isinstance(x, list):
        return [placed(item, world) for item in x]
    if not isinstance(x, jax.Array):
        return jax.device_put(x, world.home)
    try:
        if not x.is_deleted() and x.sharding == world.home:
            return x
    except jax.errors.ConcretizationTypeError:
        raise _traced(x) from None
    if x.is_deleted():
        raise CollectiveError(
            f"the array {x.dtype}{list(x.shape)} is deleted.",
            because="it was donated to a program, or its delete() was called",
            instead="the program's result in its place",
        )
    if not x.is_fully_addressable:
        raise CollectiveError(
            "the array lies on devices of several processes.",
            array=f"{x.dtype}{list(x.shape)} on {x.sharding}",
            because="between processes each gives an array of its own",
            instead="mp.local_value(x) is this process's piece; mp.reshard and mp.jit work on the "
            "whole",
        )
    return jax.device_put(x, world.home)


def _traced(x: jax.Array) -> CollectiveError:
    return CollectiveError(
        f"the array {x.dtype}{list(x.shape)} is traced, and has no numbers yet.",
        because="between processes a collective runs at once; jax.jit, jax.grad and the like trace "
        "a program first",
        instead="the call outside of them, or mp.spmd(fn, mesh, in_placements, out_placements), "
        "whose collectives are part of the program",
    )
