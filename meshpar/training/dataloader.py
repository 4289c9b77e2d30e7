"""`shard_dataloader`: any iterable of batches, placed on a mesh ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.errors import MeshError, MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.placements.shard import shard_tensor
from meshpar.placements.types import Placement, Replicate, Shard
from meshpar.training.paths import leaf_name
from meshpar.training.split_batches import Part, SplitBatches

__all__ = ["ShardDataloader", "shard_dataloader"]

Batch = Any  # a pytree of arrays, whose type is the user's
Axes = str | int | tuple[str | int, ...] | None
_END = object()


def shard_dataloader(
    dataloader: Iterable[Batch],
    meshes: ProcessMesh | Sequence[ProcessMesh],
    input_keys: Sequence[str] | None = None,
    shard_dims: Axes | list[Axes] = None,
    is_dataset_splitted: bool = False,
    dense_tensor_idx: object = None,
    *,
    prefetch: int = 2,
) -> ShardDataloader:
    """Makes a loader whose batches lie on a mesh.

    Args:
      dataloader: gives pytrees of numpy arrays, `jax.Array`s or numbers of any global shape; a
        list, a generator, a PyTorch-style loader, and so on.
      meshes: one mesh, or one per input: per element of a tuple or list, per key of a dict.
      input_keys: the keys of dict batches, in the order of `meshes`; only these come out.
      shard_dims: the mesh axis (name or position) that cuts dim 0 of every leaf, a tuple of axes
        that cut it together, or a list with one of these per mesh. `None` replicates.
      is_dataset_splitted: each process's loader gives its own part of the batch: the rows that its
        ranks of the mesh hold together, and the same as many batches as the others. With one
        process that is the whole batch.
      dense_tensor_idx: not supported.
      prefetch: how many batches to read and place ahead, in a thread. 0 reads each when it is
        asked for, in the caller's thread: for loaders that draw from random state which the
        training loop draws from too. Parts of batches are read ahead, and placed when asked for.

    Returns:
      An iterable, once per epoch; `len()` where the loader has one.

    Raises:
      ValueError: no mesh, numbers of meshes, `shard_dims` and `input_keys` that do not fit, or
        `is_dataset_splitted` without `shard_dims`.
      MeshError: an axis that a mesh does not have.
      NotImplementedError: `dense_tensor_idx`.

    Example:
      >>> import numpy as np, meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> loader = shard_dataloader([{"x": np.ones((4, 2))}], mesh, shard_dims="dp")
      >>> [mp.placements_of(batch["x"]) for batch in loader]
      [[Shard(0)]]

    Follows `paddle.distributed.shard_dataloader` (3.3.1). Deviations: several axes may cut a batch;
    without `is_dataset_splitted` every process reads the whole batch and places its own blocks.
    With it, an epoch raises where processes have different numbers of batches, or parts that are
    no blocks of one batch.
    """
    if dense_tensor_idx is not None:
        raise NotImplementedError(
            f"shard_dataloader(dense_tensor_idx={dense_tensor_idx!r}) does not act yet; every leaf "
            "of a batch is placed"
        )
    if is_dataset_splitted and shard_dims is None:
        raise ValueError(
            "shard_dataloader(is_dataset_splitted=True): shard_dims must name the axis that the "
            'data set is split over, such as shard_dims="dp"'
        )
    if prefetch < 0:
        raise ValueError(f"shard_dataloader(prefetch={prefetch}): it must not be negative")
    keys = None if input_keys is None else tuple(input_keys)
    targets = _targets(meshes, shard_dims, keys)
    split = is_dataset_splitted and jax.process_count() > 1
    return ShardDataloader(dataloader, targets, keys, prefetch, split)


@dataclass(frozen=True, slots=True)
class _Target:
    """Where an input goes."""

    mesh: ProcessMesh
    placements: tuple[Placement, ...]

    def at(self, ndim: int) -> list[Placement]:
        """The placements of a leaf; numbers have no dim to cut."""
        return list(self.placements) if ndim else []


class ShardDataloader:
    """What `shard_dataloader` returns.

    Making it takes no batch and moves no random state. Leaving an epoch early loses no batch of a
    one-shot iterator: those that were read ahead come first in the next one.
    """

    def __init__(
        self,
        dataloader: Iterable[Batch],
        targets: tuple[_Target, ...],
        input_keys: tuple[str, ...] | None,
        prefetch: int,
        split: bool = False,
    ) -> None:
        self._loader, self._targets = dataloader, targets
        self._keys, self._prefetch = input_keys, prefetch
        self._join = SplitBatches().join if split else None
        self._unused: deque[Future[Batch]] = deque()

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]  # raises where it has none

    def __iter__(self) -> Iterator[Batch]:
        # A generator: the loader is first touched when the first batch is asked for.
        batches = self._batches(iter(self._loader))
        if self._join is None:
            yield from batches
            return
        # Processes take turns at one batch after the other here, in the threads that use them.
        while (joined := self._join(next(batches, None))) is not None:
            yield joined

    def _batches(self, source: Iterator[Batch]) -> Iterator[Batch]:
        if not self._prefetch:
            yield from map(self._place, source)
            return
        failed = False

        def take() -> Batch:
            nonlocal failed
            try:
                return _END if failed else self._place(next(source, _END))
            except BaseException:
                failed = True
                raise

        with ThreadPoolExecutor(1, "meshpar-dataloader") as pool:
            ahead, self._unused = self._unused, deque()
            while len(ahead) < self._prefetch:
                ahead.append(pool.submit(take))
            try:
                while (batch := ahead.popleft().result()) is not _END:
                    ahead.append(pool.submit(take))
                    yield batch
            finally:
                read = deque(future for future in ahead if not future.cancel())
                if source is self._loader:
                    self._unused = read

    def batch_placements(self, name: str, ndim: int) -> list[Placement] | None:
        """The placements of a leaf of that dotted name, `None` where it is not known.

        `to_static(loader=...)` asks for them.
        """
        if len(self._targets) == 1:
            return self._targets[0].at(ndim)
        parts = set(name.split("."))
        known = zip(self._keys or (), self._targets, strict=False)
        return next((target.at(ndim) for key, target in known if key in parts), None)

    def _place(self, batch: Batch) -> Batch:
        if batch is _END:
            return batch
        if self._keys is not None:
            batch = _chosen(batch, self._keys)
        if len(self._targets) == 1:
            return self._on(batch, self._targets[0], "")
        if isinstance(batch, Mapping):
            parts = list(batch.items())
        elif isinstance(batch, (tuple, list)):
            parts = list(enumerate(batch))
        else:
            raise ValueError(
                f"shard_dataloader(meshes): {len(self._targets)} meshes, and a batch is a "
                f"{type(batch).__name__}, which has no inputs to tell apart; give one mesh"
            )
        if len(parts) != len(self._targets):
            raise ValueError(
                f"shard_dataloader(meshes): {len(self._targets)} meshes for the {len(parts)} "
                f"inputs {[key for key, _ in parts]} of a batch; give one mesh, or one per input"
            )
        placed = {
            key: self._on(part, target, str(key))
            for (key, part), target in zip(parts, self._targets, strict=True)
        }
        return placed if isinstance(batch, Mapping) else _like(batch, list(placed.values()))

    def _on(self, part: Batch, target: _Target, name: str) -> Batch:
        def put(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
            leaf_path = ".".join(word for word in (name, leaf_name(path)) if word) or "batch"
            ndim = len(leaf.shape) if hasattr(leaf, "shape") else 0
            if self._join is not None:
                return Part(leaf, leaf_path, target.mesh, tuple(target.at(ndim)))
            try:
                return shard_tensor(leaf, target.mesh, target.at(ndim))
            except MeshparError as error:
                raise error.within("shard_dataloader", leaf=leaf_path) from None

        return jax.tree_util.tree_map_with_path(put, part)


def _targets(
    meshes: ProcessMesh | Sequence[ProcessMesh],
    shard_dims: Axes | list[Axes],
    keys: tuple[str, ...] | None,
) -> tuple[_Target, ...]:
    several = [meshes] if isinstance(meshes, ProcessMesh) else list(meshes)
    axes = shard_dims if isinstance(shard_dims, list) else [shard_dims] * len(several)
    if not several or not all(isinstance(mesh, ProcessMesh) for mesh in several):
        raise MeshError(
            f"shard_dataloader(meshes): {meshes!r} is no ProcessMesh and no list of them.",
            instead='ProcessMesh([0, 1], ["dp"])',
        )
    if len(several) == 1 and len(axes) > 1:
        several *= len(axes)
    if len(axes) != len(several):
        raise ValueError(
            f"shard_dataloader: {len(axes)} shard_dims for {len(several)} meshes; give one for "
            "all, or one per mesh"
        )
    if keys is not None and len(several) not in (1, len(keys)):
        raise ValueError(
            f"shard_dataloader: {len(several)} meshes for the input_keys {list(keys)}; give one "
            "mesh, or one per key"
        )
    return tuple(_target(mesh, axis) for mesh, axis in zip(several, axes, strict=True))


def _target(mesh: ProcessMesh, axes: Axes) -> _Target:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    try:
        cutting = [mesh.axis_index(axis) for axis in names]
    except MeshError as error:
        raise error.within("shard_dataloader(shard_dims)") from None
    order = {axis: Shard(0, shard_order=i) for i, axis in enumerate(cutting)}
    return _Target(mesh, tuple(order.get(axis, Replicate()) for axis in range(mesh.ndim)))


def _chosen(batch: Batch, keys: tuple[str, ...]) -> dict[str, Any]:
    there = list(batch) if isinstance(batch, Mapping) else f"none: it is a {type(batch).__name__}"
    missing = [key for key in keys if not isinstance(batch, Mapping) or key not in batch]
    if missing:
        raise ValueError(
            f"shard_dataloader(input_keys): a batch lacks the keys {missing}; it has {there}"
        )
    return {key: batch[key] for key in keys}


def _like(batch: Sequence[Any], parts: list[Any]) -> Sequence[Any]:
    """The parts in a sequence of the batch's type, which may be a named tuple."""
    kind: Any = type(batch)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
