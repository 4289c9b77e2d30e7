"""`mp.spmd`: code of one device, run by all devices of a mesh."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax

from meshpar._jax import is_tracing
from meshpar.collectives.region import Region, current_region
from meshpar.collectives.region_program import RegionProgram, new_axes
from meshpar.compiler.arguments import asked_layouts, leaf_names, mesh_for
from meshpar.errors import CollectiveError, MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import shards_on
from meshpar.placements.layout import Layout
from meshpar.placements.types import Placement
from meshpar.placements.values import describe, layout_of, mesh_of

__all__ = ["Spmd", "spmd"]


def spmd(
    fn: Callable[..., Any] | None = None,
    mesh: ProcessMesh | None = None,
    in_placements: Any = None,
    out_placements: Any = None,
    axes: str | Sequence[str] | None = None,
) -> Any:
    """Runs `fn`, the code of one device, on every device of a mesh.

    Inside, a rank is a device: `fn` gets its blocks of the arguments, `mp.get_rank()` tells which
    it is, and `mp.all_reduce` and the other collectives exchange arrays. It runs under `jax.jit`,
    composes with `jax.grad` and `jax.jit`, and may hold further regions over other axes. JAX checks
    that results said to be the same on all ranks are. `mp.grad` and `mp.value_and_grad` are the
    gradients of a loss inside.

    Args:
      fn: a function of pytrees of arrays, of the blocks' shapes. Left out, `spmd(mesh=...)` is a
        decorator.
      mesh: the mesh; without it that of the arguments, else the default one.
      in_placements: one entry per positional argument, each a list of placements for all leaves, a
        pytree prefix of such lists, or `None`: as the array lies, and where it lies nowhere,
        replicated. Of a `Partial` argument a device gets its contribution.
      out_placements: a list of placements for all results, a pytree prefix of such lists, or
        `None`: the same on all devices. The blocks are joined along `Shard` dims; of a `Partial`
        result each device gives its contribution.
      axes: the axes that the region covers; all of them where left out. A rank is then a coordinate
        along these, and XLA distributes the work of a rank over the other axes.

    Returns:
      A function of the global values, with `lower(*args)`. Its results are `jax.Array`s, or
      `DistTensor`s for `Partial`.

    Raises:
      CollectiveError: a dim that the axes do not divide, or a result that differs between ranks
        along an axis without `Shard` or `Partial`.
      PlacementError, MeshError: placements or a mesh that do not fit.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> @mp.spmd(mesh=mesh, in_placements=[[mp.Shard(0)]], out_placements=[mp.Replicate()])
      ... def total(x):
      ...     return mp.all_reduce(x.sum())
      >>> float(total(np.arange(4.0)))
      6.0

    The counterpart of a script that `paddle.distributed.launch` starts once per device; JAX's is
    `jax.shard_map`.
    """
    if fn is None:
        return functools.partial(
            spmd, mesh=mesh, in_placements=in_placements, out_placements=out_placements, axes=axes
        )
    chosen = (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes)
    return Spmd(fn, mesh, in_placements, out_placements, chosen)


class Spmd:
    """What `mp.spmd` returns: callable with global values."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: ProcessMesh | None,
        in_placements: Any,
        out_placements: Any,
        axes: tuple[str, ...] | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._mesh, self._axes = fn, mesh, axes
        self._in, self._out = in_placements, out_placements
        self._programs: dict[Hashable, RegionProgram] = {}
        self._last: tuple[Any, RegionProgram] | None = None
        self._name = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if self._last is not None and self._last[0] == tree and not is_tracing():
            again = self._last[1].run_again(leaves)
            if again is not None:
                return again
        with self._named():
            program = self._prepared(args, leaves, tree)
            if not is_tracing():
                self._last = (tree, program)
            return program.run(leaves)

    def lower(self, *args: Any) -> Any:
        """The lowered program for these arguments, as `jax.jit(...).lower` gives it."""
        with self._named():
            leaves, tree = jax.tree.flatten(args)
            return self._prepared(args, leaves, tree).lower(leaves)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        where = f"mp.spmd({self._name})"
        try:
            yield
        except MeshparError as error:
            raise error.within(where) if where not in str(error) else error from None

    def _prepared(self, args: tuple[Any, ...], leaves: list[Any], tree: Any) -> RegionProgram:
        leaves[:] = [x if hasattr(x, "shape") else _as_argument(x) for x in leaves]
        outer = current_region()
        mesh = outer.mesh if outer and not self._mesh else self._mesh
        mesh = mesh_for(leaves, mesh, f"mp.spmd({self._name})")
        region = Region(mesh, self._covered(mesh))
        layouts = self._layouts(args, leaves, region)
        for name, leaf, layout in zip(leaf_names(args), leaves, layouts, strict=True):
            _check_layout(f"argument {name}", leaf, layout, region)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (tree, region, tuple(layouts), kinds)
        if outer is None and key in self._programs:
            return self._programs[key]
        program = RegionProgram(self._fn, region, tree, layouts, self._out)
        if outer is None:  # else it belongs to the program of the region outside
            self._programs[key] = program
        return program

    def _covered(self, mesh: ProcessMesh) -> tuple[str, ...]:
        outer = current_region()
        asked = mesh.axis_names if self._axes is None else self._axes
        positions = {mesh.axis_index(axis) for axis in asked}
        if outer is None:
            return tuple(mesh.axis_names[i] for i in sorted(positions))
        if outer.mesh != mesh:
            raise CollectiveError(
                "a region within a region runs over the same mesh.",
                meshes=f"{outer.mesh!r} outside, {mesh!r} inside",
            )
        if self._axes is None:
            positions -= {mesh.axis_index(axis) for axis in outer.axes}
        taken = [axis for axis in outer.axes if mesh.axis_index(axis) in positions]
        if taken or not positions:
            raise CollectiveError(
                f"the region outside covers {repr(taken[0]) if taken else 'every axis'} already.",
                because=f"it covers {', '.join(map(repr, outer.axes))} of {mesh!s}",
                instead="mp.spmd(..., axes=[...]) on the one outside leaves axes to this one",
            )
        return tuple(a for i, a in enumerate(mesh.axis_names) if i in positions or a in outer.axes)

    def _layouts(self, args: tuple[Any, ...], leaves: list[Any], region: Region) -> list[Layout]:
        asked = self._in
        entries = (None,) * len(args) if asked is None else tuple(asked)
        bare = next((entry for entry in entries if isinstance(entry, Placement)), None)
        if len(entries) != len(args) or bare is not None:
            raise CollectiveError(
                f"{len(args)} argument(s), and {len(entries)} entries in in_placements."
                if bare is None
                else f"in_placements has {bare} where a list of placements belongs.",
                because="it has one entry for each positional argument, each a list of placements",
                instead="in_placements=[[mp.Shard(0)], [mp.Replicate()]] for two arguments",
            )
        ndims = [len(leaf.shape) for leaf in leaves]
        found = asked_layouts(entries, args, region.mesh, "in_placements", ndims)
        return [
            layout or _lying(leaf, region, ndim)
            for layout, leaf, ndim in zip(found, leaves, ndims, strict=True)
        ]


