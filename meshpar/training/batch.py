"""Where a batch lies: leaves that are placed stay, the others are placed by dim 0."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from meshpar._jax import is_key_array
from meshpar.errors import MeshError, PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import is_even, storage_shape, storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.types import Placement
from meshpar.placements.values import placed
from meshpar.training.paths import keys_of
from meshpar.training.state import Arrays, Slot, Slots

__all__ = ["BatchPlacer", "InputSpec", "PlacesBatches", "ReplicatedBatchWarning", "read_input_spec"]


class ReplicatedBatchWarning(UserWarning):
    """A batch is replicated because the mesh has none of the axes that cut data."""


@runtime_checkable
class PlacesBatches(Protocol):
    """A loader that knows where the leaves of its batches belong."""

    def batch_placements(self, name: str, ndim: int) -> Sequence[Placement] | None:
        """The placements of the leaf of that dotted name, `None` to leave it to the default."""
        ...


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What `input_spec` says: one spec per argument, and how many of them are labels."""

    args: tuple[Any, ...] = ()
    num_labels: int | None = None


def read_input_spec(spec: Any) -> InputSpec:
    """Reads `input_spec`.

    Args:
      spec: `None`; a list with one spec per argument; or `(inputs, labels)`, two such lists. A
        spec is a list of placements, a `jax.ShapeDtypeStruct` or other object with a `sharding`
        or `placements`, `None`, or a pytree of these shaped like the upper part of the argument.

    Raises:
      TypeError: not a list or tuple.
    """
    if spec is None:
        return InputSpec()
    if not isinstance(spec, (list, tuple)):
        raise TypeError(
            f"to_static(input_spec): a {type(spec).__name__}; it takes one spec per argument, as "
            "in [[Shard(0)], [Shard(0)]], or two lists, of the inputs and of the labels"
        )
    lists = [isinstance(part, (list, tuple)) and not _is_placements(part) for part in spec]
    if len(spec) == 2 and all(lists):
        return InputSpec((*spec[0], *spec[1]), len(spec[1]))
    return InputSpec(tuple(spec))


