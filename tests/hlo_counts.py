"""The collectives that a lowered or compiled module holds: kind, groups of devices, operand bytes.

`collectives_in_stablehlo(lowered.as_text())` reads what JAX asks for, and
`collectives_in_hlo(compiled.as_text())` what XLA made of it. Devices are positions in the mesh in
row-major order, which is how a jitted `shard_map` numbers them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshpar.mesh import ProcessMesh

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_permute")
Groups = tuple[tuple[int, ...], ...]


class Found(NamedTuple):
    """One collective in a module: its replica groups or source-target pairs, and operand bytes."""

    groups: Groups
    bytes: int


Collectives = dict[str, list[Found]]


def sent_bytes(kind: str, found: Found) -> int:
    """What a device sends, by the table that meshpar's plans use; rounded up."""
    if kind == "collective_permute":
        return found.bytes if any(a != b for a, b in found.groups) else 0
    n = len(found.groups[0])
    factor = {"all_gather": n * (n - 1), "all_reduce": 2 * (n - 1)}.get(kind, n - 1)
    return -(-found.bytes * factor // n)


def axes_of_groups(groups: Groups, mesh: ProcessMesh) -> tuple[str, ...]:
    """The mesh axes along which the groups lie, in the order in which they number devices.

    Raises:
      ValueError: the groups lie along no axes of the mesh.
    """
    grid = np.arange(mesh.size).reshape(mesh.shape)
    n = len(groups[0])
    used = [i for i, size in enumerate(mesh.shape) if size > 1]
    for ordered in (True, False):
        wanted = {group if ordered else tuple(sorted(group)) for group in groups}
        for count in range(len(used) + 1):
            for axes in itertools.permutations(used, count):
                if math.prod(mesh.shape[i] for i in axes) != n:
                    continue
                rest = [i for i in range(mesh.ndim) if i not in axes]
                lines = np.transpose(grid, [*rest, *axes]).reshape(-1, n).tolist()
                if {tuple(line if ordered else sorted(line)) for line in lines} == wanted:
                    return tuple(mesh.dim_names[i] for i in axes)
    raise ValueError(f"{groups} lie along no axes of {mesh!r}")


def axes_of_pairs(pairs: Groups, mesh: ProcessMesh) -> tuple[str, ...]:
    """The mesh axes along which source-target pairs move something, in the order of the mesh."""
    ends = np.array(pairs).reshape(-1, 2)
    moved = [
        a != b for a, b in zip(*(np.unravel_index(e, mesh.shape) for e in ends.T), strict=True)
    ]
    return tuple(name for name, m in zip(mesh.dim_names, moved, strict=True) if m.any())


def axes_of(kind: str, found: Found, mesh: ProcessMesh) -> tuple[str, ...]:
    """The mesh axes of a collective of any kind."""
    return (axes_of_pairs if kind == "collective_permute" else axes_of_groups)(found.groups, mesh)


def counts(collectives: Collectives) -> Counter[str]:
    """Kind -> how many."""
    return Counter({kind: len(found) for kind, found in collectives.items()})


# --- StableHLO ------------------------------------------------------------------------------------

_OP = re.compile(rf'"stablehlo\.({"|".join(KINDS)})"')
_DENSE = re.compile(
    r"(?:replica_groups|source_target_pairs) = dense<(.*?)> : tensor<(\d+)x(\d+)xi64>"
)
_MESH_AXES = re.compile(
    r"replica_groups = #stablehlo\.replica_group_mesh_axes<mesh = @(\w+), axes = \[(.*?)\]>"
)
_AXIS_NAME = re.compile(r'axis_ref<name = "(\w+)">')
_MESH = re.compile(r"sdy\.mesh @(\w+) = <\[(.*?)\]")
_AXIS_SIZE = re.compile(r'"(\w+)"=(\d+)')
_OPERANDS = re.compile(r" : \((tensor<.*?)\) -> ")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(complex<f\d+>|\w+)>")


def collectives_in_stablehlo(text: str) -> Collectives:
    """The collectives of a module as `jax.jit(f).lower(...).as_text()` prints it, in text order."""
    meshes = {
        name: {axis: int(size) for axis, size in _AXIS_SIZE.findall(axes)}
        for name, axes in _MESH.findall(text)
    }
    out: Collectives = defaultdict(list)
    for op in _OP.finditer(text):
        attributes, rest = text[op.end() :].split("}>", 1)
        operands = _OPERANDS.search(rest)
        assert operands, f"no operand types behind {op.group()}"
        size = sum(
            math.prod(int(n) for n in dims.split("x") if n) * _itemsize(element)
            for dims, element in _TENSOR.findall(operands.group(1))
        )
        out[op.group(1)].append(Found(_stablehlo_groups(attributes, meshes), size))
    return dict(out)


def _stablehlo_groups(attributes: str, meshes: dict[str, dict[str, int]]) -> Groups:
    by_axes = _MESH_AXES.search(attributes)
    if by_axes:
        return _along(meshes[by_axes[1]], _AXIS_NAME.findall(by_axes[2]))
    dense = _DENSE.search(attributes)
    assert dense, f"no groups in {attributes}"
    literal, rows, columns = dense[1], int(dense[2]), int(dense[3])
    if literal.startswith('"0x'):
        numbers = np.frombuffer(bytes.fromhex(literal[3:-1]), "<i8")
    else:
        numbers = np.array([int(n) for n in re.findall(r"-?\d+", literal)])
    return _rows(np.broadcast_to(numbers, rows * columns).reshape(rows, columns))


# --- HLO ------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%?[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)", re.M)
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{(.*?)\}"
)
_NAMED_SIZE = re.compile(r"'(\w+)'=(\d+)")


