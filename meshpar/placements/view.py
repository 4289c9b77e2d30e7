"""Who holds what: a tensor's blocks as a coloured grid in notebooks, as a table in a terminal."""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from meshpar.grid_html import Cell, grid_html, rank_colour
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import block_of
from meshpar.placements.layout import Layout

__all__ = ["PlacementView"]

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True, repr=False)
class PlacementView:
    """A picture of which rank holds which block of a tensor.

    Args:
      shape: the tensor's global shape.
      dtype: the name of its dtype.
      layout: where it lies.
      mesh: the mesh; its devices need not be there.

    Printed it is a table, in Jupyter a grid: rows are the blocks of dim 0, columns those of dim 1,
    and each further dim that is cut makes one grid per block. A cell lists the ranks that hold it.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    mesh: ProcessMesh

    @property
    def title(self) -> str:
        """Type, placements and mesh in one line."""
        kind = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"{kind} {self.layout.placements(self.mesh)} on {self.mesh!s}"

    def holders(self) -> dict[tuple[tuple[int, int], ...], list[int]]:
        """Block, as `(start, stop)` per dim -> the ranks that hold it, or a contribution to it."""
        out: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in self.mesh.process_ids:
            box = block_of(
                self.shape, self.layout, self.mesh.axis_sizes, self.mesh.coordinate(rank)
            )
            out.setdefault(tuple((s.start, s.stop) for s in box), []).append(rank)
        return out

    def __repr__(self) -> str:
        table = Table()
        for column in ("ranks", "block", "rows held"):
            table.add_column(column)
        for block, ranks in self.holders().items():
            where = "[" + ", ".join(f"{start}:{stop}" for start, stop in block) + "]"
            sizes = " x ".join(str(stop - start) for start, stop in block) or "scalar"
            table.add_row(self._ranks_text(ranks), where, sizes)
        console = Console(width=100, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(table)
        return f"{self.title}\n{capture.get().rstrip()}"

    def html(self) -> str:
        """The picture as HTML."""
        grids = self.holders()
        edges = [sorted({block[dim] for block in grids}) for dim in range(len(self.shape))]
        rows = edges[0] if len(edges) > 0 else [None]
        columns = edges[1] if len(edges) > 1 else [None]
        out = [f'<div><b style="font-family:monospace">{html.escape(self.title)}</b><br>']
        for rest in itertools.product(*edges[2:]):
            where = ", ".join(f"dim {d}: {a}:{b}" for d, (a, b) in enumerate(rest, start=2))
            table = {
                (i, j): grids.get(tuple(e for e in (row, column, *rest) if e is not None), [])
                for i, row in enumerate(rows)
                for j, column in enumerate(columns)
            }
            out.append(
                grid_html(
                    where,
                    (len(rows), len(columns)),
                    lambda i, j, table=table: self._cell(table[i, j]),
                    [f"{r[0]}:{r[1]}" if r else "" for r in rows],
                    [f"{c[0]}:{c[1]}" if c else "" for c in columns],
                )
            )
        return "".join([*out, "</div>"])

    def _repr_html_(self) -> str:
        return self.html()

    def _cell(self, ranks: list[int]) -> Cell:
        if not ranks:
            return "", "transparent", "no such block"
        pending = ", ".join(f"{kind.word} over {axis}" for axis, kind in self.layout.partial)
        tip = f"held by rank(s) {ranks}" + (f"; pending: {pending}" if pending else "")
        return self._ranks_text(ranks), rank_colour(ranks[0]), tip

    def _ranks_text(self, ranks: list[int]) -> str:
        """Ranks joined by `+` where each holds a contribution, by a blank where they are copies."""
        sizes: Mapping[str, int] = self.mesh.axis_sizes
        pending = [axis for axis in sizes if axis in self.layout.partial_axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            at = self.mesh.coordinate(rank)
            groups.setdefault(tuple(at[axis] for axis in pending), []).append(rank)
        return " + ".join(" ".join(map(str, group)) for group in groups.values())
