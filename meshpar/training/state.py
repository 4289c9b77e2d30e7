"""The state of training as storage arrays, and what is known of each of them beforehand.

A `Slot` says of one leaf its name, global shape, dtype and layout. A `Slots` says it of a pytree;
its arrays travel as a tuple in the tree's order: padded storage where a dim is uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshpar._jax import is_key_array
from meshpar.errors import PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.annotate import annotate
from meshpar.placements.blocks import storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.reshard import reshard
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.shard import shard_tensor
from meshpar.placements.storage import from_storage, to_storage
from meshpar.placements.values import Value, placed, wrap
from meshpar.training.paths import leaf_name

__all__ = ["Slot", "Slots", "owned_copy", "slots_of"]

Tree = Any  # a pytree of arrays, whose type is the user's
Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One leaf of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: Any  # a numpy dtype, or JAX's dtype of typed keys
    layout: Layout


@dataclass(frozen=True, slots=True)
class Slots:
    """The leaves of a pytree on a mesh, in the tree's order."""

    leaves: tuple[Slot, ...]
    treedef: Any  # jax.tree_util.PyTreeDef
    mesh: ProcessMesh

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The logical shape and dtype of each leaf."""
        return [jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in self.leaves]

    @property
    def layouts(self) -> list[Layout]:
        """The layout of each leaf."""
        return [slot.layout for slot in self.leaves]

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of each storage array."""
        return tuple(storage_sharding(slot.layout, self.mesh) for slot in self.leaves)

    def with_layouts(self, layouts: Iterable[Layout]) -> Slots:
        """The same leaves in other layouts."""
        leaves = zip(self.leaves, layouts, strict=True)
        return replace(self, leaves=tuple(replace(slot, layout=to) for slot, to in leaves))

    def unpack(self, arrays: Sequence[jax.Array]) -> Tree:
        """The pytree of logical values, in traced code."""
        sizes = self.mesh.axis_sizes
        values = [
            from_storage(array, slot.shape, slot.layout, sizes)
            for slot, array in zip(self.leaves, arrays, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, values)

    def values(self, tree: Tree) -> list[jax.Array]:
        """The logical values of a pytree, in traced code, with the slots' dtypes.

        Raises:
          ValueError: a value has another shape than its slot.
        """
        out: list[jax.Array] = []
        for slot, value in zip(self.leaves, self.treedef.flatten_up_to(tree), strict=True):
            if not is_key_array(value):
                # A weak type would make the next call another program.
                value = jax.lax.convert_element_type(jnp.asarray(value), slot.dtype)
            if value.shape != slot.shape:
                raise ValueError(
                    f"{slot.name!r} changes its shape in a step, from {slot.shape} to "
                    f"{value.shape}; the state of a compiled step keeps its shapes"
                )
            out.append(value)
        return out

    def pack(self, tree: Tree) -> Arrays:
        """The storage of a pytree of logical values, in traced code."""
        values = zip(self.values(tree), self.leaves, strict=True)
        return tuple(to_storage(v, slot.layout, self.mesh.axis_sizes) for v, slot in values)

    def annotated(self, tree: Tree) -> Tree:
        """The same logical values, in traced code, lying as the slots say."""
        values = zip(self.values(tree), self.leaves, strict=True)
        pinned = [annotate(value, self.mesh, slot.layout) for value, slot in values]
        return jax.tree.unflatten(self.treedef, pinned)

    def wrapped(self, arrays: Sequence[jax.Array]) -> Tree:
        """The pytree of placed values: `DistTensor` where a dim is uneven."""
        return jax.tree.unflatten(self.treedef, list(self.named(arrays).values()))

    def named(self, arrays: Sequence[jax.Array]) -> dict[str, Value]:
        """Name -> placed value."""
        return {
            slot.name: wrap(array, slot.shape, slot.layout, self.mesh)
            for slot, array in zip(self.leaves, arrays, strict=True)
        }

    def replaced(self, arrays: Arrays, values: Mapping[str, object]) -> Arrays:
        """The arrays with those of some names replaced by copies of other values.

        Raises:
          PlacementError: a value has another shape than the leaf.
        """
        out: list[jax.Array] = []
        for slot, array in zip(self.leaves, arrays, strict=True):
            if slot.name not in values:
                out.append(array)
                continue
            value: Any = values[slot.name]
            shape = tuple(np.shape(value)) if not hasattr(value, "shape") else tuple(value.shape)
            if shape != slot.shape:
                raise PlacementError(
                    f"set_state_dict(state_dict): {slot.name!r} has another shape.",
                    given=shape,
                    expected=slot.shape,
                )
            if not is_key_array(value) and getattr(value, "dtype", None) != slot.dtype:
                value = shard_tensor(
                    value, self.mesh, slot.layout.placements(self.mesh), dtype=slot.dtype
                )
            out.append(owned_copy(value, slot.layout, self.mesh))
        return tuple(out)


def slots_of(tree: Tree, mesh: ProcessMesh) -> Slots:
    """The slots of a pytree of values: each lies as it does now, replicated if it does not yet."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves: list[Slot] = []
    for path, leaf in paths:
        value = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        known = placed(value)
        layout = Layout.replicated(len(value.shape)) if known is None else known.layout
        dtype = value.dtype
        if not is_key_array(value):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        # A pending reduction is done on the way in: the state holds values.
        shape, layout = tuple(value.shape), layout.without_partial()
        leaves.append(Slot(leaf_name(path) or "params", shape, dtype, layout))
    return Slots(tuple(leaves), treedef, mesh)


def owned_copy(value: Any, layout: Layout, mesh: ProcessMesh) -> jax.Array:
    """The storage of a value in buffers that nobody else holds, so that it may be donated.

    Args:
      value: placed or not, of the mesh or another one.
      layout: where it shall lie, without pending reductions.
      mesh: the mesh.
    """
    if is_key_array(value):  # random state, which nobody cuts
        keys = jax.device_put(value, storage_sharding(layout, mesh))
        return jax.device_put(keys, keys.sharding, may_alias=False)
    known = placed(value)
    if known is None:
        known = placed(shard_tensor(value, mesh, layout.placements(mesh)))
    elif known.mesh != mesh:
        known = placed(reshard(value, mesh, layout.placements(mesh)))
    assert known is not None, "shard_tensor and reshard place"
    storage = reshard_storage(known.storage, known.layout, layout, known.shape, mesh)
    # Only a transfer to the sharding that an array has already is sure to copy: one that adds
    # replicas keeps the first one.
    storage = jax.device_put(storage, storage_sharding(layout, mesh))
    return jax.device_put(storage, storage.sharding, may_alias=False)
