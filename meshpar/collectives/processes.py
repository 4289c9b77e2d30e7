"""The processes that this one runs among."""

from __future__ import annotations

import jax

from meshpar.collectives.between.world import joined

__all__ = ["is_initialized", "process_count", "process_rank"]


def is_initialized() -> bool:
    """Whether this process has joined a job, by `init_parallel_env`.

    Follows `paddle.distributed.is_initialized` (3.3.1).
    """
    return joined() is not None


def process_rank() -> int:
    """The number of this process; 0 where it runs alone."""
    world = joined()
    if world is not None:
        return world.rank
    return jax.process_index() if jax.distributed.is_initialized() else 0


def process_count() -> int:
    """The number of processes; 1 where this one runs alone."""
    world = joined()
    if world is not None:
        return world.place.size
    return jax.process_count() if jax.distributed.is_initialized() else 1
