"""Between a global value and the pieces that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
from meshpar.placements.pieces import Piece, box_of, global_shape
from meshpar.placements.reductions import check_dtype, reduce_stacked
from meshpar.placements.types import Placement
from meshpar.placements.values import Value, describe, placed, wrap
from meshpar.tell_all import tell_all

__all__ = ["dtensor_from_local", "join_parts", "local_value", "processes_of"]

Shape = tuple[int, ...]


def dtensor_from_local(
    local: Any, mesh: ProcessMesh, placements: Sequence[Placement]
) -> Value | jax.Array:
    """The global value whose pieces are given.

    Args:
      local: a list with one piece per rank of the mesh, in the order of `mesh.process_ids`; with
        several processes, one per rank of this process. Or an array, this process's piece: what its
        ranks hold together, without repetition, which must make one box. A rank's piece has the
        shape of its block: `ceil(d / n)` rows of a dim of size d, the last blocks fewer; for a
        `Partial` the full shape of its contribution, one per rank.
      mesh: the mesh; all processes that have a device of it call this.
      placements: one per mesh axis, outermost first; missing ones are `Replicate()`.

    Returns:
      A `jax.Array` or `DistTensor` of the global shape. In traced code the global value, annotated;
      the gradient of a piece is that of its part, or of its contribution.

    Raises:
      PlacementError: a wrong number of pieces, pieces whose shapes are not the blocks of any
        global shape, or processes that disagree about dtype or placements. Every process raises.

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
        return _joined(local, mesh, placements)
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


def _joined(local: Any, mesh: ProcessMesh, placements: Sequence[Placement]) -> Value:
    pieces = list(local) if isinstance(local, (list, tuple)) else [local]
    if any(is_tracer(piece) for piece in pieces):
        arrays = _one_each(pieces, mesh.process_ids)
        layout = _layout(arrays, mesh, placements)
        global_shape([Piece((r,), x.shape) for r, x in arrays.items()], layout, mesh)
        return annotate(_joined_value(arrays, layout, mesh), mesh, layout)
    ranks = _my_ranks(mesh)
    if not ranks:
        raise PlacementError(f"process {jax.process_index()} has no rank of the mesh.")
    together = pieces[0] is local and len(ranks) > 1
    said: dict[str, Any] = {}
    try:
        arrays = {ranks[0]: jnp.asarray(local)} if together else _one_each(pieces, ranks)
        layout = _layout(arrays, mesh, placements)
        said["pieces"] = [[ranks if together else [r], x.shape] for r, x in arrays.items()]
        said["as"] = f"{next(iter(arrays.values())).dtype} in {layout.placements(mesh)}"
    except MeshparError as error:
        said["error"] = error.headline  # the others must not wait
        tell_all(_topic(mesh), said, processes_of(mesh))
        raise
    everywhere = _told(said, mesh)
    shape = global_shape(everywhere, layout, mesh)
    if together:
        arrays = _cut(arrays[ranks[0]], everywhere, shape, layout, mesh)
    return wrap(_stored(arrays, shape, layout, mesh), shape, layout, mesh)


def join_parts(
    part: Any, shapes: Sequence[Shape], mesh: ProcessMesh, placements: Sequence[Placement]
) -> Value:
    """`dtensor_from_local` of this process's part, where the shapes of all parts are known.

    Args:
      part: an array.
      shapes: those of the parts of the processes of the mesh, in the order of their numbers.
      mesh: the mesh.
      placements: one per mesh axis.
    """
    array = jnp.asarray(part)
    layout = _layout({0: array}, mesh, placements)
    devices = ranked_devices()
    pieces = [
        Piece(tuple(r for r in mesh.process_ids if devices[r].process_index == p), shape, p)
        for p, shape in zip(processes_of(mesh), shapes, strict=True)
    ]
    shape = global_shape(pieces, layout, mesh)
    arrays = _cut(array, pieces, shape, layout, mesh)
    return wrap(_stored(arrays, shape, layout, mesh), shape, layout, mesh)


def _one_each(pieces: list[Any], ranks: Sequence[int]) -> dict[int, jax.Array]:
    if len(pieces) != len(ranks):
        raise PlacementError(
            f"{len(pieces)} piece(s) for {len(ranks)} rank(s).",
            because="each rank of the mesh gives one, in the order of mesh.process_ids",
        )
    return dict(zip(ranks, map(jnp.asarray, pieces), strict=True))


def _layout(
    arrays: Mapping[int, jax.Array], mesh: ProcessMesh, placements: Sequence[Placement]
) -> Layout:
    first = next(iter(arrays.values()))
    layout = Layout.of(placements, mesh, first.ndim)
    check_dtype(layout, first.dtype)
    return layout


def _my_ranks(mesh: ProcessMesh) -> list[int]:
    devices = ranked_devices()
    mesh.jax_mesh  # noqa: B018  # raises when devices are missing
    return [r for r in mesh.process_ids if devices[r].process_index == jax.process_index()]


def processes_of(mesh: ProcessMesh) -> list[int]:
    """The numbers of the processes that have a device of a mesh."""
    devices = ranked_devices()
    return sorted({devices[rank].process_index for rank in mesh.process_ids})


def _topic(mesh: ProcessMesh) -> str:
    return f"pieces on mesh {mesh.unique_id}"


def _told(said: dict[str, Any], mesh: ProcessMesh) -> list[Piece]:
    """The pieces of all processes.

    Raises:
      PlacementError: a process has another dtype or other placements, or what it gives is wrong.
    """
    processes = processes_of(mesh)
    found: list[Piece] = []
    for process, told in zip(processes, tell_all(_topic(mesh), said, processes), strict=True):
        if "error" in told:
            raise PlacementError(f"on process {process}: {told['error']}")
        if told["as"] != said["as"]:
            raise PlacementError(
                f"process {process} gives {told['as']}, and process {jax.process_index()} "
                f"{said['as']}."
            )
        for ranks, shape in told["pieces"]:
            by = process if len(ranks) > 1 else None
            found.append(Piece(tuple(ranks), tuple(shape), by))
    return found


def _cut(
    array: jax.Array, pieces: Sequence[Piece], shape: Shape, layout: Layout, mesh: ProcessMesh
) -> dict[int, jax.Array]:
    """The blocks of this process's ranks, from the piece that it gives for all of them."""
    mine = _my_ranks(mesh)[0]
    piece = next(piece for piece in pieces if mine in piece.ranks)
    whole = box_of(piece, shape, layout, mesh)

    def block(rank: int) -> jax.Array:
        box = block_of(shape, layout, mesh.axis_sizes, mesh.coordinate(rank))
        at = zip(box, whole, strict=True)
        return array[tuple(slice(b.start - w.start, b.stop - w.start) for b, w in at)]

    return {rank: block(rank) for rank in piece.ranks}


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
