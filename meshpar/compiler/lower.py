"""From a traced function and layouts to a jitted program of storage arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar.compiler.decide import Decider
from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.partition import run_local
from meshpar.compiler.plan import Plan
from meshpar.compiler.planned import PlannedProgram
from meshpar.compiler.program import program_of
from meshpar.compiler.propagate import propagate
from meshpar.errors import MeshError
from meshpar.mesh import ProcessMesh
from meshpar.placements.annotate import annotate
from meshpar.placements.blocks import is_even, storage_shape, storage_sharding, storage_spec
from meshpar.placements.layout import Layout
from meshpar.placements.shard import place
from meshpar.placements.storage import from_storage, to_storage
from meshpar.placements.values import placed, wrap

__all__ = ["Lowering", "OtherArguments", "lower_program", "plan_function", "shard_mapped"]

Struct = jax.ShapeDtypeStruct
Layouts = Sequence[Layout | None]


class OtherArguments(Exception):
    """A program is called with arguments of other types than it was made for."""


class Lowering:
    """One program of a function, for arguments of given shapes, dtypes and layouts.

    Args:
      local: the function from the storages of the arguments to those of the results.
      call: how the arguments are put together: `(positional arguments, keyword arguments)`.
      structs: shape and dtype of each argument.
      inputs: the layout of each argument.
      outputs: shape and layout of each result; without layout XLA chose.
      tree: how the results are put together.
      mesh: the mesh.
      plan: what the program does, where meshpar partitioned it.
      donated: the positional arguments whose memory may be reused.
      name: what the program is called in profiles.
    """

    def __init__(
        self,
        local: Callable[..., list[jax.Array]],
        call: Any,
        structs: Sequence[Struct],
        inputs: Sequence[Layout],
        outputs: Sequence[tuple[tuple[int, ...], Layout | None]],
        tree: Any,
        mesh: ProcessMesh,
        plan: Plan | None,
        *,
        donated: Sequence[int],
        name: str,
    ) -> None:
        self._structs, self.mesh, self._call = tuple(structs), mesh, call
        self._inputs, self._outputs, self._tree = tuple(inputs), tuple(outputs), tree
        self.plan = plan
        sizes = mesh.axis_sizes
        # XLA forgets placements of arrays without elements, and those over axes of size 1.
        self._plain_outputs = min(sizes.values()) > 1 and all(
            0 not in shape
            and (layout is None or not (layout.partial or not is_even(shape, layout, sizes)))
            for shape, layout in outputs
        )
        self._program = self._jitted(local, donated, name)
        plain = all(
            not y.partial and is_even(tuple(s.shape), y, sizes)
            for s, y in zip(structs, inputs, strict=True)
        )
        self.direct = self._program if plain and self._plain_outputs else None
        """The program itself, called as `direct(kwargs, *args)`, where nothing is to be wrapped."""

    def _jitted(
        self, local: Callable[..., list[jax.Array]], donated: Sequence[int], name: str
    ) -> Callable[..., Any]:
        stored = _storage_structs(self._structs, self._inputs, self.mesh)
        expected = [(tuple(s.shape), s.dtype, s.weak_type) for s in stored]

        def program(kwargs: dict[str, Any], *args: Any) -> Any:
            storages = jax.tree.leaves((args, kwargs))
            avals = [jax.typeof(x) for x in storages]
            # Traced again: the arguments are not those of the plan.
            if [(a.shape, a.dtype, a.weak_type) for a in avals] != expected:
                raise OtherArguments
            out = local(*storages)
            return jax.tree.unflatten(self._tree, out) if self._plain_outputs else out

        program.__name__ = name
        try:
            shardings = [storage_sharding(layout, self.mesh) for layout in self._inputs]
        except MeshError:  # planning for devices that are not there
            return jax.jit(program)
        args, kwargs = jax.tree.unflatten(self._call, shardings)
        return jax.jit(
            program,
            in_shardings=(kwargs, *args),
            donate_argnums=tuple(i + 1 for i in donated),
        )

    def fits(self, structs: Sequence[Struct], there: Layouts) -> bool:
        """Whether arguments can be taken: what lies nowhere is placed as the program wants it."""
        return len(structs) == len(self._structs) and all(
            layout in (None, mine) and _type(struct) == _type(expected)
            for struct, layout, expected, mine in zip(
                structs, there, self._structs, self._inputs, strict=True
            )
        )

    def placed(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The storages of any arguments of the right shapes: what is not placed gets placed."""
        storages: list[jax.Array] = []
        for leaf, struct, layout in zip(leaves, self._structs, self._inputs, strict=True):
            if struct.weak_type:  # a number, whose type yields to that of what it meets
                storages.append(jax.device_put(leaf, storage_sharding(layout, self.mesh)))
                continue
            known = placed(leaf)
            if known is None or known.mesh != self.mesh:
                known = placed(place(leaf, struct.dtype, self.mesh, layout))
            assert known is not None, "a placed value is known"
            storages.append(known.storage)
        return storages

    def run(self, storages: Sequence[jax.Array]) -> Any:
        """Runs the program and puts its results together."""
        args, kwargs = jax.tree.unflatten(self._call, storages)
        out = self._program(kwargs, *args)
        if self._plain_outputs:
            return out
        values = [
            x if layout is None else wrap(x, shape, layout, self.mesh)
            for x, (shape, layout) in zip(out, self._outputs, strict=True)
        ]
        return jax.tree.unflatten(self._tree, values)

    def lowered(self, platforms: Sequence[str] | None = None) -> Any:
        """The lowered program; `platforms` names those to lower for, whatever is there."""
        storages = _storage_structs(self._structs, self._inputs, self.mesh)
        args, kwargs = jax.tree.unflatten(self._call, storages)
        if platforms is None:
            return self._program.lower(kwargs, *args)  # pyright: ignore[reportFunctionMemberAccess]
        traced = self._program.trace(kwargs, *args)  # pyright: ignore[reportFunctionMemberAccess]
        return traced.lower(lowering_platforms=tuple(platforms))


