"""Rows of blocks: what the local programs of rules share.

The rows that a device needs and those that it has are known before the program runs; `fetch` sends
just the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from meshpar.placements.single_element import made_first
from meshpar.rules.rule import Emission

__all__ = ["Ranges", "fetch", "pick", "take_rows", "without_padding"]

Ranges = Sequence[tuple[int, int]]
"""For each device the rows (start, stop) of a dim."""
Transfer = tuple[int, int, int, int]
"""Sender, receiver, and the rows (start, stop)."""


def without_padding(
    at: Emission, block: jax.Array, dim: int, factor: str, filler: ArrayLike
) -> jax.Array:
    """A block whose padding along a dim holds `filler`."""
    rows = lax.broadcasted_iota(jnp.int32, block.shape, dim)
    return jnp.where(rows < at.valid(factor), block, jnp.asarray(filler, block.dtype))


def pick(at: Emission, factor: str, per_device: Sequence[int]) -> jax.Array:
    """The number of this device out of one for each device along a factor, int32."""
    return jnp.asarray(per_device, jnp.int32)[at.position(factor)]


def take_rows(
    block: jax.Array, dim: int, offset: ArrayLike, count: int, low: ArrayLike, high: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """`count` rows of a block from row `offset` on, which may lie outside, and which are good.

    Args:
      low, high: rows of the block that are good; a row taken from elsewhere is not.
    """
    wanted = jnp.arange(count, dtype=jnp.int32) + offset
    good = (wanted >= low) & (wanted < high)
    block = made_first(block, count)
    rows = jnp.take(block, jnp.clip(wanted, 0, max(block.shape[dim] - 1, 0)), axis=dim)
    return rows, good.reshape((1,) * dim + (count,) + (1,) * (block.ndim - dim - 1))


def fetch(
    at: Emission,
    block: jax.Array,
    dim: int,
    factor: str,
    have: Ranges,
    want: Ranges,
    filler: ArrayLike,
) -> jax.Array:
    """The rows that each device wants of a dim, from those that have them.

    Args:
      block: this device's rows of the dim, padded.
      have: the rows that each device has.
      want: the rows that each device wants, as many for each; some may be rows that no device has.
      filler: what stands for those, a scalar; for PRNG keys it is any key.
    """
    if not isinstance(block.dtype, np.dtype):  # PRNG keys
        words = fetch(at, jax.random.key_data(block), dim, factor, have, want, 0)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(block))
    count = want[0][1] - want[0][0]
    shape = (*block.shape[:dim], count, *block.shape[dim + 1 :])
    out = jnp.broadcast_to(jnp.asarray(filler, block.dtype), shape)
    if not out.size or not block.size:
        return out
    for transfers in _rounds(have, want):
        piece, first = block, [start for start, _ in have]
        if any(sender != receiver for sender, receiver, *_ in transfers):
            size = max(stop - start for *_, start, stop in transfers)
            cut_at, first = [0] * len(have), [0] * len(have)
            for sender, receiver, start, _ in transfers:
                cut_at[sender] = min(start - have[sender][0], block.shape[dim] - size)
                first[receiver] = have[sender][0] + cut_at[sender]
            piece = lax.dynamic_slice_in_dim(block, pick(at, factor, cut_at), size, dim)
            piece = at.permute(piece, factor, [(s, r) for s, r, *_ in transfers])
        low, high, offset = [0] * len(have), [0] * len(have), [0] * len(have)
        for _, receiver, start, stop in transfers:
            low[receiver], high[receiver] = start - first[receiver], stop - first[receiver]
            offset[receiver] = want[receiver][0] - first[receiver]
        low, high, offset = (pick(at, factor, numbers) for numbers in (low, high, offset))
        rows, good = take_rows(piece, dim, offset, count, low, high)
        out = jnp.where(good, rows, out)
    return out


def _rounds(have: Ranges, want: Ranges) -> list[list[Transfer]]:
    """The transfers, in rounds in which no device sends or receives twice; the first is local."""
    local: list[Transfer] = []
    between: list[Transfer] = []
    for sender, (first, last) in enumerate(have):
        for receiver, (start, stop) in enumerate(want):
            low, high = max(first, start), min(last, stop)
            if low < high:
                (local if sender == receiver else between).append((sender, receiver, low, high))
    rounds: list[list[Transfer]] = []
    # Long ones together, so that few short ones are padded to the length of a long one.
    for transfer in sorted(between, key=lambda t: (t[2] - t[3], t[1] - t[0])):
        free = (r for r in rounds if all(transfer[0] != t[0] and transfer[1] != t[1] for t in r))
        room = next(free, None)
        if room is None:
            rounds.append([transfer])
        else:
            room.append(transfer)
    return [r for r in (local, *rounds) if r]
