"""`Layout`: the internal form of a list of placements, and its conversions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar._jax import unreduced_kind, unreduced_spec
from meshpar.errors import PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.types import Partial, Placement, ReduceType, Replicate, Shard

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor lies on a mesh, seen from the tensor.

    Args:
      dims: for each tensor dim the mesh axes that cut it, outermost first.
      partial: `(mesh axis, reduction)` of the axes along which it is partial, sorted by name.

    An axis that is in neither is one along which the tensor is replicated. Where reductions of
    several kinds are pending, the later axis of the mesh is reduced first.

    Example:
      >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
      >>> Layout.of([Replicate(), Shard(1)], mesh, ndim=2)
      Layout(dims=((), ('tp',)), partial=())
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, ReduceType], ...] = ()

    # --- questions --------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of tensor dims."""
        return len(self.dims)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut a dim, dim by dim."""
        return tuple(axis for axes in self.dims for axis in axes)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The mesh axes along which it is partial."""
        return tuple(axis for axis, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole value."""
        return not self.partial and not any(self.dims)

    def dim_of(self, axis: str) -> int | None:
        """The tensor dim that a mesh axis cuts, if any."""
        return next((d for d, axes in enumerate(self.dims) if axis in axes), None)

    def kind_of(self, axis: str) -> ReduceType | None:
        """The reduction that is pending along a mesh axis, if any."""
        return next((kind for name, kind in self.partial if name == axis), None)

    # --- changed copies ---------------------------------------------------------------------------

    def with_dim(self, dim: int, axes: tuple[str, ...]) -> Layout:
        """The same layout with other mesh axes on one dim."""
        return Layout((*self.dims[:dim], axes, *self.dims[dim + 1 :]), self.partial)

    def with_partial(self, axis: str, kind: ReduceType) -> Layout:
        """The same layout, partial along one more axis."""
        return Layout(self.dims, tuple(sorted((*self.partial, (axis, kind)))))

    def without_partial(self, axes: Sequence[str] | None = None) -> Layout:
        """The same layout with the reductions over `axes` (all of them for `None`) done."""
        left = () if axes is None else tuple(p for p in self.partial if p[0] not in axes)
        return Layout(self.dims, left)

    # --- placements -------------------------------------------------------------------------------

    @classmethod
    def replicated(cls, ndim: int) -> Layout:
        """The layout of a value that every device holds whole."""
        return cls(((),) * ndim)

    @classmethod
    def of(cls, placements: Sequence[Placement], mesh: ProcessMesh, ndim: int) -> Layout:
        """The layout of a list of placements, one per mesh axis, outermost first.

        Missing trailing placements are `Replicate()`.

        Raises:
          PlacementError: too many placements, or a dim out of range.
          TypeError: something in the list is not a placement.
        """
        checked = check_placements(placements, mesh, ndim)
        dims: list[list[tuple[int, str]]] = [[] for _ in range(ndim)]
        partial: list[tuple[str, ReduceType]] = []
        for axis, placement in zip(mesh.axis_names, checked, strict=False):
            if isinstance(placement, Shard):
                dims[placement.dim % ndim].append((placement.shard_order, axis))
            elif isinstance(placement, Partial):
                partial.append((axis, placement.kind))
        # sorted() is stable, so axes of equal order stay in mesh order
        nested = (tuple(axis for _, axis in sorted(cut, key=lambda c: c[0])) for cut in dims)
        return cls(tuple(nested), tuple(sorted(partial)))

    def placements(self, mesh: ProcessMesh) -> list[Placement]:
        """One placement per mesh axis; the inverse of `of`.

        `shard_order` is given where the axes on a dim do not nest in mesh order, and 0 elsewhere.
        """
        self.check_axes(mesh)
        out: list[Placement] = []
        for axis in mesh.axis_names:
            dim, kind = self.dim_of(axis), self.kind_of(axis)
            if dim is not None:
                axes = self.dims[dim]
                in_mesh_order = tuple(a for a in mesh.axis_names if a in axes)
                order = 0 if axes == in_mesh_order else axes.index(axis)
                out.append(Shard(dim, shard_order=order))
            elif kind is not None:
                out.append(Partial(kind))
            else:
                out.append(Replicate())
        return out

    def check_axes(self, mesh: ProcessMesh) -> None:
        """Checks that the mesh has every axis of the layout, and that none is used twice.

        Raises:
          PlacementError: it does not.
        """
        seen: set[str] = set()
        for axis in (*self.shard_axes, *self.partial_axes):
            if axis not in mesh.axis_sizes:
                reason = f"the mesh's axes are {', '.join(map(repr, mesh.axis_names))}"
                raise PlacementError(f"no mesh axis {axis!r}.", layout=self, because=reason)
            if axis in seen:
                reason = "an axis cuts one dim, or holds one reduction, never both"
                raise PlacementError(
                    f"mesh axis {axis!r} is used twice.", layout=self, because=reason
                )
            seen.add(axis)

    # --- Paddle's dims_mapping --------------------------------------------------------------------

    @classmethod
    def from_dims_mapping(
        cls,
        dims_mapping: Sequence[int | Sequence[int]],
        mesh: ProcessMesh,
        partial: Sequence[int] = (),
        reduce: Sequence[str] = (),
    ) -> Layout:
        """From Paddle's form: per tensor dim a mesh axis number, a list of them, or -1.

        Args:
          dims_mapping: one entry per tensor dim, a list outermost first.
          mesh: the mesh whose axes the numbers count.
          partial: the axes along which the tensor is partial.
          reduce: the reduction of each of those; sum where left out.
        """
        names = mesh.axis_names

        def axes_of(entry: int | Sequence[int]) -> tuple[str, ...]:
            if isinstance(entry, Sequence):
                return tuple(names[i] for i in entry)
            return () if entry == -1 else (names[entry],)

        kinds = [ReduceType.of(kind) for kind in reduce] or [ReduceType.kRedSum] * len(partial)
        pending = zip((names[axis] for axis in partial), kinds, strict=True)
        layout = cls(tuple(axes_of(entry) for entry in dims_mapping), tuple(sorted(pending)))
        layout.check_axes(mesh)
        return layout

    def dims_mapping(self, mesh: ProcessMesh) -> list[int | list[int]]:
        """Paddle's form of the dims: -1, an axis number, or a list of them, outermost first."""
        self.check_axes(mesh)
        numbers = [[mesh.axis_index(axis) for axis in axes] for axes in self.dims]
        return [-1 if not n else n[0] if len(n) == 1 else n for n in numbers]

    # --- JAX's forms ------------------------------------------------------------------------------

    @classmethod
    def from_spec(cls, spec: PartitionSpec, ndim: int) -> Layout:
        """From a `PartitionSpec`; `unreduced` axes become `Partial`.

        Raises:
          PlacementError: a dim is `UNCONSTRAINED`, or there are more entries than dims.
        """
        entries = list(spec.partitions)
        while len(entries) > ndim and entries[-1] is None:  # JAX leaves them on arrays of keys
            entries.pop()
        if len(entries) > ndim or PartitionSpec.UNCONSTRAINED in entries:
            reason = f"the tensor has {ndim} dims, and each needs None, an axis or a tuple of axes"
            raise PlacementError(f"{spec} is not a layout.", because=reason)

        def axes_of(entry: object) -> tuple[str, ...]:
            if entry is None:
                return ()
            return (entry,) if isinstance(entry, str) else tuple(cast("Sequence[str]", entry))

        dims = [axes_of(entry) for entry in entries] + [()] * (ndim - len(entries))
        kind = ReduceType.of(unreduced_kind(spec))
        pending = sorted((str(axis), kind) for axis in spec.unreduced)
        return cls(tuple(dims), tuple(pending))

    def partition_spec(self) -> PartitionSpec:
        """The `PartitionSpec`; pending reductions become `unreduced`.

        Raises:
          PlacementError: a reduction that this JAX cannot express.
        """
        entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims]
        if not self.partial:
            return PartitionSpec(*entries)
        kinds = {kind.word for _, kind in self.partial}
        spec = unreduced_spec(entries, self.partial_axes, min(kinds)) if len(kinds) == 1 else None
        if spec is None:
            raise PlacementError(
                f"Partial over {', '.join(self.partial_axes)} has no JAX form.",
                layout=self,
                because="PartitionSpec(unreduced=...) holds one kind of reduction: sums, and from "
                "jax 0.12 on maxima and minima too",
            )
        return spec

    def named_sharding(self, mesh: ProcessMesh) -> NamedSharding:
        """The `NamedSharding` on the mesh; with Explicit axes where reductions are pending."""
        self.check_axes(mesh)
        jax_mesh = mesh.jax_mesh
        if self.partial:
            explicit = (AxisType.Explicit,) * mesh.ndim
            jax_mesh = Mesh(jax_mesh.devices, jax_mesh.axis_names, axis_types=explicit)
        return NamedSharding(jax_mesh, self.partition_spec())