def _type(struct: Struct) -> tuple[object, ...]:
    return struct.shape, struct.dtype, struct.weak_type


def lower_program(
    fn: Callable[..., Any],
    structs: Sequence[Struct],
    there: Layouts,
    asked: Layouts,
    asked_outputs: Callable[[Any, list[int]], Layouts],
    names: Sequence[str],
    mesh: ProcessMesh,
    call: Any,
    donated: tuple[int, ...],
    partitioner: str,
) -> Lowering:
    """Traces, plans and lowers a function.

    Args:
      fn: takes the leaves, returns a pytree.
      structs: shape and dtype of each leaf.
      there: the layout in which each leaf is there, if it lies on the mesh.
      asked: the layout that each leaf shall have, where one is asked for.
      asked_outputs: (result structs, their numbers of dims) -> the layouts asked of the results.
      names: what the leaves are called.
      mesh: the mesh.
      call: how the leaves make `(positional arguments, keyword arguments)`.
      donated: the positional arguments whose memory may be reused.
      partitioner: "meshpar" or "xla".
    """

    def annotated(*leaves: jax.Array) -> Any:
        given = zip(leaves, there, asked, strict=True)
        return fn(*(x if not (a and t) or a == t else annotate(x, mesh, a) for x, t, a in given))

    known = [t or a for t, a in zip(there, asked, strict=True)]
    if partitioner == "xla":
        shapes = jax.eval_shape(annotated, *structs)
        flat, tree = jax.tree.flatten(shapes)
        outputs = asked_outputs(shapes, [len(s.shape) for s in flat])
        plan = None
        inputs = [k or Layout.replicated(len(s.shape)) for k, s in zip(known, structs, strict=True)]
        local = _by_xla(annotated, structs, inputs, outputs, mesh)
    else:
        args, _ = jax.tree.unflatten(call, range(len(structs)))
        reused = tuple(jax.tree.leaves([args[i] for i in donated]))
        plan, flat, tree = plan_function(
            annotated, structs, known, asked_outputs, names, mesh, reused
        )
        inputs, outputs = plan.planned.inputs, plan.planned.outputs
        local = shard_mapped(plan.planned, mesh)
    results = [(tuple(s.shape), o) for s, o in zip(flat, outputs, strict=True)]
    return Lowering(
        local, call, structs, inputs, results, tree, mesh, plan, donated=donated, name=fn.__name__
    )


