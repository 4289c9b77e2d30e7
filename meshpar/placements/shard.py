"""`shard_tensor` and its relatives: placing data on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from meshpar._jax import is_key_array, is_tracer
from meshpar.errors import MeshparError, PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.annotate import annotate
from meshpar.placements.blocks import is_even, storage_sharding
from meshpar.placements.dist_tensor import DistTensor
from meshpar.placements.layout import Layout
from meshpar.placements.reductions import check_dtype
from meshpar.placements.reshard import reshard
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.storage import place_blocks, to_storage
from meshpar.placements.types import Placement
from meshpar.placements.values import Value, describe, placed, wrap
from meshpar.placements.view import PlacementView

__all__ = ["dtensor_from_fn", "place", "shard_tensor", "show_placements"]


@runtime_checkable
class Holder(Protocol):
    """What flax's `nnx.Variable` looks like to those who do not import flax."""

    def get_value(self) -> Any: ...
    def replace(self, value: Any) -> Any: ...


HolderT = TypeVar("HolderT", bound=Holder)


@overload
def shard_tensor(
    data: HolderT,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: DTypeLike | None = None,
    place: object = None,
    stop_gradient: bool | None = None,
    *,
    priority: int | None = None,
) -> HolderT: ...
@overload
def shard_tensor(
    data: ArrayLike | DistTensor | Sequence[Any],
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: DTypeLike | None = None,
    place: object = None,
    stop_gradient: bool | None = None,
    *,
    priority: int | None = None,
) -> Value: ...
def shard_tensor(
    data: Any,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: DTypeLike | None = None,
    place: object = None,
    stop_gradient: bool | None = None,
    *,
    priority: int | None = None,
) -> Any:
    """Places a global value on a mesh; inside traced code, says where a value lies.

    Args:
      data: the whole value, of any shape `(d0, d1, ...)`: numpy, `jax.Array`, Python numbers and
        nested lists, a `DistTensor`, or a flax `nnx.Variable`, of which a new one comes back.
      mesh: the mesh.
      placements: one per mesh axis, outermost first; missing ones are `Replicate()`.
      dtype: the dtype to convert to.
      place: `None`, or a device or platform that agrees with the mesh's, such as `"cpu"`.
      stop_gradient: in traced code, `True` lets no gradient through. Arrays outside have none to
        stop: gradients exist only as results of `jax.grad`.
      priority: in traced code, where the plan of `mp.jit` leaves open how the values before this
        one lie and annotations disagree about it, the lowest number is followed first, and those
        without a number last. The annotated value itself always lies as said.

    Returns:
      A `jax.Array` if it can hold the layout, else a `DistTensor` (a `Partial`, or a dim that the
      mesh axes do not divide). The first axis on a dim cuts it into blocks of `ceil(d / n)` rows.
      A `Partial` holds the value such that its reduction gives it back. No device holds more than
      its blocks, unless `data` was there already.

    Raises:
      PlacementError: too many placements, a dim out of range, a dtype that cannot be placed so.
      MeshError: the mesh names more devices than there are.
      TypeError: a priority that is no integer.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> mp.shard_tensor(np.arange(6.0).reshape(3, 2), mesh, [mp.Shard(0)]).shape
      (3, 2)

    Follows `paddle.distributed.shard_tensor` (3.3.1). Deviations: dims are checked and may be
    negative; a `Partial("max")` and its like hold the value itself on every coordinate, so that
    reducing gives it back; `priority` is ours.
    """
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        raise TypeError(f"shard_tensor(priority={priority!r}): an integer, or None for no priority")
    if isinstance(data, Holder):
        value = shard_tensor(
            data.get_value(), mesh, placements, dtype, place, stop_gradient, priority=priority
        )
        return data.replace(value)
    try:
        _check_place(place, mesh)
        if is_tracer(data):
            return _annotated(data, mesh, placements, dtype, bool(stop_gradient), priority)
        if priority is not None:
            raise PlacementError(
                f"priority={priority} orders annotations in traced code, and this is an array.",
                because="an array lies where it is placed; nothing else has a say in it",
                instead="shard_tensor(data, mesh, placements), without priority",
            )
        if isinstance(data, DistTensor) or _is_elsewhere(data):
            moved = reshard(data, mesh, placements)
            return moved if dtype is None else _converted(moved, dtype)
        value = _as_array(data, dtype)
        layout = Layout.of(placements, mesh, value.ndim)
        check_dtype(layout, value.dtype)
        return _placed(value, mesh, layout)
    except MeshparError as error:
        raise error.within("shard_tensor(data)", data=describe(data), mesh=mesh) from None


