"""What each rank does in a collective, inside `shard_map` over the ranks."""

# JAX is partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.between.program import AXIS
from meshpar.collectives.reduce_op import ReduceOp
from meshpar.placements.apply_steps import extreme

Moved = TypeVar("Moved", jax.Array, list[jax.Array])

__all__ = [
    "combined",
    "combined_items",
    "exchanged",
    "exchanged_rows",
    "gathered",
    "passed_on",
    "scattered",
    "spread",
]


def combined(x: jax.Array, op: ReduceOp) -> jax.Array:
    """The ranks' blocks, combined element by element."""
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return _mean(lax.psum(x, AXIS), op)
    if op is ReduceOp.PROD:
        return jnp.prod(lax.all_gather(x, AXIS), 0, dtype=x.dtype)
    return extreme(x, (AXIS,), largest=op is ReduceOp.MAX)


def combined_items(items: Sequence[jax.Array], op: ReduceOp) -> jax.Array:
    """Of the ranks' lists, the item with this rank's number, combined."""
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        if jax.default_backend() == "cpu":
            return _mean(_sum_of_each(items), op)
        return _mean(lax.psum_scatter(jnp.stack(items), AXIS), op)
    x = jnp.stack(items)
    x = lax.all_to_all(x, AXIS, 0, 0)
    if op is ReduceOp.PROD:
        return jnp.prod(x, 0, dtype=x.dtype)
    return jnp.max(x, 0) if op is ReduceOp.MAX else jnp.min(x, 0)


def _sum_of_each(items: Sequence[jax.Array]) -> jax.Array:
    """`psum_scatter` for CPUs, where each rank sends each other one its item.

    gloo's own takes twice as long for 16 MiB and more, as long for small arrays.
    """
    size, here = lax.axis_size(AXIS), lax.axis_index(AXIS)
    dtype = items[0].dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    wide = jnp.dtype(jnp.float32) if narrow else dtype
    stacked = jnp.stack(items)
    total = lax.dynamic_index_in_dim(stacked, here, 0, keepdims=False).astype(wide)
    for distance in range(1, size):
        theirs = lax.dynamic_index_in_dim(stacked, (here + distance) % size, 0, keepdims=False)
        pairs = [(i, (i + distance) % size) for i in range(size)]
        arrived = _as_bits(lambda bits, pairs=pairs: lax.ppermute(bits, AXIS, pairs), theirs)
        total += arrived.astype(wide)
    return total.astype(dtype)


def _mean(total: jax.Array, op: ReduceOp) -> jax.Array:
    if op is ReduceOp.SUM:
        return total
    return total / jnp.asarray(lax.axis_size(AXIS), total.dtype)


def gathered(x: jax.Array) -> list[jax.Array]:
    """The blocks of all ranks."""
    return _as_bits(lambda bits: [*lax.all_gather(bits, AXIS)], x)


def spread(x: jax.Array, src: int) -> jax.Array:
    """The block of the rank at position `src`, sent on by those that have it already."""

    def sent(bits: jax.Array) -> jax.Array:
        size = lax.axis_size(AXIS)
        distance = (lax.axis_index(AXIS) - src) % size
        reach = 1
        while reach < size:
            pairs = [
                ((src + i) % size, (src + i + reach) % size)
                for i in range(min(reach, size - reach))
            ]
            arrived = lax.ppermute(bits, AXIS, pairs)
            bits = jnp.where((distance >= reach) & (distance < 2 * reach), arrived, bits)
            reach *= 2
        return bits

    return _as_bits(sent, x)


def scattered(items: Sequence[jax.Array], src: int) -> jax.Array:
    """This rank's item of the list of the rank at position `src`."""

    def sent(*items: jax.Array) -> jax.Array:
        here = lax.axis_index(AXIS)
        mine = items[src]
        for position, item in enumerate(items):
            if position != src:
                arrived = lax.ppermute(item, AXIS, [(src, position)])
                mine = jnp.where(here == position, arrived, mine)
        return mine

    return _as_bits(sent, *items)


def exchanged(items: Sequence[jax.Array]) -> list[jax.Array]:
    """From each rank its item for this one."""

    def sent(*items: jax.Array) -> list[jax.Array]:
        return [*lax.all_to_all(jnp.stack(items), AXIS, 0, 0)]

    return _as_bits(sent, *items)


def exchanged_rows(x: jax.Array) -> jax.Array:
    """From each rank its equal part of dim 0 for this one, joined along dim 0."""
    return _as_bits(lambda bits: lax.all_to_all(bits, AXIS, 0, 0, tiled=True), x)


def passed_on(x: jax.Array, src: int) -> jax.Array:
    """Of two ranks, at the one that is not at position `src` the block of the other."""
    return _as_bits(lambda bits: lax.ppermute(bits, AXIS, [(src, 1 - src)]), x)


_BITS = {1: jnp.uint8, 2: jnp.uint16}


def _as_bits(move: Callable[..., Moved], *xs: jax.Array) -> Moved:
    """Moves narrow floats as whole numbers: XLA may widen one on its way, which changes NaNs."""
    dtype = xs[0].dtype
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits not in (8, 16):
        return move(*xs)
    moved = move(*(lax.bitcast_convert_type(x, _BITS[dtype.itemsize]) for x in xs))
    return jax.tree.map(lambda y: lax.bitcast_convert_type(y, dtype), moved)
