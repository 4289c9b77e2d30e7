"""`DistTensor`: a distributed value that a `jax.Array` cannot hold."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from meshpar._jax import refuse_as_argument
from meshpar.errors import DistTensorError
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import storage_shape
from meshpar.placements.layout import Layout
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.storage import read_block
from meshpar.placements.types import Placement
from meshpar.placements.view import PlacementView

__all__ = ["DistTensor"]


class DistTensor:
    """A value with a pending reduction, or with dims that its mesh axes do not divide.

    It is a leaf to `jax.tree`, never a pytree, so that nothing computes on its storage (stacked
    contributions, padding) by accident. `mp.reshard`, `mp.to_static` and checkpoints unpack it.
    Elsewhere its Python operators, `np.asarray` and `jnp.asarray` take the global value, and
    everything else raises an error.

    Args:
      storage: the array that `meshpar.placements.blocks.storage_shape` describes.
      shape: the global shape.
      layout: where the tensor lies on the mesh.
      mesh: the mesh.

    `mp.shard_tensor`, `mp.dtensor_from_fn`, `mp.dtensor_from_local` and `mp.reshard` make them.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> pending = mp.shard_tensor([1.0, 2.0], mesh, [mp.Partial()])
      >>> pending
      DistTensor(float32[2], [Partial()], ProcessMesh(dp=1))
      >>> np.asarray(pending + 1)
      array([2., 3.], dtype=float32)
    """

    __slots__ = ("__weakref__", "_layout", "_mesh", "_shape", "_storage")
    __array_priority__ = 200  # numpy's operators give way to ours

    def __init__(
        self, storage: jax.Array, shape: tuple[int, ...], layout: Layout, mesh: ProcessMesh
    ) -> None:
        expected = storage_shape(shape, layout, mesh.axis_sizes)
        assert tuple(storage.shape) == expected, f"storage {storage.shape}, layout wants {expected}"
        self._storage, self._shape, self._layout, self._mesh = storage, tuple(shape), layout, mesh

    # --- what it is -------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self._storage.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements of the global value."""
        return int(np.prod(self._shape, dtype=np.int64))

    @property
    def storage(self) -> jax.Array:
        """The array that holds it: stacked contributions first, then the padded dims."""
        return self._storage

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self._layout

    @property
    def process_mesh(self) -> ProcessMesh:
        """The mesh."""
        return self._mesh

    @property
    def placements(self) -> list[Placement]:
        """One placement per mesh axis."""
        return self._layout.placements(self._mesh)

    def block_until_ready(self) -> DistTensor:
        """Waits for the computation of the storage, as `jax.Array.block_until_ready` does."""
        self._storage.block_until_ready()
        return self

    # --- its value --------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        layout = self._layout.without_partial()
        storage = reshard_storage(self._storage, self._layout, layout, self._shape, self._mesh)
        if not storage.is_fully_addressable:
            layout = Layout.replicated(self.ndim)
            storage = reshard_storage(self._storage, self._layout, layout, self._shape, self._mesh)
        whole = tuple(slice(0, size) for size in self._shape)
        value = read_block(storage, self._shape, layout, self._mesh, whole)
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        layout = Layout.replicated(self.ndim)
        return reshard_storage(self._storage, self._layout, layout, self._shape, self._mesh)

    # --- how it shows -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        kind = f"{self.dtype.name}[{','.join(map(str, self._shape))}]"
        return f"DistTensor({kind}, {self.placements}, {self._mesh!s})"

    def _repr_html_(self) -> str:
        return PlacementView(self.shape, self.dtype.name, self.layout, self.process_mesh).html()

    # --- what it refuses --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self!r} has no attribute {name!r}: outside mp.jit and mp.to_static a DistTensor "
            "gives its global value to np.asarray, jnp.asarray and Python's operators only, or "
            "mp.unshard_dtensor(x) makes it a plain jax.Array"
        )

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __complex__(self) -> complex:
        return complex(np.asarray(self))

    def __index__(self) -> int:
        return operator.index(np.asarray(self)[()])

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of a DistTensor without dims")
        return self._shape[0]

    def __iter__(self) -> Any:  # rows of whatever the operators below give
        return iter(self.__jax_array__())

    def __getitem__(self, index: Any) -> jax.Array:  # numpy's whole indexing language
        return self.__jax_array__()[index]

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise DistTensorError(f"{self!r} is immutable; mp.unshard_dtensor(x).at[...].set(...)")

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # == is elementwise, as in numpy


def _forward(name: str) -> Callable[..., jax.Array]:
    def method(self: DistTensor, *others: object) -> jax.Array:
        values = [o.__jax_array__() if isinstance(o, DistTensor) else o for o in others]
        return getattr(self.__jax_array__(), name)(*values)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"`{name}` of the global value."
    return method


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_OTHERS = "lt le eq ne gt ge neg pos abs invert round"
for _name in (
    *(f"__{op}__" for op in _BINARY.split()),
    *(f"__r{op}__" for op in _BINARY.split()),
    *(f"__{op}__" for op in _OTHERS.split()),
):
    setattr(DistTensor, _name, _forward(_name))


def _refuse(x: DistTensor) -> NoReturn:
    raise DistTensorError(
        f"{x!r} is no argument of a JAX function: it would compute on contributions or padding. "
        "mp.jit and mp.to_static take it as the value that it is; outside, mp.unshard_dtensor(x) "
        "or jnp.asarray(x) gives the whole value"
    )


refuse_as_argument(DistTensor, _refuse)