@dataclass(slots=True)
class BatchPlacer:
    """Turns the arguments of a step into storage arrays on the mesh.

    Args:
      mesh: the mesh.
      data_axes: the axes that cut dim 0 of a leaf of which nothing else is known.
      spec: the user's `input_spec`.
      loader: asked next, if it places batches.
    """

    mesh: ProcessMesh
    data_axes: tuple[str, ...]
    spec: InputSpec
    loader: object = None
    warn: bool = True  # nobody chose to replicate

    def __call__(self, args: tuple[Any, ...], names: Sequence[str]) -> tuple[Slots, Arrays]:
        """The slots and storage of the arguments.

        Args:
          args: pytrees of arrays of any global shape, placed or not, or `jax.ShapeDtypeStruct`s,
            for which the same come back.
          names: one per argument, for messages; empty for an argument whose own keys say enough.

        Raises:
          PlacementError: a dim that the axes do not divide.
          MeshError: a leaf lies on another mesh.
          TypeError: a leaf is no array.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(args)
        slots: list[Slot] = []
        arrays: list[jax.Array] = []
        for path, leaf in leaves:
            slot, array = self._placed(path, leaf, names)
            slots.append(slot)
            arrays.append(array)
        return Slots(tuple(slots), treedef, self.mesh), tuple(arrays)

    def _placed(self, path: KeyPath, leaf: Any, names: Sequence[str]) -> tuple[Slot, jax.Array]:
        index, *keys = keys_of(path)
        name = ".".join(word for word in (names[int(index)], *keys) if word)
        known = placed(leaf)
        if known is not None:
            if known.mesh != self.mesh:
                raise MeshError(
                    f"{name!r} lies on another mesh than the model.",
                    batch=known.mesh,
                    model=self.mesh,
                )
            layout = known.layout.without_partial()
            storage = reshard_storage(known.storage, known.layout, layout, known.shape, self.mesh)
            return Slot(name, known.shape, storage.dtype, layout), storage
        value = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        if not is_key_array(value) and np.dtype(value.dtype).kind in "OSUM":
            raise TypeError(f"{name!r} is a {type(leaf).__name__}, not an array")
        shape = tuple(value.shape)
        layout = self._layout(name, int(index), keys, shape)
        self._check_even(name, shape, layout)
        sharding = storage_sharding(layout, self.mesh)
        if isinstance(value, jax.ShapeDtypeStruct):
            stored = storage_shape(shape, layout, self.mesh.axis_sizes)
            return (
                Slot(name, shape, value.dtype, layout),
                jax.ShapeDtypeStruct(stored, value.dtype, sharding=sharding),  # pyright: ignore[reportReturnType]
            )
        array = jax.device_put(value, sharding)
        return Slot(name, shape, array.dtype, layout), array

    def _layout(self, name: str, index: int, keys: Sequence[str], shape: tuple[int, ...]) -> Layout:
        ndim = len(shape)
        spec = self.spec.args[index] if index < len(self.spec.args) else None
        layout = _spec_layout(_at(spec, keys), self.mesh, ndim)
        if layout is None and isinstance(self.loader, PlacesBatches):
            layout = _spec_layout(self.loader.batch_placements(name, ndim), self.mesh, ndim)
        if layout is not None:
            return layout
        if not self.data_axes and self.warn:
            self.warn = False
            warnings.warn(
                f"{name!r} and the rest of the batch are replicated: {self.mesh!s} has no axis "
                "named dp, fsdp or sharding. Strategy.data_axes names the axes that cut the batch; "
                "data_axes=() says that none does.",
                ReplicatedBatchWarning,
                stacklevel=6,
            )
        return Layout.replicated(ndim).with_dim(0, self.data_axes) if ndim else Layout(())

    def _check_even(self, name: str, shape: tuple[int, ...], layout: Layout) -> None:
        sizes = self.mesh.axis_sizes
        if is_even(shape, layout, sizes):
            return
        cuts = [math.prod(sizes[axis] for axis in axes) for axes in layout.dims]
        dim = next(d for d, cut in enumerate(cuts) if shape[d] % cut)
        axes, size, cut = layout.dims[dim], shape[dim], cuts[dim]
        on = " and ".join(f"{axis!r} of size {sizes[axis]}" for axis in axes)
        fits = " or ".join(str(fit) for fit in (size // cut * cut, -(-size // cut) * cut) if fit)
        raise PlacementError(
            f"{name!r}, of shape {shape}, cannot be cut evenly.",
            because=f"dim {dim} has {size} rows, mesh axis {on} cuts it into {cut} parts, and "
            f"{size} % {cut} = {size % cut}",
            instead=f"pad it or drop rows to get {fits}, replicate it with an input_spec of "
            "[Replicate()], or use shard_dataloader or shard_tensor, which take uneven batches",
        )


def _is_placements(spec: Any) -> bool:
    return isinstance(spec, (list, tuple)) and any(isinstance(p, Placement) for p in spec)


def _at(spec: Any, keys: Sequence[str]) -> Any:
    """The spec of a leaf: what stands at its path, or above it."""
    for key in keys:
        if isinstance(spec, Mapping):
            spec = next((inner for name, inner in spec.items() if str(name) == key), None)
        elif isinstance(spec, (list, tuple)) and not _is_placements(spec):
            spec = spec[int(key)] if int(key) < len(spec) else None
    return spec


def _spec_layout(spec: Any, mesh: ProcessMesh, ndim: int) -> Layout | None:
    if spec is None:
        return None
    if _is_placements(spec):
        return Layout.of(spec, mesh, ndim)
    sharding = getattr(spec, "sharding", spec)
    layout = Layout.from_spec(sharding.spec, ndim) if isinstance(sharding, NamedSharding) else spec
    if isinstance(layout, Layout):
        layout.check_axes(mesh)
        return layout
    placements = getattr(spec, "placements", None)
    if placements is not None:
        return Layout.of(placements, mesh, ndim)
    if hasattr(spec, "shape") or spec in ([], ()):
        return None
    raise TypeError(
        f"to_static(input_spec): {spec!r} says no placement; a list such as [Shard(0)] does"
    )
