"""The processes that this one runs among."""

from __future__ import annotations

import jax

__all__ = ["is_initialized", "process_count", "process_rank"]


def is_initialized() -> bool:
    """Whether this process has met the others of its job."""
    return jax.distributed.is_initialized()


def process_rank() -> int:
    """The number of this process; 0 where it runs alone."""
    return jax.process_index() if is_initialized() else 0


def process_count() -> int:
    """The number of processes; 1 where this one runs alone."""
    return jax.process_count() if is_initialized() else 1
