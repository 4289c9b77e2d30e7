"""Waiting for ranks, and for arrays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import jax

from meshpar._jax import is_tracer
from meshpar.collectives.call import calling
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["barrier", "wait"]


def barrier(group: Group | None = None, *, timeout: float | timedelta | None = None) -> None:
    """Waits until all ranks of the group have called it.

    Args:
      group: the processes; `None` is the world.
      timeout: seconds until it raises.

    Raises:
      CollectiveError: inside a region, where XLA orders what depends on each other; or no
        processes here.

    Follows `paddle.distributed.barrier` (3.3.1).
    """
    with calling("barrier()", group, timeout) as call:
        if call.region is not None:
            raise CollectiveError(
                "there is nothing to wait for inside a region.",
                because="it is one compiled program, whose collectives wait for what they need",
                instead="outside mp.spmd, or jax.block_until_ready(result)",
            )
        call.run("barrier")


def wait(tensor: Any, group: Group | None = None, use_calc_stream: bool = True) -> Any:
    """Waits until arrays are computed, and returns them.

    Args:
      tensor: an array, or a pytree of arrays.
      group: taken, as in Paddle.
      use_calc_stream: taken, as in Paddle; streams are XLA's.

    Raises:
      CollectiveError: inside a region or other traced code.

    Example:
      >>> import jax.numpy as jnp
      >>> wait(jnp.ones(2))
      Array([1., 1.], dtype=float32)

    Follows `paddle.distributed.wait` (3.3.1).
    """
    if any(is_tracer(x) for x in jax.tree.leaves(tensor)):
        raise CollectiveError(
            "wait(tensor): there is nothing to wait for in traced code.",
            because="its arrays are values of a program that has not run yet",
            instead="mp.wait(result) outside mp.spmd and jax.jit",
        )
    return jax.block_until_ready(tensor)