def dtensor_from_fn(
    fn: Callable[..., Any],
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    *args: Any,
    **kwargs: Any,
) -> Value:
    """The result of `fn(*args, **kwargs)`, created in place: each device makes its own blocks.

    `fn` runs as one jitted program whose output is sharded; random numbers come out the same for
    every placement. What XLA cannot partition it computes whole on each device before cutting it:
    a random permutation, a sort along the cut dim, QR and other decompositions.

    Args:
      fn: returns one array, of any global shape, and can be traced.
      mesh: the mesh.
      placements: one per mesh axis, outermost first; missing ones are `Replicate()`.
      *args: arguments of `fn`; arrays are traced, everything else is closed over.
      **kwargs: keyword arguments of `fn`, closed over.

    Returns:
      As `shard_tensor`.

    Raises:
      PlacementError: as `shard_tensor`.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> mp.dtensor_from_fn(jnp.ones, mesh, [mp.Shard(0)], (4, 2)).shape
      (4, 2)

    Follows `paddle.distributed.dtensor_from_fn` (3.3.1).
    """
    arrays = {i: a for i, a in enumerate(args) if isinstance(a, (jax.Array, np.ndarray))}

    def created(traced: dict[int, jax.Array]) -> jax.Array:
        return jnp.asarray(fn(*(traced.get(i, a) for i, a in enumerate(args)), **kwargs))

    try:
        aval = jax.eval_shape(created, arrays)
        layout = Layout.of(placements, mesh, len(aval.shape))
        check_dtype(layout, aval.dtype)
        base = layout.without_partial()
        program = jax.jit(
            lambda traced: to_storage(created(traced), base, mesh.axis_sizes),
            out_shardings=storage_sharding(base, mesh),
        )
        storage = reshard_storage(program(arrays), base, layout, aval.shape, mesh)
    except MeshparError as error:
        raise error.within("dtensor_from_fn(fn)", mesh=mesh) from None
    return wrap(storage, aval.shape, layout, mesh)


def show_placements(
    x: Any, mesh: ProcessMesh | None = None, placements: Sequence[Placement] | None = None
) -> PlacementView:
    """Who holds what: a table when printed, a coloured grid in Jupyter.

    Args:
      x: a placed value; or anything with a shape and a dtype, with `mesh` and `placements` given.
      mesh: the mesh to show it on; its devices need not be there.
      placements: the placements to show.

    Raises:
      PlacementError: `x` lies on no mesh and none is given.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0, 1], ["dp"])
      >>> mp.show_placements(np.ones((3, 2), np.float32), mesh, [mp.Shard(0)])
      float32[3,2] [Shard(0)] on ProcessMesh(dp=2)
      ┏━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━┓
      ┃ ranks ┃ block      ┃ rows held ┃
      ┡━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━┩
      │ 0     │ [0:2, 0:2] │ 2 x 2     │
      │ 1     │ [2:3, 0:2] │ 1 x 2     │
      └───────┴────────────┴───────────┘
    """
    dtype = str(np.dtype(x.dtype).name) if not is_key_array(x) else str(x.dtype)
    if mesh is not None:
        layout = Layout.of(placements or [], mesh, len(x.shape))
        return PlacementView(tuple(x.shape), dtype, layout, mesh)
    known = placed(x)
    if known is None:
        raise PlacementError(
            "show_placements(x): it does not lie on a mesh.",
            x=describe(x),
            instead="show_placements(x, mesh, placements) shows how it would lie",
        )
    return PlacementView(known.shape, dtype, known.layout, known.mesh)