def _storage_structs(
    structs: Sequence[Struct], layouts: Sequence[Layout], mesh: ProcessMesh
) -> list[Struct]:
    """Shape and dtype of the storages of arguments."""
    return [
        s.update(shape=storage_shape(tuple(s.shape), layout, mesh.axis_sizes))
        for s, layout in zip(structs, layouts, strict=True)
    ]


def plan_function(
    fn: Callable[..., Any],
    structs: Sequence[Struct],
    known: Layouts,
    asked_outputs: Callable[[Any, list[int]], Layouts],
    names: Sequence[str],
    mesh: ProcessMesh,
    donated: tuple[int, ...],
) -> tuple[Plan, list[Struct], Any]:
    """Traces and plans a function; arguments as of `lower_program`.

    Returns:
      The plan, the structs of the results, and how these are put together.
    """
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*structs)
    flat, tree = jax.tree.flatten(shapes)
    wanted = asked_outputs(shapes, [len(s.shape) for s in flat])
    model = _model_of(mesh)
    planned = propagate(program_of(jaxpr), known, wanted, Decider(mesh.axis_sizes, model))
    return Plan(planned, mesh, tuple(names), model, donated), flat, tree


def _model_of(mesh: ProcessMesh) -> DeviceModel:
    try:
        return DeviceModel.of(mesh.jax_mesh.devices.flat[0].platform)
    except MeshError:  # planning for devices that are not there
        return DeviceModel()


def shard_mapped(planned: PlannedProgram, mesh: ProcessMesh) -> Callable[..., list[jax.Array]]:
    """The function from storages to storages; on an abstract mesh it can only be lowered."""
    sizes = mesh.axis_sizes

    def local(*stored: jax.Array) -> list[jax.Array]:
        inputs = zip(stored, planned.inputs, strict=True)
        blocks = [x.reshape(x.shape[len(layout.partial) :]) for x, layout in inputs]
        out = run_local(planned, *blocks)
        results = zip(out, planned.outputs, strict=True)
        return [x.reshape((1,) * len(layout.partial) + x.shape) for x, layout in results]

    try:
        jax_mesh = mesh.jax_mesh
    except MeshError:  # planning for devices that are not there
        jax_mesh = mesh.abstract_mesh
    return jax.shard_map(
        local,
        mesh=jax_mesh,
        in_specs=tuple(storage_spec(layout, sizes) for layout in planned.inputs),
        out_specs=[storage_spec(layout, sizes) for layout in planned.outputs],
        check_vma=False,
    )


def _by_xla(
    fn: Callable[..., Any],
    structs: Sequence[Struct],
    inputs: Sequence[Layout],
    wanted: Layouts,
    mesh: ProcessMesh,
) -> Callable[..., list[jax.Array]]:
    """The function from storages to storages by sharding constraints alone."""
    sizes = mesh.axis_sizes
    pending = [layout for layout in (*inputs, *wanted) if layout is not None and layout.partial]
    if pending:
        raise NotImplementedError(
            f"mp.jit(partitioner='xla') with {pending[0].placements(mesh)}: XLA's partitioner has "
            "no pending reductions; partitioner='meshpar' has"
        )

    def stored(x: jax.Array, layout: Layout | None) -> jax.Array:
        if layout is None:
            return x
        where = storage_sharding(layout, mesh)
        return jax.lax.with_sharding_constraint(to_storage(x, layout, sizes), where)

    def local(*storages: jax.Array) -> list[jax.Array]:
        values = [
            from_storage(x, tuple(s.shape), layout, sizes)
            for x, s, layout in zip(storages, structs, inputs, strict=True)
        ]
        return [stored(x, w) for x, w in zip(jax.tree.leaves(fn(*values)), wanted, strict=True)]

    return local