def _as_argument(x: Any) -> jax.Array:
    try:
        return jax.numpy.asarray(x)
    except TypeError:
        raise CollectiveError(
            f"an argument holds {x!r}, which is no array.",
            instead="what is known before the program runs is closed over: "
            "mp.spmd(functools.partial(fn, value), ...)",
        ) from None


def _lying(leaf: Any, region: Region, ndim: int) -> Layout:
    """How an argument lies along the region's axes; replicated where it lies on no mesh."""
    layout = layout_of(leaf) if mesh_of(leaf) == region.mesh else None
    if layout is None:
        return Layout.replicated(ndim)
    dims = tuple(tuple(axis for axis in axes if axis in region.axes) for axes in layout.dims)
    return Layout(dims, tuple(p for p in layout.partial if p[0] in region.axes))


def _check_layout(name: str, leaf: Any, layout: Layout, region: Region) -> None:
    own = new_axes(region)
    outside = [a for a in (*layout.shard_axes, *layout.partial_axes) if a not in own]
    if outside:
        raise CollectiveError(
            f"in_placements of {name} names the axis {outside[0]!r}, which is not the region's.",
            because=f"it covers {', '.join(map(repr, own))}; along the others its arguments lie as "
            "they do around it",
            instead="mp.Replicate() there",
        )
    if layout.partial and current_region() is not None:
        raise NotImplementedError(
            f"mp.spmd: in_placements of {name} holds Partial() inside another region; "
            "the region outside can hand over this rank's contribution as it is"
        )
    for dim, axes in enumerate(layout.dims):
        size, cuts = leaf.shape[dim], shards_on(axes, region.sizes)
        if size % cuts:
            raise CollectiveError(
                f"dim {dim} of {name} cannot be cut equally between {cuts} ranks.",
                argument=describe(leaf),
                because=f"{size} rows / {cuts} ranks of {', '.join(map(repr, axes))} leaves "
                f"{size % cuts}, and all ranks run one program, of blocks of one shape",
                instead=f"pad the dim to {-(-size // cuts) * cuts}; mp.jit cuts any dim",
            )