def check_placements(
    placements: Sequence[Placement], mesh: ProcessMesh, ndim: int
) -> list[Placement]:
    """Checks a list of placements against a mesh and a number of tensor dims.

    Returns:
      The placements as a list.

    Raises:
      PlacementError: too many placements, or a dim out of range.
      TypeError: something in the list is not a placement.
    """
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise TypeError(
            f"placements is {placements!r}; it must be a list with one placement per mesh axis, "
            f"here {', '.join(mesh.axis_names)}"
        )
    for placement in placements:
        if not isinstance(placement, Placement):
            hint = f"; write {placement.__name__}()" if isinstance(placement, type) else ""
            raise TypeError(
                f"placements holds {placement!r}, which is not a Shard, Replicate or Partial{hint}"
            )
    if len(placements) > mesh.ndim:
        reason = f"{mesh} has {mesh.ndim} axes, and there are {len(placements)} placements"
        raise PlacementError("too many placements.", placements=list(placements), because=reason)
    for axis, placement in zip(mesh.axis_names, placements, strict=False):
        if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
            takes = f"{-ndim} to {ndim - 1}" if ndim else "nothing: a scalar cannot be cut"
            raise PlacementError(
                f"{placement} is out of range.",
                placements=f"{list(placements)}: mesh axis {axis!r} asks for tensor dim "
                f"{placement.dim}",
                because=f"the tensor has {ndim} dims, so Shard takes {takes}",
            )
    return list(placements)
