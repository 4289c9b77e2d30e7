"""Several small reshards of one kind as one collective, on the blocks of one device.

A collective of few bytes takes its latency, so that many of them take it many times. Here the
blocks travel as the rows of one array; what arrives is cut into the blocks again.
"""

# JAX is partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.placements.apply_steps import joined, mean, term
from meshpar.placements.block_axes import cut
from meshpar.placements.blocks import local_shape
from meshpar.placements.reductions import is_key
from meshpar.placements.steps import Step
from meshpar.placements.types import ReduceType

__all__ = ["BucketKey", "apply_bucket", "bucket_bytes", "bucket_key"]

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
BucketKey = tuple[str, tuple[str, ...], ReduceType | None, str]

_LINEAR = frozenset({ReduceType.kRedSum, ReduceType.kRedAvg})


def bucket_key(steps: Sequence[Step], dtype: np.dtype) -> BucketKey | None:
    """What a reshard must share with others to travel with them; `None` where it goes alone.

    Args:
      steps: those of the reshard.
      dtype: of the tensor.
    """
    if len(steps) != 1 or is_key(dtype):
        return None
    (step,) = steps
    sums = step.kind in ("all_reduce", "reduce_scatter") and step.reduce in _LINEAR
    if not sums and (step.kind != "all_gather" or step.reduce is not None):
        return None
    return step.kind, step.axes, step.reduce, str(dtype)


def bucket_bytes(
    steps: Sequence[Step], shapes: Sequence[Shape], itemsize: int, sizes: Sizes
) -> int:
    """What each device sends in one collective for all of these steps, arguments as below."""
    if steps[0].kind != "all_reduce":
        return sum(step.bytes for step in steps)
    n = math.prod(sizes[axis] for axis in steps[0].axes)
    pairs = zip(steps, shapes, strict=True)
    elements = sum(math.prod(local_shape(shape, step.src, sizes)) for step, shape in pairs)
    return -(-2 * elements * itemsize * (n - 1) // n)


def apply_bucket(
    blocks: Sequence[jax.Array], steps: Sequence[Step], shapes: Sequence[Shape], sizes: Sizes
) -> list[jax.Array]:
    """Runs one step on each block, all in one collective, inside `shard_map` over the whole mesh.

    Args:
      blocks: as for `apply_steps`, of one dtype.
      steps: one for each block; `bucket_key` of all is the same.
      shapes: the global shape of each tensor.
      sizes: axis -> size.

    Returns:
      The block of `step.dst` for each.
    """
    kind, axes = steps[0].kind, steps[0].axes
    blocks = [term(block, step, sizes) for block, step in zip(blocks, steps, strict=True)]
    if kind == "all_reduce":
        sums = lax.psum(jnp.concatenate([block.reshape(-1) for block in blocks]), axes)
        parts = _split(sums, [block.shape for block in blocks])
        return [mean(part, step, sizes) for part, step in zip(parts, steps, strict=True)]
    if kind == "reduce_scatter":
        n = math.prod(sizes[axis] for axis in axes)
        chunks = [
            jnp.moveaxis(*cut(block, step.gained, axes, sizes), 0)
            for block, step in zip(blocks, steps, strict=True)
        ]
        rows = jnp.concatenate([chunk.reshape(n, -1) for chunk in chunks], axis=1)
        parts = _split(lax.psum_scatter(rows, axes), [chunk.shape[1:] for chunk in chunks])
        return [mean(part, step, sizes) for part, step in zip(parts, steps, strict=True)]
    rows = lax.all_gather(jnp.concatenate([block.reshape(-1) for block in blocks]), axes)
    out: list[jax.Array] = []
    parts = _split(rows, [block.shape for block in blocks])
    for part, step, shape in zip(parts, steps, shapes, strict=True):
        (dim,) = step.lost
        out.append(joined(jnp.moveaxis(part, 0, dim), dim, step, shape, sizes))
    return out


def _split(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Cuts the last dim into pieces, one for each of these shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    pieces = jnp.split(rows, ends.tolist(), axis=-1)
    return [
        piece.reshape(*rows.shape[:-1], *shape) for piece, shape in zip(pieces, shapes, strict=True)
    ]
