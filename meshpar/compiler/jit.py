"""`mp.jit`: a function of global values, run as a program with explicit collectives."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshpar._jax import is_tracer, is_tracing
from meshpar.compiler.arguments import asked_layouts, leaf_names, mesh_for
from meshpar.compiler.lower import Lowering, OtherArguments, lower_program
from meshpar.compiler.no_rule import warn_of_missing_rules
from meshpar.compiler.plan import Plan
from meshpar.errors import MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.placements.annotate import annotate
from meshpar.placements.dist_tensor import DistTensor
from meshpar.placements.layout import Layout
from meshpar.placements.values import layout_of, mesh_of

__all__ = ["Jitted", "jit"]

Partitioner = Literal["meshpar", "xla"]


def jit(
    fn: Callable[..., Any],
    in_placements: Any = None,
    out_placements: Any = None,
    mesh: ProcessMesh | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    partitioner: Partitioner = "meshpar",
) -> Jitted:
    """Makes `fn`, written for global values, run on a mesh with collectives that can be read first.

    Args:
      fn: a function of pytrees of arrays of any global shapes. `mp.shard_tensor` and `mp.reshard`
        inside it are annotations.
      in_placements: one entry per positional argument, or a dict by argument name; each is a list
        of placements for all leaves, a pytree prefix of such lists, or `None`: as the array lies,
        and where it lies nowhere as the plan finds best.
      out_placements: the same for the result; `None` lets the plan choose, nothing pending.
      mesh: the mesh; without it that of the arguments, else the default one.
      donate_argnums: positional arguments whose memory may be reused for the results.
      static_argnums: positional arguments that are compile-time constants; they must be hashable.
      partitioner: `"meshpar"`, or `"xla"`, which leaves it to XLA's partitioner.

    Returns:
      A function like `fn`, with `plan(*args)` and `lower(*args)`. Its results are `jax.Array`s, or
      `DistTensor`s where a `jax.Array` cannot hold the layout. Called with tracers it is `fn` with
      its annotations, so that `jax.grad`, `jax.vmap` and an outer `mp.jit` compose.

    Raises:
      MeshError: no mesh, or arguments on different ones.
      PlacementError: placements that do not fit.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> x = mp.shard_tensor(np.ones((4, 2)), mesh, [mp.Shard(0)])
      >>> float(mp.jit(lambda x: (x * 2).sum())(x))
      16.0

    The counterpart of `jax.jit`; Paddle's is `paddle.jit.to_static` with a `ProcessMesh`.
    """
    if partitioner not in ("meshpar", "xla"):
        raise ValueError(f"mp.jit(partitioner={partitioner!r}): it is 'meshpar' or 'xla'")
    return Jitted(
        fn,
        in_placements,
        out_placements,
        mesh,
        _as_tuple(donate_argnums),
        _as_tuple(static_argnums),
        partitioner,
    )


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call taken apart: static arguments, and the leaves of the others."""

    static: tuple[tuple[int, Hashable], ...]
    leaves: list[Any]
    tree: Any  # a PyTreeDef of (positional arguments that are not static, keyword arguments)


