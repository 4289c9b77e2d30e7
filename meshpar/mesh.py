"""`ProcessMesh`: an n-d array of ranks with named axes, and the process-wide default mesh."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, SupportsIndex

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar.errors import MeshError
from meshpar.grid_html import mesh_html

__all__ = ["Group", "ProcessMesh", "get_mesh", "ranked_devices", "set_mesh"]

Index = SupportsIndex | slice | tuple[SupportsIndex | slice, ...]


Device = Any  # jax.Device, which JAX's type stubs do not show


def ranked_devices() -> list[Device]:
    """All devices by rank, which is `(process_index, id)` order: ids start at 2048 * process."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


class ProcessMesh:
    """An n-d array of ranks whose axes have names.

    A rank is the position of a device in `(process_index, id)` order, so rank `r` of a mesh over
    one process with 8 devices is its r-th device. A mesh may name ranks that this machine does
    not have (to plan for a pod); only placing data on it then fails.

    Args:
      mesh: nested lists or an array of distinct ranks >= 0; its shape is the mesh's shape.
      dim_names: one name per axis; `d0`, `d1`, ... when left out.
      shape: together with `process_ids`, another way of giving `mesh`.
      process_ids: the ranks in row-major order.

    Raises:
      MeshError: ranks that repeat or are negative, names that repeat or do not match the shape.

    Example:
      >>> mesh = ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], dim_names=["dp", "tp"])
      >>> mesh.get_dim_size("tp")
      4
      >>> mesh[1]
      ProcessMesh([4, 5, 6, 7], dim_names=['tp'])

    Follows `paddle.distributed.ProcessMesh` (3.3.1), with one deviation: two meshes are equal when
    shape, ranks *and names* are, because a name is part of what a layout says.
    """

    def __init__(
        self,
        mesh: object = None,
        dim_names: Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        process_ids: Iterable[int] | None = None,
    ) -> None:
        self._ranks = _ranks_from(mesh, shape, process_ids)
        names = [f"d{i}" for i in range(self._ranks.ndim)] if dim_names is None else dim_names
        self._names = _checked_names(names, self._ranks.shape)
        self._ranks.flags.writeable = False
        self._outer: list[ProcessMesh | None] = []

    # --- what the mesh is -------------------------------------------------------------------------

    @property
    def mesh(self) -> np.ndarray:
        """The ranks, as a read-only int array of the mesh's shape."""
        return self._ranks

    @property
    def shape(self) -> list[int]:
        """The size of each axis."""
        return list(self._ranks.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._ranks.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    @property
    def dim_names(self) -> list[str]:
        """The names of the axes."""
        return list(self._names)

    @property
    def process_ids(self) -> list[int]:
        """The ranks in row-major order."""
        return self._ranks.ravel().tolist()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, as a tuple."""
        return self._names

    @cached_property
    def axis_sizes(self) -> Mapping[str, int]:
        """Axis name -> size, in the order of the axes."""
        return dict(zip(self._names, self._ranks.shape, strict=True))

    @cached_property
    def unique_id(self) -> int:
        """A number that is the same in every process for an equal mesh."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:7], "big")

    def empty(self) -> bool:
        """Whether the mesh has no rank at all."""
        return self.size == 0

    def contains(self, process_id: int) -> bool:
        """Whether a rank is in the mesh."""
        return process_id in self._coordinates

    # --- axes and parts ---------------------------------------------------------------------------

    def axis_index(self, axis: str | int) -> int:
        """The position of an axis given by name or (possibly negative) position.

        Raises:
          MeshError: the mesh has no such axis.
        """
        if isinstance(axis, str):
            if axis in self._names:
                return self._names.index(axis)
        elif -self.ndim <= axis < self.ndim:
            return int(axis) % self.ndim
        raise MeshError(
            f"{axis!r} is not an axis of the mesh.",
            mesh=self,
            because=f"its axes are {', '.join(map(repr, self._names))}",
        )

    def get_dim_size(self, dim: str | int | None) -> int:
        """The size of an axis given by name or position; `None` has size 1, as in Paddle."""
        return 1 if dim is None else self._ranks.shape[self.axis_index(dim)]

    def dim_size(self, dim: str | int) -> int:
        """The size of an axis given by name or position."""
        return self.get_dim_size(dim)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name -> coordinate of a rank.

        Raises:
          MeshError: the rank is not in the mesh.
        """
        if rank not in self._coordinates:
            raise MeshError(f"rank {rank} is not in the mesh.", mesh=self)
        return dict(zip(self._names, self._coordinates[rank], strict=True))

    def get_rank_by_dim_and_process_id(self, dim: str | int | None, process_id: int) -> int:
        """The coordinate of a rank on an axis; -1 outside the mesh, 0 for `dim=None`."""
        if dim is None:
            return 0
        axis = self.axis_index(dim)
        return self._coordinates[process_id][axis] if self.contains(process_id) else -1

    def __getitem__(self, index: Index | str) -> ProcessMesh:
        """A part of the mesh.

        An int drops the first axis, a slice keeps it, a tuple indexes several axes, a name gives
        `get_submesh_with_dim(name)`. One single rank is a mesh of shape [1] with the axis `d0`.
        """
        if isinstance(index, str):
            return self.get_submesh_with_dim(index)
        parts = index if isinstance(index, tuple) else (index,)
        try:
            ranks = self._ranks[parts]
        except IndexError as error:
            raise MeshError(f"mesh[{index!r}]: {error}.", mesh=self) from None
        kept = [
            name
            for name, part in itertools.zip_longest(self._names, parts, fillvalue=slice(None))
            if isinstance(part, slice)
        ]
        if ranks.ndim == 0:
            return ProcessMesh(ranks.reshape(1), ["d0"])
        return ProcessMesh(ranks, [str(name) for name in kept])

    def get_mesh_with_dim(self, dim_name: str, index: Index | None = None) -> ProcessMesh:
        """The mesh with the named axis moved to the front; with `index`, its part there."""
        axis = self.axis_index(dim_name)
        names = [dim_name, *(name for name in self._names if name != dim_name)]
        moved = ProcessMesh(np.moveaxis(self._ranks, axis, 0), names)
        return moved if index is None else moved[index]

    def get_submesh_with_dim(self, dim_name: str) -> ProcessMesh:
        """The 1-d mesh along the named axis through this process's first rank in the mesh.

        Where this process owns no device of the mesh (one process that plans for a pod, say), the
        line goes through the mesh's first rank.
        """
        axis = self.axis_index(dim_name)
        at = self._coordinates[self._own_rank()]
        line = tuple(slice(None) if i == axis else c for i, c in enumerate(at))
        return ProcessMesh(self._ranks[line], [dim_name])

    def group(self, axes: str | Sequence[str] | None = None) -> Group:
        """The ranks that communicate along one axis, along several, or (without `axes`) all.

        Inside `mp.spmd` it stands for every such line of the mesh: each device communicates along
        its own. `ranks` are those of the line through this process's first rank.

        Raises:
          MeshError: the mesh has no such axis, or it is named twice.

        Example:
          >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
          >>> mesh.group("tp").ranks, mesh.group().nranks
          ((0, 1), 4)

        The counterpart of Paddle's `ProcessMesh.get_group`.
        """
        asked = (axes,) if isinstance(axes, str) else self._names if axes is None else tuple(axes)
        chosen = {self.axis_index(axis) for axis in asked}
        if len(chosen) < len(asked) or not asked:
            raise MeshError(f"mesh.group({axes!r}): name one or more axes, each once.", mesh=self)
        at = self._coordinates[self._own_rank()]
        line = tuple(slice(None) if i in chosen else c for i, c in enumerate(at))
        names = tuple(self._names[i] for i in sorted(chosen))
        return Group(tuple(self._ranks[line].ravel().tolist()), self, names)

    def _own_rank(self) -> int:
        """This process's first rank in the mesh; the mesh's first where it owns none."""
        mine = [r for r, d in enumerate(ranked_devices()) if d.process_index == jax.process_index()]
        return next((r for r in mine if self.contains(r)), self.process_ids[0])

    # --- the same mesh for JAX --------------------------------------------------------------------

    @cached_property
    def jax_mesh(self) -> Mesh:
        """The `jax.sharding.Mesh` over this mesh's devices, with Auto axes.

        Raises:
          MeshError: the mesh names more devices than there are.
        """
        devices = ranked_devices()
        need = max(self.process_ids, default=-1) + 1
        if need > len(devices):
            raise MeshError(
                "the mesh names devices that are not there.",
                mesh=self,
                because=f"its largest rank is {need - 1}, and JAX sees {len(devices)} "
                f"{devices[0].platform} device(s), ranks 0 to {len(devices) - 1}",
                instead=f"mp.set_host_device_count({need}) before JAX is first used, or "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={need}",
            )
        grid = np.empty(self._ranks.shape, dtype=object)
        grid.ravel()[:] = [devices[rank] for rank in self.process_ids]
        return Mesh(grid, self._names, axis_types=(AxisType.Auto,) * self.ndim)

    @cached_property
    def abstract_mesh(self) -> AbstractMesh:
        """The `jax.sharding.AbstractMesh` of the same shape, which needs no devices."""
        return AbstractMesh(self._ranks.shape, self._names, axis_types=(AxisType.Auto,) * self.ndim)

    @classmethod
    def from_jax(cls, mesh: Mesh) -> ProcessMesh:
        """The `ProcessMesh` of a `jax.sharding.Mesh`, whatever its axis types.

        Example:
          >>> import jax
          >>> ProcessMesh.from_jax(jax.make_mesh((1,), ("dp",))).dim_names
          ['dp']
        """
        rank_of = {device: rank for rank, device in enumerate(ranked_devices())}
        ranks = np.array([rank_of[d] for d in mesh.devices.ravel()], dtype=np.int64)
        return cls(ranks.reshape(mesh.devices.shape), [str(name) for name in mesh.axis_names])

    @classmethod
    def create(cls, axes: Mapping[str, int]) -> ProcessMesh:
        """A mesh whose devices are ordered for the hardware's topology.

        Neighbours along the last axes are neighbours in the torus of a TPU slice, or share a node:
        give the axis that communicates most last.

        Args:
          axes: axis name -> size, outermost first.

        Example:
          >>> ProcessMesh.create({"dp": 1}).shape
          [1]
        """
        shape = tuple(axes.values())
        need = math.prod(shape)
        devices = ranked_devices()
        if need > len(devices):
            return cls(np.arange(need).reshape(shape), list(axes))
        rank_of = {device: rank for rank, device in enumerate(devices)}
        grid = mesh_utils.create_device_mesh(shape, devices[:need], allow_split_physical_axes=True)
        ranks = np.array([rank_of[device] for device in grid.ravel()], dtype=np.int64)
        return cls(ranks.reshape(shape), list(axes))

    # --- value semantics --------------------------------------------------------------------------

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return {int(rank): at for at, rank in np.ndenumerate(self._ranks)}

    @cached_property
    def _key(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
        return self._ranks.shape, tuple(self.process_ids), self._names

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ProcessMesh) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"ProcessMesh({self._ranks.tolist()}, dim_names={list(self._names)})"

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axis_sizes.items())
        return f"ProcessMesh({sizes})"

    def _repr_html_(self) -> str:
        return mesh_html(self._ranks, self._names)

    # --- the default mesh -------------------------------------------------------------------------

    def __enter__(self) -> ProcessMesh:
        self._outer.append(get_mesh())
        set_mesh(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _default.mesh = self._outer.pop()


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate with each other, in the order of `ranks`.

    Args:
      ranks: the members: devices inside `mp.spmd`, processes outside.
      mesh: the mesh whose axes the group follows, if it follows axes.
      axes: those axes, in the order of the mesh. Inside a region the group then stands for every
        line of the mesh along them.
      id: its number among those of `mp.new_group`; 0 is the world, `None` one of a mesh.
      timeout: seconds after which a collective between processes raises; `None` leaves it to the
        watchdog.

    `mp.new_group` and `ProcessMesh.group` make them; `mp.get_rank(group)` is Paddle's `group.rank`.

    Follows `paddle.distributed.communication.group.Group` (3.3.1).
    """

    ranks: tuple[int, ...]
    mesh: ProcessMesh | None = None
    axes: tuple[str, ...] = ()
    id: int | None = None
    timeout: float | None = None

    @property
    def nranks(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        """The number of members, as in Paddle."""
        return len(self.ranks)

    def get_group_rank(self, rank: int) -> int:
        """The position of a rank in the group; -1 for one outside."""
        return self.ranks.index(rank) if rank in self.ranks else -1

    def get_global_rank(self, rank_in_group: int) -> int:
        """The rank at a position in the group; -1 for one that is not there."""
        inside = 0 <= rank_in_group < len(self.ranks)
        return self.ranks[rank_in_group] if inside else -1

    def __str__(self) -> str:
        if self.mesh is not None:
            return f"{self.nranks} ranks along {', '.join(map(repr, self.axes))} of {self.mesh!s}"
        return f"ranks {list(self.ranks)}"


class _Default:
    """Holds the default mesh. Not a context variable: threads and notebook cells share it."""

    mesh: ProcessMesh | None = None


_default = _Default()


def set_mesh(mesh: ProcessMesh) -> None:
    """Makes `mesh` the default one, for everything that takes a mesh and gets none.

    JAX's own ambient mesh is not touched, so ordinary single-device code runs as before.

    Raises:
      TypeError: not a `ProcessMesh`.

    Follows `paddle.distributed.auto_parallel.set_mesh` (3.3.1).
    """
    if not isinstance(mesh, ProcessMesh):
        raise TypeError(
            f"set_mesh(mesh): mesh is a {type(mesh).__name__}, not a ProcessMesh; "
            "ProcessMesh.from_jax(mesh) turns a jax.sharding.Mesh into one"
        )
    _default.mesh = mesh


def get_mesh() -> ProcessMesh | None:
    """The default mesh, or `None` where none was set.

    Follows `paddle.distributed.auto_parallel.get_mesh` (3.3.1).
    """
    return _default.mesh


def _ranks_from(
    mesh: object, shape: Sequence[int] | None, process_ids: Iterable[int] | None
) -> np.ndarray:
    if mesh is None:
        if shape is None or process_ids is None:
            raise MeshError("ProcessMesh(): give `mesh`, or both `shape` and `process_ids`")
        ids = np.array(list(process_ids))
        if ids.size != math.prod(shape):
            raise MeshError(
                f"ProcessMesh(): shape {list(shape)} holds {math.prod(shape)} ranks, "
                f"process_ids has {ids.size}"
            )
        ranks = ids.reshape(tuple(shape))
    elif isinstance(mesh, (list, tuple, range, np.ndarray)):
        try:
            ranks = np.array(mesh)
        except ValueError:
            raise MeshError(f"ProcessMesh({mesh}): the nested lists differ in length") from None
    else:
        raise MeshError(
            f"ProcessMesh(mesh): mesh is a {type(mesh).__name__}; it must be nested lists or a "
            "numpy array of ranks, such as [[0, 1], [2, 3]]"
        )
    return _checked_ranks(ranks)


def _checked_ranks(ranks: np.ndarray) -> np.ndarray:
    if ranks.ndim == 0 or (ranks.size and not np.issubdtype(ranks.dtype, np.integer)):
        raise MeshError(
            f"ProcessMesh({ranks.tolist()}): ranks must be integers in at least one dim, "
            "such as [0, 1, 2, 3]"
        )
    if ranks.size and ranks.min() < 0:
        raise MeshError(f"ProcessMesh({ranks.tolist()}): rank {ranks.min()} is negative")
    values, counts = np.unique(ranks, return_counts=True)
    if (counts > 1).any():
        raise MeshError(
            f"ProcessMesh({ranks.tolist()}): rank {values[counts > 1][0]} occurs "
            f"{counts[counts > 1][0]} times; a mesh holds each device once"
        )
    return ranks.astype(np.int64)


def _checked_names(names: Sequence[str], shape: tuple[int, ...]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise MeshError(f"ProcessMesh(dim_names={names!r}): it must be a list of strings")
    if len(names) != len(shape):
        raise MeshError(
            f"ProcessMesh(dim_names={list(names)}): {len(names)} name(s) for a mesh of "
            f"{len(shape)} axes, of sizes {list(shape)}"
        )
    repeated = next((name for name in names if list(names).count(name) > 1), None)
    if repeated is not None:
        raise MeshError(f"ProcessMesh(dim_names={list(names)}): {repeated!r} occurs twice")
    return tuple(names)
