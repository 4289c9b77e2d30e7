"""The global shape of a value that is given in pieces, by ranks or by processes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshpar.errors import PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import block_of, shards_on
from meshpar.placements.layout import Layout

__all__ = ["Piece", "box_of", "global_shape"]

Shape = tuple[int, ...]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece that somebody gives.

    Args:
      ranks: those whose blocks it holds.
      shape: its shape.
      process: the process that gives it for all its ranks, `None` where one rank does.
    """

    ranks: tuple[int, ...]
    shape: Shape
    process: int | None = None

    def __str__(self) -> str:
        return f"rank {self.ranks[0]}" if self.process is None else f"process {self.process}"


def global_shape(pieces: Sequence[Piece], layout: Layout, mesh: ProcessMesh) -> Shape:
    """The shape of which the pieces are the blocks.

    Raises:
      PlacementError: there is none, or the ranks of a piece hold no part in one piece.
    """
    for piece in pieces:
        if len(piece.shape) != layout.ndim:
            raise PlacementError(
                f"{piece} gives a piece of {len(piece.shape)} dims, and {pieces[0]} one of "
                f"{layout.ndim}."
            )
        _check_box(piece, layout, mesh)
    shape = tuple(_length(pieces, dim, layout, mesh) for dim in range(layout.ndim))
    for piece in pieces:
        block = tuple(s.stop - s.start for s in box_of(piece, shape, layout, mesh))
        if piece.shape != block:
            its = "its block has" if piece.process is None else f"its ranks {piece.ranks} hold"
            raise PlacementError(
                f"{piece} gives a piece of shape {piece.shape}, {its} {block}.",
                placements=layout.placements(mesh),
                because=f"the pieces together make a global shape {shape}, whose blocks have "
                "ceil(d / n) rows, the last ones fewer",
            )
    return shape


def box_of(piece: Piece, shape: Shape, layout: Layout, mesh: ProcessMesh) -> tuple[slice, ...]:
    """The part of the value that a piece holds."""
    boxes = [block_of(shape, layout, mesh.axis_sizes, mesh.coordinate(r)) for r in piece.ranks]
    return tuple(
        slice(min(s.start for s in along), max(s.stop for s in along))
        for along in zip(*boxes, strict=True)
    )


def _length(pieces: Sequence[Piece], dim: int, layout: Layout, mesh: ProcessMesh) -> int:
    """A dim is as long as the pieces along it are together."""
    lengths: dict[Span, int] = {}
    for piece in pieces:
        lengths.setdefault(_span(piece, dim, layout, mesh), piece.shape[dim])
    spans = sorted(lengths)
    ends = [0, *(stop for _, stop in spans)]
    if any(start != end for (start, _), end in zip(spans, ends, strict=False)):
        raise PlacementError(
            f"the pieces overlap along dim {dim}.",
            because=f"they hold the blocks {', '.join(f'{a} to {b - 1}' for a, b in spans)} of it",
            instead="a list with one piece per rank of this process",
        )
    return sum(lengths.values())


def _span(piece: Piece, dim: int, layout: Layout, mesh: ProcessMesh) -> Span:
    numbers = {_number(mesh.coordinate(r), layout.dims[dim], mesh.axis_sizes) for r in piece.ranks}
    return min(numbers), max(numbers) + 1


def _number(at: Mapping[str, int], axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """The position of a block among those of its dim."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + at[axis]
    return number


def _check_box(piece: Piece, layout: Layout, mesh: ProcessMesh) -> None:
    """A process can give one piece if its ranks' blocks make one box, and one contribution."""
    if len(piece.ranks) == 1:
        return
    at = [mesh.coordinate(rank) for rank in piece.ranks]
    pending = [axis for axis in layout.partial_axes if len({c[axis] for c in at}) > 1]
    if pending:
        raise PlacementError(
            f"{piece} gives one piece for several contributions.",
            because=f"its ranks {piece.ranks} are apart on {pending[0]!r}, along which the "
            "reduction is pending",
            instead="a list with one contribution per rank of this process",
        )
    held = {tuple(_number(c, axes, mesh.axis_sizes) for axes in layout.dims) for c in at}
    along = [sorted({block[dim] for block in held}) for dim in range(layout.ndim)]
    whole = all(numbers[-1] - numbers[0] < len(numbers) for numbers in along)
    if not whole or held != set(itertools.product(*along)):
        counts = [shards_on(axes, mesh.axis_sizes) for axes in layout.dims]
        raise PlacementError(
            f"the blocks of {piece} do not make one piece.",
            because=f"its ranks {piece.ranks} hold the blocks {sorted(held)} of {counts}",
            instead="a list with one piece per rank of this process",
        )
