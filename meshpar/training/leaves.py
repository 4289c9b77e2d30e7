"""The leaves of a checkpoint: what is said of each, and its form while it is written and read.

orbax holds arrays whose shards are equal. Typed keys go in as their words, and a value that no
`jax.Array` can hold goes in, and comes out, in the nearest layout that one can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from meshpar._jax import is_key_array
from meshpar.placements.blocks import is_even, shards_on, storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.values import Placed, describe, placed, wrap

__all__ = ["Entry", "Plain", "array_of", "entry_of", "reading_of", "restored"]

Plain = bool | int | float | str
Leaf = Any  # whatever the user put into the state


@dataclass(frozen=True, slots=True)
class Entry:
    """What a checkpoint says of a leaf.

    Args:
      value: the leaf itself, if it is a number, a truth value or a text.
      shape: the global shape of an array, `None` for a plain value.
      dtype: the name of its dtype; that of the words for typed keys.
      key: the name of the generator of typed keys, else empty.
    """

    value: Plain | None = None
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    key: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether there are numbers of it in the array files; orbax takes no empty array."""
        return self.shape is not None and 0 not in self.shape

    def to_json(self) -> dict[str, object]:
        """The entry as JSON can hold it."""
        if self.shape is None:
            return {"value": self.value}
        return {"shape": list(self.shape), "dtype": self.dtype, "key": self.key}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Entry:
        """The inverse of `to_json`."""
        if "value" in saved:
            return cls(value=saved["value"])
        return cls(shape=tuple(saved["shape"]), dtype=saved["dtype"], key=saved["key"])

    def shown(self) -> jax.ShapeDtypeStruct | Plain:
        """The value, or shape and dtype of the array."""
        if self.shape is None:
            assert self.value is not None, "a plain entry has a value"
            return self.value
        dtype = jax.random.key(0, impl=self.key).dtype if self.key else np.dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype)

    def misfit(self, leaf: Leaf) -> str:
        """Why the entry cannot fill a leaf; empty if it can."""
        kind, there = ("plain" if self.shape is None else "an array"), entry_of(leaf)
        if (there.shape is None) != (self.shape is None):
            return f"is {describe(leaf)} here and {kind}, {self.shown()!r}, as saved"
        if (there.shape, there.dtype, there.key) != (self.shape, self.dtype, self.key):
            return f"is {there.shown()} here and {self.shown()} as saved"
        return ""


def entry_of(leaf: Leaf) -> Entry:
    """The entry of a leaf.

    Raises:
      TypeError: it is neither an array nor a plain value.
    """
    if isinstance(leaf, (bool, int, float, str)) and not isinstance(leaf, np.generic):
        return Entry(value=leaf)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"a {type(leaf).__name__} is neither an array nor a number, truth value or text"
        )
    if is_key_array(leaf):
        name = str(jax.random.key_impl(_key_like(leaf)))
        return Entry(shape=tuple(leaf.shape), dtype="uint32", key=name)
    return Entry(shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype).name)


def array_of(leaf: Leaf) -> jax.Array | np.ndarray:
    """The array to write for a leaf: its global value, cut as finely as equal shards allow."""
    if is_key_array(leaf):
        return jax.random.key_data(leaf)
    known = _unholdable(leaf)
    if known is None:
        return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    near = _nearest_even(known)
    return reshard_storage(known.storage, known.layout, near, known.shape, known.mesh)


def reading_of(leaf: Leaf, entry: Entry, *, offload: bool) -> ocp.RestoreArgs:
    """How orbax shall read the array that fills a leaf."""
    sharding = None if offload else _sharding(leaf)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, dtype=np.dtype(entry.dtype))


def restored(leaf: Leaf, entry: Entry, array: Any, *, offload: bool) -> Leaf:
    """What takes the place of a leaf.

    Args:
      leaf: says where it lies.
      entry: what the checkpoint says of it.
      array: what orbax read, `None` if nothing is stored.
      offload: arrays come to the host.
    """
    if entry.shape is None:
        return entry.value
    if array is None:
        empty = np.zeros(entry.shape, entry.dtype)
        sharding = None if offload else _sharding(leaf)
        array = empty if sharding is None else jax.device_put(empty, sharding)
    if entry.key:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=entry.key)
    known = None if offload else _unholdable(leaf)
    if known is None:
        return array
    storage = reshard_storage(array, _nearest_even(known), known.layout, known.shape, known.mesh)
    return wrap(storage, known.shape, known.layout, known.mesh)


def _key_like(leaf: Leaf) -> jax.Array:
    """A key of the leaf's generator; the leaf may be a shape only."""
    return leaf if isinstance(leaf, jax.Array) else jnp.zeros((), leaf.dtype)


def _unholdable(leaf: Leaf) -> Placed | None:
    """The leaf as placed, if its shards are no equal parts of its value."""
    known = placed(leaf)
    if known is None or is_key_array(leaf):
        return None
    even = is_even(known.shape, known.layout, known.mesh.axis_sizes)
    return None if even and not known.layout.partial else known


def _sharding(leaf: Leaf) -> Sharding | None:
    """The sharding to read with; `None` for the host."""
    known = _unholdable(leaf)
    if known is not None:
        return storage_sharding(_nearest_even(known), known.mesh)
    return getattr(leaf, "sharding", None)


def _nearest_even(known: Placed) -> Layout:
    """The layout with pending reductions done, and each axis on the first dim that it divides.

    An axis stays on its dim where it can, so that little moves, and is dropped where no dim has
    room for it.
    """
    sizes, ndim = known.mesh.axis_sizes, len(known.shape)
    near = Layout.replicated(ndim)
    for dim, axes in enumerate(known.layout.dims):
        for axis in axes:
            for other in (dim, *(d for d in range(ndim) if d != dim)):
                cut = (*near.dims[other], axis)
                if known.shape[other] % shards_on(cut, sizes) == 0:
                    near = near.with_dim(other, cut)
                    break
    return near