class Jitted:
    """What `mp.jit` returns: callable like the function, and readable before it runs."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_placements: Any,
        out_placements: Any,
        mesh: ProcessMesh | None,
        donate_argnums: tuple[int, ...],
        static_argnums: tuple[int, ...],
        partitioner: Partitioner,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._mesh, self._partitioner = fn, mesh, partitioner
        self._in, self._out = in_placements, out_placements
        self._donated, self._static = donate_argnums, static_argnums
        self._lowerings: dict[Hashable, Lowering] = {}
        self._last: tuple[Any, Any, Lowering] | None = None
        self._direct: Callable[..., Any] | None = None
        self._name = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # JAX itself compares the arguments with those of the last program, and raises before it
        # runs when they differ. Under a transformation there is no program to run.
        if self._direct is not None and not is_tracing():
            with contextlib.suppress(OtherArguments, TypeError, ValueError):
                return self._direct(kwargs, *args)
        call = self._taken_apart(args, kwargs)
        if any(is_tracer(leaf) for leaf in call.leaves):
            return self._traced(call)
        lowering = self._lowering(call)
        self._last = (call.tree, call.static, lowering)
        self._direct = None if self._static else lowering.direct
        return lowering.run(lowering.placed(call.leaves))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """All decisions for these arguments, before anything runs.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s where only shapes are known; the mesh's devices
            need not be there.
          **kwargs: keyword arguments.

        Raises:
          NotImplementedError: the partitioner is XLA, which tells its decisions in
            `lower(...).compile().as_text()` only.
        """
        plan = self._lowering(self._taken_apart(args, kwargs)).plan
        if plan is None:
            raise NotImplementedError(
                f"mp.jit({self._name}, partitioner='xla').plan: XLA tells what it decided only in "
                "f.lower(*args).compile().as_text()"
            )
        return plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program for these arguments, as `jax.jit(...).lower` gives it."""
        return self._lowering(self._taken_apart(args, kwargs)).lowered()

    def lowering(self, *args: Any, **kwargs: Any) -> Lowering:
        """The program for these arguments, from storage arrays to storage arrays."""
        return self._lowering(self._taken_apart(args, kwargs))

    def planned_call(self, *args: Any, **kwargs: Any) -> tuple[Plan, list[jax.Array]]:
        """The plan of a call and the storages of its arguments, for `mp.check`."""
        leaves = jax.tree.leaves((args, kwargs))
        return self.plan(*args, **kwargs), self.lowering(*args, **kwargs).placed(leaves)

    def with_partitioner(self, partitioner: Partitioner) -> Jitted:
        """The same function under the other partitioner."""
        return Jitted(
            self._fn, self._in, self._out, self._mesh, self._donated, self._static, partitioner
        )

    def compiled_count(self) -> int:
        """How many programs were made so far, one per kind of arguments."""
        return len(self._lowerings)

    # --- inside -----------------------------------------------------------------------------------

    def _taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        static, dynamic = (), args
        if self._static:
            static = tuple((i, args[i]) for i in self._static if i < len(args))
            dynamic = tuple(a for i, a in enumerate(args) if i not in self._static)
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        return _Call(static, leaves, tree)

    def _global(self, call: _Call) -> Callable[..., Any]:
        """The function of the leaves, with static arguments put back."""
        fn, static = self._fn, dict(call.static)

        def of_leaves(*leaves: Any) -> Any:
            dynamic, kwargs = jax.tree.unflatten(call.tree, leaves)
            rest = iter(dynamic)
            count = len(dynamic) + len(static)
            args = [static[i] if i in static else next(rest) for i in range(count)]
            return fn(*args, **kwargs)

        of_leaves.__name__ = self._name
        return of_leaves

    def _asked_inputs(self, call: _Call, mesh: ProcessMesh) -> list[Layout | None]:
        dynamic, kwargs = jax.tree.unflatten(call.tree, call.leaves)
        ndims = [len(_struct(leaf).shape) for leaf in call.leaves]
        asked = self._in
        if asked is None:
            return [None] * len(call.leaves)
        if isinstance(asked, Mapping):
            positional = tuple(asked.get(n) for n in self._argument_names(len(dynamic)))
            by_name = {name: asked.get(name) for name in kwargs}
        else:
            positional = tuple(asked)[: len(dynamic)]
            positional += (None,) * (len(dynamic) - len(positional))
            by_name = dict.fromkeys(kwargs)
        return asked_layouts((positional, by_name), (dynamic, kwargs), mesh, "in_placements", ndims)

    def _argument_names(self, count: int) -> list[str]:
        """The names of the positional arguments that are not static; numbers past the last."""
        try:
            names = list(inspect.signature(self._fn).parameters)
        except ValueError:  # built in, without a signature
            names = []
        kept = [n for i, n in enumerate(names) if i not in self._static]
        return [*kept, *map(str, range(len(kept), count))][:count]

    def _leaf_names(self, dynamic: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        named = zip(self._argument_names(len(dynamic)), dynamic, strict=True)
        return [n for name, tree in (*named, *kwargs.items()) for n in leaf_names(tree, name)]

    def _traced(self, call: _Call) -> Any:
        """Inside another trace: the global program with its annotations."""
        leaves = list(call.leaves)
        mesh = self._mesh
        if self._in is not None or self._out is not None:
            mesh = mesh_for(call.leaves, mesh, f"mp.jit({self._name})")
            for i, layout in enumerate(self._asked_inputs(call, mesh)):
                if layout is not None:
                    leaves[i] = annotate(leaves[i], mesh, layout)
        out = self._global(call)(*leaves)
        if self._out is None or mesh is None:
            return out
        flat, tree = jax.tree.flatten(out)
        asked = asked_layouts(self._out, out, mesh, "out_placements", [x.ndim for x in flat])
        return jax.tree.unflatten(
            tree,
            [x if y is None else annotate(x, mesh, y) for x, y in zip(flat, asked, strict=True)],
        )

    def _lowering(self, call: _Call) -> Lowering:
        where = f"mp.jit({self._name})"
        try:
            mesh = mesh_for(call.leaves, self._mesh, where)
            structs = [_struct(leaf) for leaf in call.leaves]
            there = [_layout_on(mesh, leaf) for leaf in call.leaves]
            if self._last is not None and self._last[:2] == (call.tree, call.static):
                last = self._last[2]
                if last.mesh == mesh and last.fits(structs, there):
                    return last
            kinds = tuple(
                (s.shape, s.dtype, s.weak_type, layout)
                for s, layout in zip(structs, there, strict=True)
            )
            key = (call.static, call.tree, mesh, kinds)
            if key not in self._lowerings:
                self._lowerings[key] = self._new_lowering(call, mesh, structs, there)
            return self._lowerings[key]
        except MeshparError as error:
            raise error.within(where) if where not in str(error) else error from None

    def _new_lowering(
        self,
        call: _Call,
        mesh: ProcessMesh,
        structs: Sequence[jax.ShapeDtypeStruct],
        there: Sequence[Layout | None],
    ) -> Lowering:
        dynamic, kwargs = jax.tree.unflatten(call.tree, range(len(call.leaves)))
        positions = [i for i in range(len(dynamic) + len(call.static)) if i not in self._static]
        lowering = lower_program(
            self._global(call),
            structs,
            there,
            self._asked_inputs(call, mesh),
            lambda out, ndims: asked_layouts(self._out, out, mesh, "out_placements", ndims),
            self._leaf_names(dynamic, kwargs),
            mesh,
            call.tree,
            tuple(i for i, position in enumerate(positions) if position in self._donated),
            self._partitioner,
        )
        if lowering.plan is not None:
            warn_of_missing_rules(lowering.plan.planned, f"mp.jit({self._name})", stacklevel=4)
        return lowering


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an argument."""
    if isinstance(leaf, (DistTensor, jax.ShapeDtypeStruct)):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _layout_on(mesh: ProcessMesh, leaf: Any) -> Layout | None:
    """The layout of an argument that lies on the mesh; from elsewhere it is placed anew."""
    return layout_of(leaf) if mesh_of(leaf) == mesh else None
