"""The collectives of a compiled program as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from meshpar.compiler.hlo import collectives_in_hlo, sent_bytes, touched_axes
from meshpar.mesh import ProcessMesh

__all__ = ["Collective", "CollectiveTable", "collectives_of"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    Args:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "collective_permute".
      axes: the mesh axes that it runs over, in the order of the mesh.
      bytes: what each device sends; in a loop, that of one trip.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class CollectiveTable:
    """The collectives of a program; printed, a table of how many of each kind and axes."""

    collectives: tuple[Collective, ...]

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.collectives)

    def __len__(self) -> int:
        return len(self.collectives)

    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """(kind, axes) -> how many."""
        return dict(Counter((c.kind, c.axes) for c in self.collectives))

    def bytes(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """(kind, axes) -> bytes that each device sends."""
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            total[c.kind, c.axes] += c.bytes
        return dict(total)

    def axes(self) -> set[str]:
        """The mesh axes that any collective runs over."""
        return {axis for c in self.collectives for axis in c.axes}

    def __rich__(self) -> Table:
        table = Table()
        for column in ("collective", "mesh axes", "number", "bytes sent per device"):
            table.add_column(column, justify="right" if column[0] in "nb" else "left")
        sizes = self.bytes()
        for (kind, axes), number in sorted(self.counts().items()):
            table.add_row(kind, ", ".join(axes), str(number), f"{sizes[kind, axes]:,}")
        return table

    def __repr__(self) -> str:
        console = Console(width=100, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get().rstrip()


def collectives_of(text: str, mesh: ProcessMesh) -> CollectiveTable:
    """The collectives in the text of a compiled program.

    Args:
      text: as `compiled.as_text()` gives it.
      mesh: the mesh that the program runs on.
    """
    return CollectiveTable(
        tuple(
            Collective(kind, touched_axes(one.groups, mesh), sent_bytes(kind, one, mesh.size))
            for kind, found in collectives_in_hlo(text).items()
            for one in found
        )
    )