def collectives_in_hlo(text: str) -> Collectives:
    """The collectives of a module as `compiled.as_text()` prints it, in text order.

    A start and its done count once.
    """
    lines = [
        (found, text[found.start() : text.find("\n", found.end())])
        for found in _INSTRUCTION.finditer(text)
    ]
    sizes = {found[1].lstrip("%"): _hlo_bytes(found[2]) for found, _ in lines}
    out: Collectives = defaultdict(list)
    for found, line in lines:
        kind = found[3].removesuffix("-start").replace("-", "_")
        if kind in KINDS:
            operands = re.findall(r"%?([A-Za-z_][\w.-]*)(?=,|$)", found[4])
            size = sum(sizes[name] for name in operands)
            out[kind].append(Found(_hlo_groups(line), size))
    return dict(out)


def _hlo_bytes(shape: str) -> int:
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * _itemsize(element)
        for element, dims in _SHAPE.findall(shape)
    )


def _hlo_groups(line: str) -> Groups:
    named = _NAMED.search(line)
    if named:
        sizes = {axis: int(size) for axis, size in _NAMED_SIZE.findall(named[1])}
        groups = _along(sizes, re.findall(r"'(\w+)'", named[4]))
        if named[2] is None:
            return groups
        devices = _iota(named[2], named[3]).ravel()
        return tuple(tuple(int(devices[i]) for i in group) for group in groups)
    iota = _IOTA.search(line)
    if iota:
        shape = tuple(map(int, iota[1].split(",")))
        return _rows(_iota(iota[2], iota[3]).reshape(shape))
    listed = _LISTED.search(line)
    assert listed, f"no groups in {line}"
    return tuple(
        tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]*)\}", listed[1])
    )


def _iota(shape: str, transposed: str | None) -> np.ndarray:
    """Device numbers as HLO writes them: counted in a shape, then transposed."""
    dims = tuple(map(int, shape.split(",")))
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose([int(i) for i in transposed.split(",")]) if transposed else numbers


# --- both -----------------------------------------------------------------------------------------


def _along(sizes: dict[str, int], axes: Sequence[str]) -> Groups:
    names = list(sizes)
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    order = [i for i, name in enumerate(names) if name not in axes] + [names.index(a) for a in axes]
    return _rows(grid.transpose(order).reshape(-1, math.prod(sizes[a] for a in axes)))


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in numbers.tolist())


def _itemsize(element: str) -> int:
    """Bytes of an element; below 8 bits 1, as CPU stores it."""
    known = {"pred": 1, "i1": 1, "c64": 8, "c128": 16, "complex<f32>": 8, "complex<f64>": 16}
    if element in known:
        return known[element]
    bits = re.match(r"[a-z]+?(\d+)", element)
    return max(1, int(bits[1]) // 8) if bits else 0  # tokens and the like hold nothing
