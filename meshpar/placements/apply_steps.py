"""What a device does in each step of a reshard, on its local block inside `shard_map`."""

# JAX is partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.placements.axis_position import axis_position
from meshpar.placements.block_axes import cut, join
from meshpar.placements.reductions import (
    COPIED,
    identity,
    is_key,
    part_of_mean,
    reduce_stacked,
    whole_mean,
)
from meshpar.placements.single_element import made_first
from meshpar.placements.steps import Axes, Step, StepKind
from meshpar.placements.types import ReduceType

__all__ = ["apply_steps", "extreme", "joined", "mean"]

Shape = tuple[int, ...]
Sizes = Mapping[str, int]


def apply_steps(block: jax.Array, steps: Sequence[Step], shape: Shape, sizes: Sizes) -> jax.Array:
    """Runs steps on the block of this device, inside `shard_map` over the whole mesh.

    Args:
      block: of shape `local_shape(shape, steps[0].src, sizes)`; what its padding holds does not
        matter. Pending reductions have no dim: the block is this device's contribution.
      steps: from `reshard_steps`.
      shape: the global shape of the tensor.
      sizes: axis -> size, of the axes of the steps at least.

    Returns:
      The block of `steps[-1].dst`, its padding undefined.
    """
    if is_key(block.dtype):
        data = apply_steps(jax.random.key_data(block), steps, shape, sizes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(block))
    for step in steps:
        block = _APPLY[step.kind](block, step, shape, sizes)
    return block


def _all_reduce(block: jax.Array, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    if step.reduce in {ReduceType.kRedMax, ReduceType.kRedAny}:
        return extreme(block, step.axes, largest=True)
    if step.reduce in {ReduceType.kRedMin, ReduceType.kRedAll}:
        return extreme(block, step.axes, largest=False)
    return mean(lax.psum(term(block, step, sizes), step.axes), step, sizes)


def extreme(x: jax.Array, axes: Sequence[str], *, largest: bool) -> jax.Array:
    """The largest or least `x` over devices; NaN where any of them is, as on one device.

    XLA's all-reduce by maximum drops NaN on some platforms. So floats travel as signed integers of
    the same width in the same order, with NaN beyond the end that is looked for.
    """
    reduce = lax.pmax if largest else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, axes)
    bits = jnp.finfo(x.dtype).bits
    whole = {8: jnp.int8, 16: jnp.int16, 32: jnp.int32, 64: jnp.int64}[bits]
    beyond = jnp.iinfo(whole).max if largest else jnp.iinfo(whole).min

    def ordered(bit_pattern: jax.Array) -> jax.Array:
        # Negative floats count downwards; turning their lower bits makes one order of all.
        return bit_pattern ^ ((bit_pattern >> (bits - 1)) & jnp.iinfo(whole).max)

    keys = ordered(lax.bitcast_convert_type(x, whole))
    found = reduce(jnp.where(jnp.isnan(x), beyond, keys), axes)
    value = lax.bitcast_convert_type(ordered(found), x.dtype)
    return jnp.where(found == beyond, jnp.asarray(jnp.nan, x.dtype), value)


def _reduce_scatter(block: jax.Array, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    chunks, at = cut(term(block, step, sizes), step.gained, step.axes, sizes)
    return mean(lax.psum_scatter(chunks, step.axes, scatter_dimension=at), step, sizes)


def term(block: jax.Array, step: Step, sizes: Sizes) -> jax.Array:
    """What a device adds to the sum of a step: its block, or its part where the mean is asked."""
    if step.reduce is not ReduceType.kRedAvg:
        return block
    return part_of_mean(block, math.prod(sizes[axis] for axis in step.axes))


def mean(total: jax.Array, step: Step, sizes: Sizes) -> jax.Array:
    """What the sum of all terms comes to: itself, or the mean where that is asked."""
    if step.reduce is not ReduceType.kRedAvg:
        return total
    return whole_mean(total, math.prod(sizes[axis] for axis in step.axes))


def _all_gather(block: jax.Array, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    if step.reduce is not None:
        return reduce_stacked(step.reduce, lax.all_gather(block, step.axes), 0)
    (dim,) = step.lost
    return joined(lax.all_gather(block, step.axes, axis=dim), dim, step, shape, sizes)


def _all_to_all(block: jax.Array, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    chunks, at = cut(block, step.gained, step.axes, sizes)
    chunks = lax.all_to_all(chunks, step.axes, split_axis=at, concat_axis=at, tiled=True)
    if step.reduce is not None:
        return reduce_stacked(step.reduce, chunks, at)
    return joined(chunks, at, step, shape, sizes)


def joined(chunks: jax.Array, at: int, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    """The block of `step.dst` from the chunks that arrived, one along dim `at` for each device."""
    levels = {
        dim: _levels(shape[dim], step.src.dims[dim], sizes)[-len(axes) - 1 : -1]
        for dim, axes in step.lost.items()
    }
    return join(chunks, at, step.lost, step.axes, sizes, levels)


def _levels(size: int, axes: Axes, sizes: Sizes) -> list[int]:
    """The size of a dim's block before and after each axis cuts it."""
    return list(itertools.accumulate(axes, lambda s, axis: -(-s // sizes[axis]), initial=size))


def _slice(block: jax.Array, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    if not step.axes:  # each device has its rows; a tensor without any may change its shape
        local = [_levels(n, axes, sizes)[-1] for n, axes in zip(shape, step.dst.dims, strict=True)]
        return block.reshape(*local, *block.shape[len(shape) :])
    devices = math.prod(sizes[axis] for axis in step.axes)
    block = made_first(block, -(-block.size // devices))
    chunks, at = cut(block, step.gained, step.axes, sizes)
    return lax.dynamic_index_in_dim(chunks, axis_position(step.axes), at, keepdims=False)


def _ppermute(block: jax.Array, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    return lax.ppermute(block, step.axes, step.permutation)


def _mask(block: jax.Array, step: Step, shape: Shape, sizes: Sizes) -> jax.Array:
    (axis,), kind = step.axes, step.reduce
    assert kind is not None, f"{step} makes no reduction"
    if not step.lost and kind in COPIED:
        return block
    nothing = jnp.asarray(identity(kind, block.dtype))
    if not step.lost:
        return lax.select(axis_position(axis) == 0, block, lax.full_like(block, nothing))
    (dim,) = step.lost
    whole, rows = _levels(shape[dim], step.src.dims[dim], sizes)[-2:]
    padded = lax.full(
        (*block.shape[:dim], rows * sizes[axis], *block.shape[dim + 1 :]), nothing, block.dtype
    )
    start = axis_position(axis) * rows
    padded = lax.dynamic_update_slice_in_dim(padded, block, start, dim)
    return lax.slice_in_dim(padded, 0, whole, axis=dim)


_APPLY: dict[StepKind, Callable[[jax.Array, Step, Shape, Sizes], jax.Array]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "ppermute": _ppermute,
    "mask": _mask,
}