def _is_elsewhere(data: Any) -> bool:
    """Whether other processes hold parts of it: no process can place it alone."""
    return isinstance(data, jax.Array) and not data.is_fully_addressable


def _annotated(
    x: jax.Array,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: DTypeLike | None,
    stop_gradient: bool,
    priority: int | None,
) -> jax.Array:
    if dtype is not None:
        x = x.astype(dtype)
    layout = Layout.of(placements, mesh, x.ndim)
    check_dtype(layout, x.dtype)
    x = annotate(x, mesh, layout, priority=priority)
    return jax.lax.stop_gradient(x) if stop_gradient else x


def _as_array(data: Any, dtype: DTypeLike | None) -> np.ndarray | jax.Array:
    if isinstance(data, jax.Array):
        return data if dtype is None or data.dtype == dtype else data.astype(dtype)
    array = np.asarray(data)
    if array.dtype.kind in "OSUM":
        raise TypeError(
            f"shard_tensor(data): a {type(data).__name__} of {array.dtype} is no tensor"
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype))


def place(data: Any, dtype: DTypeLike, mesh: ProcessMesh, layout: Layout) -> Value:
    """`shard_tensor` for a layout that is known to fit."""
    return _placed(_as_array(data, dtype), mesh, layout)


def _placed(value: np.ndarray | jax.Array, mesh: ProcessMesh, layout: Layout) -> Value:
    if is_key_array(value):
        return _placed_keys(value, mesh, layout)
    base = layout.without_partial()
    sharding = storage_sharding(base, mesh)
    # JAX would have all processes compare a local array with each other's, by a collective.
    is_local = isinstance(value, np.ndarray) or (
        value.is_fully_addressable and not sharding.is_fully_addressable
    )
    if is_even(value.shape, base, mesh.axis_sizes) and not is_local:
        storage = jax.device_put(value, sharding)
    else:
        whole = value if isinstance(value, np.ndarray) else np.asarray(value)
        storage = place_blocks(whole.__getitem__, value.shape, whole.dtype, base, mesh)
    storage = reshard_storage(storage, base, layout, value.shape, mesh)
    return wrap(storage, value.shape, layout, mesh)


def _placed_keys(keys: Any, mesh: ProcessMesh, layout: Layout) -> Value:
    """Keys travel as their words, one more dim that nothing cuts."""
    words = _placed(jax.random.key_data(keys), mesh, Layout((*layout.dims, ())))
    storage = words.storage if isinstance(words, DistTensor) else words
    storage = jax.random.wrap_key_data(storage, impl=jax.random.key_impl(keys))
    return wrap(storage, keys.shape, layout, mesh)


def _converted(x: Value, dtype: DTypeLike) -> Value:
    if isinstance(x, DistTensor):
        if x.layout.partial:
            raise PlacementError(
                f"dtype={dtype!r} does not pass through a pending reduction.",
                instead="reshard it to Replicate() or Shard(dim) first",
            )
        return DistTensor(x.storage.astype(dtype), x.shape, x.layout, x.process_mesh)
    return x.astype(dtype)


def _check_place(place: object, mesh: ProcessMesh) -> None:
    if place is None:
        return
    devices = mesh.jax_mesh.devices.ravel()
    platform = devices[0].platform
    if place not in list(devices) and str(place).split(":")[0] not in (platform, f"{platform}s"):
        raise PlacementError(
            f"place={place!r} is not where the mesh is.", because=f"its devices are {platform}s"
        )
