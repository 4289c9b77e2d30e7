"""Between a global value and the pieces that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from meshpar._jax import is_tracer
from meshpar.errors import MeshparError, PlacementError
from meshpar.mesh import ProcessMesh, ranked_devices
from meshpar.placements.annotate import annotate, annotation_of
from meshpar.placements.blocks import (
    block_of,
    local_shape,
    partial_axes_in_order,
    storage_shape,
    storage_sharding,
)
from meshpar.placements.layout import Layout
from meshpar.placements.reductions import check_dtype, reduce_stacked
from meshpar.placements.types import Placement
from meshpar.placements.values import Value, describe, placed, wrap

__all__ = ["dtensor_from_local", "local_value"]

Shape = tuple[int, ...]


def dtensor_from_local(
    local: Any, mesh: ProcessMesh, placements: Sequence[Placement]
) -> Value | jax.Array:
    """The global value whose pieces are given.

    Args:
      local: one piece per rank of the mesh, in the order of `mesh.process_ids`; with several
        processes those of this process's ranks, in that order. A single array stands for a list of
        one. A piece has the shape of its block: `ceil(d / n)` rows of a dim of size d, the last
        blocks fewer; for a `Partial` the full shape of its contribution.
      mesh: the mesh.
      placements: one per mesh axis, outermost first; missing ones are `Replicate()`.

    Returns:
      A `jax.Array` or `DistTensor` of the global shape. In traced code the global value, annotated;
      the gradient of a piece is that of its part, or of its contribution.

    Raises:
      PlacementError: a wrong number of pieces, or pieces whose shapes are not the blocks of any
        global shape.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> mp.dtensor_from_local([np.ones((2, 3))], mesh, [mp.Shard(0)]).shape
      (2, 3)

    Follows `paddle.distributed.auto_parallel.api.dtensor_from_local` (3.3.1), where a rank is a
    process and gives one piece.
    """
    pieces = list(local) if isinstance(local, (list, tuple)) else [local]
    try:
        return _joined(pieces, mesh, placements)
    except MeshparError as error:
        shapes = [tuple(np.shape(piece)) for piece in pieces]
        raise error.within("dtensor_from_local(local)", pieces=shapes, mesh=mesh) from None


def local_value(x: Value, rank: int) -> jax.Array:
    """The piece of a value that one rank holds, without padding.

    Args:
      x: a placed value, or an annotated tracer.
      rank: a rank of `mesh_of(x)`.

    Returns:
      A `jax.Array` of the block's shape, on that rank's device. Ranks at the end of an uneven dim
      hold shorter or empty blocks. For a `Partial` it is the contribution.

    Raises:
      PlacementError: `x` lies on no mesh, or is a traced value with a pending reduction.
      MeshError: the rank is not in the mesh.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> mp.local_value(mp.shard_tensor([1, 2, 3], mesh, [mp.Shard(0)]), rank=0)
      Array([1, 2, 3], dtype=int32)

    The counterpart of Paddle's `Tensor._local_value()`.
    """
    try:
        known = annotation_of(x)
        if known is not None:
            return _traced_block(x, *known, rank)
        source = placed(x)
        if source is None:
            raise PlacementError("it does not lie on a mesh.")
        box = block_of(
            source.shape, source.layout, source.mesh.axis_sizes, source.mesh.coordinate(rank)
        )
        device = ranked_devices()[rank]
        mine = [s.data for s in source.storage.addressable_shards if s.device == device]
        if not mine:
            raise PlacementError(f"rank {rank} belongs to another process.")
        piece = mine[0].reshape(mine[0].shape[len(source.layout.partial) :])
        return piece[tuple(slice(0, s.stop - s.start) for s in box)]
    except MeshparError as error:
        raise error.within("local_value(x)", x=describe(x), rank=rank) from None


def _traced_block(x: Any, mesh: ProcessMesh, layout: Layout, rank: int) -> jax.Array:
    if layout.partial:
        raise PlacementError(
            "in traced code a pending reduction has no pieces: the traced value is the whole one.",
            instead="reshard it to Replicate() or Shard(dim) first",
        )
    return x[block_of(x.shape, layout, mesh.axis_sizes, mesh.coordinate(rank))]


def _joined(pieces: list[Any], mesh: ProcessMesh, placements: Sequence[Placement]) -> Value:
    traced = any(is_tracer(piece) for piece in pieces)
    ranks = mesh.process_ids if traced else _my_ranks(mesh)
    if len(pieces) != len(ranks):
        raise PlacementError(
            f"{len(pieces)} piece(s) for {len(ranks)} rank(s).",
            because="each rank of the mesh gives one, in the order of mesh.process_ids",
        )
    arrays = [jnp.asarray(piece) for piece in pieces]
    layout = Layout.of(placements, mesh, arrays[0].ndim)
    check_dtype(layout, arrays[0].dtype)
    by_rank = dict(zip(ranks, arrays, strict=True))
    shape = _global_shape(by_rank, layout, mesh)
    _check_blocks(by_rank, shape, layout, mesh)
    if traced:
        return annotate(_joined_value(by_rank, layout, mesh), mesh, layout)
    return wrap(_stored(by_rank, shape, layout, mesh), shape, layout, mesh)


def _my_ranks(mesh: ProcessMesh) -> list[int]:
    devices = ranked_devices()
    mesh.jax_mesh  # noqa: B018  # raises when devices are missing
    return [r for r in mesh.process_ids if devices[r].process_index == jax.process_index()]


def _global_shape(pieces: Mapping[int, jax.Array], layout: Layout, mesh: ProcessMesh) -> Shape:
    """Each dim is as long as the pieces along its axes are together, elsewhere at coordinate 0."""
    shapes = np.zeros((mesh.size, layout.ndim), np.int32)
    row = {rank: i for i, rank in enumerate(mesh.process_ids)}
    for rank, piece in pieces.items():
        shapes[row[rank]] = piece.shape
    if len(pieces) < mesh.size:  # every process tells the shapes of its pieces
        shapes = np.asarray(multihost_utils.process_allgather(shapes)).max(axis=0)

    def length(dim: int, axes: tuple[str, ...]) -> int:
        line = (
            rank
            for rank in row
            if not any(c for axis, c in mesh.coordinate(rank).items() if axis not in axes)
        )
        return sum(int(shapes[row[rank], dim]) for rank in line)

    return tuple(length(dim, axes) for dim, axes in enumerate(layout.dims))


def _check_blocks(
    pieces: Mapping[int, jax.Array], shape: Shape, layout: Layout, mesh: ProcessMesh
) -> None:
    for rank, piece in pieces.items():
        box = block_of(shape, layout, mesh.axis_sizes, mesh.coordinate(rank))
        block = tuple(s.stop - s.start for s in box)
        if piece.shape != block:
            raise PlacementError(
                f"rank {rank} gives a piece of shape {piece.shape}, its block has {block}.",
                placements=layout.placements(mesh),
                because=f"the pieces together make a global shape {shape}, whose blocks have "
                "ceil(d / n) rows, the last ones fewer",
            )


def _stored(
    pieces: Mapping[int, jax.Array], shape: Shape, layout: Layout, mesh: ProcessMesh
) -> jax.Array:
    sizes, devices = mesh.axis_sizes, ranked_devices()
    padded = local_shape(shape, layout, sizes)
    stacked = (1,) * len(layout.partial)

    def local(rank: int, piece: jax.Array) -> jax.Array:
        if piece.shape != padded:
            pad = [(0, size - there) for size, there in zip(padded, piece.shape, strict=True)]
            piece = jnp.pad(piece, pad)
        return jax.device_put(piece.reshape(*stacked, *padded), devices[rank])

    return jax.make_array_from_single_device_arrays(
        storage_shape(shape, layout, sizes),
        storage_sharding(layout, mesh),
        [local(rank, piece) for rank, piece in pieces.items()],
    )


def _joined_value(pieces: Mapping[int, jax.Array], layout: Layout, mesh: ProcessMesh) -> jax.Array:
    """The value in traced code: concatenated along cut dims, reduced over pending axes."""
    at = {tuple(mesh.coordinate(rank).values()): piece for rank, piece in pieces.items()}
    names = list(mesh.axis_names)
    # Innermost first: the later axis of the mesh is reduced first, the inner axis of a dim joined.
    pending = [*reversed(partial_axes_in_order(layout, mesh.axis_sizes))]
    cutting = [axis for axes in layout.dims for axis in reversed(axes)]
    for axis in (*pending, *cutting):
        position = names.index(axis)
        lines: dict[tuple[int, ...], list[jax.Array]] = {}
        for coordinate in sorted(at):
            rest = (*coordinate[:position], *coordinate[position + 1 :])
            lines.setdefault(rest, []).append(at[coordinate])
        dim, kind = layout.dim_of(axis), layout.kind_of(axis)
        at = {
            (*rest[:position], 0, *rest[position:]): jnp.concatenate(line, axis=dim)
            if kind is None
            else reduce_stacked(kind, jnp.stack(line), 0)
            for rest, line in lines.items()
        }
    return at[(0,) * mesh.ndim]
