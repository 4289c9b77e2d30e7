"""The program of a region: a jitted `shard_map` from storage to storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshpar._jax import is_tracer, is_tracing, varying_axes
from meshpar.collectives.region import Region, current_region, entered
from meshpar.compiler.arguments import asked_layouts, leaf_names
from meshpar.errors import CollectiveError
from meshpar.placements.blocks import shards_on, storage_sharding, storage_spec
from meshpar.placements.dist_tensor import DistTensor
from meshpar.placements.layout import Layout
from meshpar.placements.reductions import check_dtype
from meshpar.placements.reshard import reshard
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.shard import place
from meshpar.placements.values import Value, describe, placed, wrap

__all__ = ["RegionProgram", "new_axes"]


def new_axes(region: Region) -> tuple[str, ...]:
    """The axes that a region covers and the one around it does not."""
    outer = current_region()
    return tuple(a for a in region.axes if outer is None or a not in outer.axes)


@dataclass(frozen=True, slots=True)
class Results:
    """What a region gives: global shapes, layouts, and how they are put together.

    `plain` says that the program's results are the values, with the shardings that were asked for.
    """

    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    tree: Any  # a PyTreeDef
    plain: bool


class RegionProgram:
    """A region for arguments of given shapes in given layouts.

    Args:
      fn: the code of one device.
      region: where it runs.
      tree: how the arguments are put together.
      inputs: the layout of each leaf.
      out_placements: what `mp.spmd` was given.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        region: Region,
        tree: Any,
        inputs: Sequence[Layout],
        out_placements: Any,
    ) -> None:
        self._fn, self._region, self._tree = fn, region, tree
        self._inputs, self._out = tuple(inputs), out_placements
        self._axes = new_axes(region)
        # Inside another region JAX takes the mesh, some of whose axes are taken, from there.
        self._mesh = None if current_region() else region.mesh.jax_mesh
        self._results: Results | None = None
        self._expected: list[tuple[Any, ...]] | None = None
        self._jitted = jax.jit(self._storages)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs it on global values; a traced one makes it a part of the program being traced."""
        program = self._storages if self._mesh is None else self._jitted
        storages = list(map(self._stored, leaves, self._inputs))
        result = self._together(program(*storages))
        if not is_tracing():
            self._note_arguments(leaves, storages)
        return result

    def run_again(self, leaves: Sequence[Any]) -> Any | None:
        """Runs it on concrete values that lie just as those of the last call did, else `None`."""
        if self._expected is None or len(leaves) != len(self._expected):
            return None
        storages: list[jax.Array] = []
        for leaf, (kind, shape, dtype, where) in zip(leaves, self._expected, strict=True):
            if type(leaf) is not kind or leaf.shape != shape or leaf.dtype != dtype:
                return None
            if isinstance(leaf, DistTensor):
                if leaf.layout != where or leaf.process_mesh != self._region.mesh:
                    return None
                storages.append(leaf.storage)
            elif leaf.sharding is where or leaf.sharding == where:
                storages.append(leaf)
            else:
                return None
        return self._together(self._jitted(*storages))

    def lower(self, leaves: Sequence[Any]) -> Any:
        """The lowered program."""
        return self._jitted.lower(*map(self._stored, leaves, self._inputs))

    # --- between values and storages --------------------------------------------------------------

    def _note_arguments(self, leaves: Sequence[Any], storages: Sequence[jax.Array]) -> None:
        """Remembers arguments that were taken as they are, for `run_again`."""
        expected: list[tuple[Any, ...]] = []
        for leaf, storage in zip(leaves, storages, strict=True):
            if isinstance(leaf, DistTensor) and leaf.storage is storage:
                expected.append((DistTensor, leaf.shape, leaf.dtype, leaf.layout))
            elif leaf is storage and isinstance(leaf, jax.Array):
                expected.append((type(leaf), leaf.shape, leaf.dtype, leaf.sharding))
        self._expected = expected if expected and len(expected) == len(leaves) else None

    def _together(self, storages: Sequence[jax.Array]) -> Any:
        results = self._results
        assert results is not None, "the program was traced"
        values = storages
        if not results.plain or any(map(is_tracer, storages[:1])):
            values = map(self._value, storages, results.shapes, results.layouts)
        return jax.tree.unflatten(results.tree, values)

    def _stored(self, leaf: Any, layout: Layout) -> jax.Array:
        mesh = self._region.mesh
        if self._mesh is None:
            return leaf  # already what a rank of the region outside holds
        if is_tracing():
            whole = Layout.replicated(len(leaf.shape))
            storage, source = (
                (leaf.storage, leaf.layout) if isinstance(leaf, DistTensor) else (leaf, whole)
            )
            moves = layout.partial or source != whole
            return reshard_storage(storage, source, layout, leaf.shape, mesh) if moves else storage
        known = placed(leaf)
        if known is None:
            known = placed(place(leaf, leaf.dtype, mesh, layout))
        elif known.mesh != mesh or len(self._axes) == mesh.ndim or known.layout.partial:
            known = placed(reshard(leaf, mesh, layout.placements(mesh)))
        assert known is not None, "a placed value is known"
        return known.storage

    def _value(self, storage: jax.Array, shape: tuple[int, ...], layout: Layout) -> Value:
        mesh = self._region.mesh
        if is_tracer(storage):  # contributions come to their value, as there is none but that
            return reshard_storage(storage, layout, layout.without_partial(), shape, mesh)
        if len(self._axes) < mesh.ndim:  # XLA chose how it lies along the other axes
            if not layout.partial:
                return storage
            storage = jax.device_put(storage, storage_sharding(layout, mesh))
        return wrap(storage, shape, layout, mesh)

    # --- the program ------------------------------------------------------------------------------

    def _storages(self, *storages: jax.Array) -> list[jax.Array]:
        sizes = self._region.mesh.axis_sizes
        # What the function gives is known once it is traced, and `shard_map` asks before.
        jax.eval_shape(self._mapped(self._note_results, ()), *storages)
        results = self._results
        assert results is not None, "the function was traced"
        specs = [storage_spec(layout, sizes) for layout in results.layouts]
        return self._mapped(self._local_storages, specs)(*storages)

    def _mapped(self, local: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        sizes = self._region.mesh.axis_sizes
        return jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=tuple(storage_spec(layout, sizes) for layout in self._inputs),
            out_specs=out_specs,
            axis_names=set(self._axes),
        )

    def _local(self, *blocks: jax.Array) -> Any:
        leaves = [
            x.reshape(x.shape[len(layout.partial) :]) if layout.partial else x
            for x, layout in zip(blocks, self._inputs, strict=True)
        ]
        with entered(self._region):
            return self._fn(*jax.tree.unflatten(self._tree, leaves))

    def _local_storages(self, *blocks: jax.Array) -> list[jax.Array]:
        out = map(jax.numpy.asarray, jax.tree.leaves(self._local(*blocks)))
        results = self._results
        assert results is not None, "the function was traced"
        return [
            x.reshape((1,) * len(layout.partial) + x.shape)
            for x, layout in zip(out, results.layouts, strict=True)
        ]

    def _note_results(self, *blocks: jax.Array) -> tuple[()]:
        out = self._local(*blocks)
        leaves, tree = jax.tree.flatten(out)
        leaves = [jax.numpy.asarray(leaf) for leaf in leaves]
        mesh, sizes = self._region.mesh, self._region.mesh.axis_sizes
        ndims = [leaf.ndim for leaf in leaves]
        asked = asked_layouts(self._out, out, mesh, "out_placements", ndims)
        layouts = tuple(a or Layout.replicated(n) for a, n in zip(asked, ndims, strict=True))
        for name, leaf, layout in zip(leaf_names(out, "result"), leaves, layouts, strict=True):
            self._check_result(name, leaf, layout)
        shapes = tuple(
            tuple(n * shards_on(axes, sizes) for n, axes in zip(x.shape, layout.dims, strict=True))
            for x, layout in zip(leaves, layouts, strict=True)
        )
        # XLA forgets placements of arrays without elements, and those over axes of size 1.
        plain = min(sizes.values()) > 1 and not any(
            0 in shape or layout.partial for shape, layout in zip(shapes, layouts, strict=True)
        )
        self._results = Results(shapes, layouts, tree, plain)
        return ()

    def _check_result(self, name: str, leaf: jax.Array, layout: Layout) -> None:
        named = (*layout.shard_axes, *layout.partial_axes)
        outside = [axis for axis in named if axis not in self._axes]
        if outside:
            raise CollectiveError(
                f"out_placements of {name} names the axis {outside[0]!r}, which the region does "
                "not cover.",
                because=f"it covers {', '.join(map(repr, self._axes))}",
            )
        differs = [a for a in self._axes if a in varying_axes(leaf) and a not in named]
        if differs:
            axis = differs[0]
            raise CollectiveError(
                f"{name} may differ between the ranks along {axis!r}, where it is placed "
                "Replicate().",
                local=describe(leaf),
                placements=layout.placements(self._region.mesh),
                because="it depends on values that differ there, and no collective makes it one",
                instead=f"mp.all_reduce(x, group=mesh.group({axis!r})) or another collective; or "
                "mp.Shard(dim) or mp.Partial() there",
            )
        if layout.partial and self._mesh is None:
            raise NotImplementedError(
                f"mp.spmd: out_placements of {name} holds Partial() inside another region; "
                "mp.all_reduce(x, group=mesh.group(axis)) adds the contributions up"
            )
        check_dtype(layout, leaf.dtype)
