"""The collectives of a compiled program, read from its text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from meshpar.mesh import ProcessMesh

__all__ = ["Collective", "CollectiveTable", "collectives_of"]

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
# The start of an asynchronous pair counts for both; its result repeats the operand.
_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<rest>.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Newer XLA names axes of a mesh of its own, or parts of them: 'a', or 'a':(2)4, which is the middle
# of 'a' split into 2 x 4 x the rest.
_NAMED = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{(.*?)\}"
)
_NAMED_SIZE = re.compile(r"'(\w+)'=(\d+)")
_NAMED_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    Args:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute" or
        "collective-broadcast".
      axes: the mesh axes that it runs over, in the order of the mesh.
      bytes: the size of its result on each device; in a loop, that of one trip.
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
        """(kind, axes) -> bytes of all results on each device."""
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            total[c.kind, c.axes] += c.bytes
        return dict(total)

    def axes(self) -> set[str]:
        """The mesh axes that any collective runs over."""
        return {axis for c in self.collectives for axis in c.axes}

    def __rich__(self) -> Table:
        table = Table()
        for column in ("collective", "mesh axes", "number", "bytes per device"):
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
    found: list[Collective] = []
    for line in text.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        size = _bytes_of(match["type"])
        if match["start"] and match["kind"] != "all-reduce":
            size = _bytes_of(match["type"].strip("()").rsplit("(", 1)[-1].split(", ")[-1])
        found.append(Collective(match["kind"], _axes_of(match["rest"], mesh), size))
    return CollectiveTable(tuple(found))


def _bytes_of(types: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(types):
        bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
        elements = math.prod(int(d) for d in dims.split(",") if d)
        total += elements * bits // 8
    return total


def _axes_of(attributes: str, mesh: ProcessMesh) -> tuple[str, ...]:
    """The axes along which the coordinates of some group's members differ."""
    shape = tuple(mesh.shape)
    differ: set[int] = set()
    for group in _groups(attributes, mesh.size):
        at = np.array(np.unravel_index(group, shape))
        differ.update(axis for axis in range(len(shape)) if len(set(at[axis])) > 1)
    return tuple(name for i, name in enumerate(mesh.axis_names) if i in differ)


def _groups(attributes: str, size: int) -> list[list[int]]:
    if (pairs := _PAIRS.search(attributes)) is not None:
        return _lists(pairs[1])
    if (named := _NAMED.search(attributes)) is not None:
        return _named_groups(*named.groups())
    if (iota := _IOTA.search(attributes)) is not None:
        return _iota(iota[2], iota[3]).reshape(_ints(iota[1])).tolist()
    if (listed := _LISTED.search(attributes)) is not None:
        return _lists(listed[1])
    return [list(range(size))]  # no groups: all devices


def _named_groups(axes: str, devices: str | None, order: str | None, along: str) -> list[list[int]]:
    parts = {name: (pre, size) for name, pre, size in _NAMED_PART.findall(along)}
    shape: list[int] = []
    grouped: list[int] = []  # the dims of `shape` that the groups run along
    for name, word in _NAMED_SIZE.findall(axes):
        whole = int(word)
        if name in parts:
            pre, size = (int(parts[name][0] or 1), int(parts[name][1] or whole))
            grouped.append(len(shape) + 1)
            shape += [pre, size, whole // (pre * size)]
        else:
            shape.append(whole)
    ids = np.arange(math.prod(shape)) if devices is None else _iota(devices, order)
    rest = [dim for dim in range(len(shape)) if dim not in grouped]
    length = math.prod(shape[dim] for dim in grouped)
    return ids.reshape(shape).transpose([*rest, *grouped]).reshape(-1, length).tolist()


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Device numbers as HLO writes them: counted in a shape, then transposed."""
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _lists(text: str) -> list[list[int]]:
    return [_ints(part) for part in re.findall(r"\{([\d, ]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(word) for word in text.replace(" ", "").split(",") if word]
