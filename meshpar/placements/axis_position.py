"""Where a device is along mesh axes, one of which may be time.

A pipeline computes a batch in microbatches, one after the other. To the partitioner they lie along
one more axis, so that counters of random numbers, sums and means over the batch come from the same
rules as in data parallelism; the position on that axis is the number of the microbatch at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

import jax
from jax import lax

__all__ = ["axis_position", "in_time"]

Times = Mapping[str, tuple[jax.Array, int]]

_nothing: Times = MappingProxyType({})
_in_time: ContextVar[Times] = ContextVar("axes in time", default=_nothing)


@contextmanager
def in_time(axis: str, position: jax.Array, size: int) -> Iterator[None]:
    """While traced code runs, an axis that is no axis of the mesh has this size and position."""
    token = _in_time.set({**_in_time.get(), axis: (position, size)})
    try:
        yield
    finally:
        _in_time.reset(token)


def axis_position(axes: str | Sequence[str]) -> jax.Array:
    """This device's position along axes, the first of which counts most; inside `shard_map`."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    times = _in_time.get()
    if not any(name in times for name in names):
        return lax.axis_index(axes)
    positions = [times[name][0] if name in times else lax.axis_index(name) for name in names]
    sizes = [times[name][1] if name in times else lax.axis_size(name) for name in names]
    return sum(p * math.prod(sizes[k + 1 :]) for k, p in enumerate(positions))  # pyright: ignore[reportReturnType]
