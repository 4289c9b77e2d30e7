"""`reshard`: other placements, or another mesh, for a value that stays the same."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from meshpar._jax import is_key_array, is_tracer
from meshpar.errors import MeshparError, PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.annotate import annotate, annotation_of
from meshpar.placements.blocks import is_even, storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.reductions import check_dtype
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.storage import place_blocks, read_block
from meshpar.placements.types import Placement, Replicate
from meshpar.placements.values import Placed, Value, describe, placed, wrap

__all__ = ["reshard", "unshard_dtensor"]


def reshard(dist_tensor: Value, mesh: ProcessMesh, placements: Sequence[Placement]) -> Value:
    """Gives a value new placements; its global value, shape and dtype stay as they are.

    Args:
      dist_tensor: any global shape `(d0, d1, ...)`, placed on a mesh, or traced.
      mesh: the target mesh; it may be another one than `mesh_of(dist_tensor)`: a part of it, a
        disjoint one, one of another shape.
      placements: at most one per mesh axis, outermost first; missing ones are `Replicate()`.

    Returns:
      Global shape `(d0, d1, ...)`: a `jax.Array` if it can hold the layout, else a `DistTensor`.
      Local dim `i` is `ceil(di / n)`, n the product of the axes with `Shard(i)`; the padding of an
      uneven dim is never seen by the caller. The bits are those of the source, or of its reduction.

    Raises:
      PlacementError: not placed on a mesh, too many placements, a dim out of range, a reduction
        that the dtype does not have.

    Bytes sent per device and changed axis, s bytes of the shard before, n devices on the axis:
      Shard -> Replicate, all-gather, s*(n-1); Partial -> Replicate, all-reduce, 2*s*(n-1)/n;
      Partial -> Shard, reduce-scatter, and Shard -> another Shard, all-to-all, s*(n-1)/n.
      `mp.reshard_steps` lists them.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> x = mp.shard_tensor(np.ones((4, 2)), mesh, [mp.Shard(0)])
      >>> mp.placements_of(mp.reshard(x, mesh, [mp.Shard(1)]))
      [Shard(1)]

    Follows `paddle.distributed.reshard` (3.3.1).
    """
    try:
        if is_tracer(dist_tensor):
            return _traced(dist_tensor, mesh, placements)
        source = placed(dist_tensor)
        if source is None:
            raise PlacementError(
                "it does not lie on a mesh.",
                instead="shard_tensor(x, mesh, placements) places it",
            )
        layout = Layout.of(placements, mesh, len(source.shape))
        check_dtype(layout, source.storage.dtype)
        if source.mesh == mesh:
            storage = reshard_storage(source.storage, source.layout, layout, source.shape, mesh)
        else:
            storage = _moved(source, mesh, layout)
        return wrap(storage, source.shape, layout, mesh)
    except MeshparError as error:
        raise error.within("reshard(dist_tensor)", dist_tensor=describe(dist_tensor)) from None


def unshard_dtensor(dist_tensor: Value) -> jax.Array:
    """The value as a plain array that every device of its mesh holds whole.

    Args:
      dist_tensor: any global shape, placed on a mesh.

    Returns:
      A `jax.Array` of the same global shape.

    Raises:
      PlacementError: it does not lie on a mesh.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> mp.unshard_dtensor(mp.shard_tensor([1.0, 2.0], mesh, [mp.Partial()]))
      Array([1., 2.], dtype=float32)

    Follows `paddle.distributed.unshard_dtensor` (3.3.1).
    """
    source = placed(dist_tensor)
    if source is None:
        raise PlacementError(
            "unshard_dtensor(dist_tensor): it does not lie on a mesh.",
            dist_tensor=describe(dist_tensor),
        )
    whole = reshard(dist_tensor, source.mesh, [Replicate()] * source.mesh.ndim)
    assert isinstance(whole, jax.Array), "a replicated value is held by a jax.Array"
    return whole


def _traced(x: jax.Array, mesh: ProcessMesh, placements: Sequence[Placement]) -> jax.Array:
    layout = Layout.of(placements, mesh, x.ndim)
    check_dtype(layout, x.dtype)
    known = annotation_of(x)
    if known is None:
        return annotate(x, mesh, layout)
    if known[0] != mesh:
        raise NotImplementedError(
            f"reshard(x, {mesh!s}) inside traced code: x lies on {known[0]!s}, and one program "
            "runs on one mesh; reshard outside, or give both parts of the program one mesh"
        )
    return annotate(x, mesh, layout, source=known[1])


def _moved(source: Placed, mesh: ProcessMesh, layout: Layout) -> jax.Array:
    """The storage on another mesh: reduced where it lies, moved, and made partial there."""
    reduced = source.layout.without_partial()
    storage = reshard_storage(source.storage, source.layout, reduced, source.shape, source.mesh)
    target = layout.without_partial()
    both_even = is_even(source.shape, reduced, source.mesh.axis_sizes) and is_even(
        source.shape, target, mesh.axis_sizes
    )
    if both_even:
        storage = jax.device_put(storage, storage_sharding(target, mesh))
    else:
        storage = _moved_blockwise(storage, source, reduced, mesh, target)
    return reshard_storage(storage, target, layout, source.shape, mesh)


def _moved_blockwise(
    storage: jax.Array, source: Placed, reduced: Layout, mesh: ProcessMesh, target: Layout
) -> jax.Array:
    """Through the host, a block of the target at a time: `device_put` knows even dims only."""
    if is_key_array(storage):
        data = Placed(
            jax.random.key_data(storage), (*source.shape, 2), _grown(reduced), source.mesh
        )
        moved = _moved_blockwise(data.storage, data, data.layout, mesh, _grown(target))
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(storage))
    if not storage.is_fully_addressable:
        raise NotImplementedError(
            "reshard to another mesh of a tensor with uneven dims, across processes: "
            "reshard to Replicate() on its own mesh first"
        )

    def block(box: tuple[slice, ...]) -> np.ndarray:
        return read_block(storage, source.shape, reduced, source.mesh, box)

    return place_blocks(block, source.shape, storage.dtype, target, mesh)


def _grown(layout: Layout) -> Layout:
    """The layout of key data: one more dim, the words of a key."""
    return Layout((*layout.dims, ()), layout.partial)
