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
from meshpar.placements.dist_tensor import DistTensor
from meshpar.placements.layout import Layout
from meshpar.placements.shard import place
from meshpar.placements.storage import from_storage, to_storage
from meshpar.placements.values import placed, wrap

__all__ = ["Lowering", "lower_program", "plan_function", "shard_mapped"]

Struct = jax.ShapeDtypeStruct
Layouts = Sequence[Layout | None]


class Lowering:
    """One program of a function, for arguments of given shapes, dtypes and layouts.

    Args:
      program: the jitted function from storage arrays to storage arrays.
      structs: shape and dtype of each argument.
      inputs: the layout of each argument.
      outputs: shape and layout of each result; without layout XLA chose.
      tree: how the results are put together.
      mesh: the mesh.
      plan: what the program does, where meshpar partitioned it.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        structs: Sequence[Struct],
        inputs: Sequence[Layout],
        outputs: Sequence[tuple[tuple[int, ...], Layout | None]],
        tree: Any,
        mesh: ProcessMesh,
        plan: Plan | None,
    ) -> None:
        self._program, self._structs, self._mesh = program, tuple(structs), mesh
        self._inputs, self._outputs, self._tree = tuple(inputs), tuple(outputs), tree
        self.plan = plan
        sizes = mesh.axis_sizes
        # XLA forgets placements of arrays without elements, and those over axes of size 1.
        self._plain_outputs = min(sizes.values()) > 1 and all(
            0 not in shape
            and (layout is None or not (layout.partial or not is_even(shape, layout, sizes)))
            for shape, layout in outputs
        )
        self._expected: list[tuple[Any, ...]] | None = None

    def fitting(self, leaves: Sequence[Any]) -> list[jax.Array] | None:
        """The storages of arguments that are just like those of the last call, else `None`."""
        if self._expected is None or len(leaves) != len(self._expected):
            return None
        out: list[jax.Array] = []
        for leaf, (kind, shape, dtype, where) in zip(leaves, self._expected, strict=True):
            if type(leaf) is not kind or leaf.shape != shape or leaf.dtype != dtype:
                return None
            if kind is DistTensor:
                if leaf.layout != where or leaf.process_mesh != self._mesh:
                    return None
                out.append(leaf.storage)
            else:
                if leaf.sharding is not where and leaf.sharding != where:
                    return None
                out.append(leaf)
        return out

    def placed(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The storages of any arguments of the right shapes: what is not placed gets placed."""
        storages: list[jax.Array] = []
        expected: list[tuple[Any, ...]] = []
        for leaf, struct, layout in zip(leaves, self._structs, self._inputs, strict=True):
            known = placed(leaf)
            if known is None or known.mesh != self._mesh:
                known = placed(place(leaf, struct.dtype, self._mesh, layout))
            assert known is not None, "a placed value is known"
            storages.append(known.storage)
            where = layout if isinstance(leaf, DistTensor) else getattr(leaf, "sharding", None)
            same = isinstance(leaf, DistTensor) or known.storage is leaf
            expected.append((type(leaf) if same else None, struct.shape, struct.dtype, where))
        self._expected = None if any(e[0] is None for e in expected) else expected
        return storages

    def run(self, storages: Sequence[jax.Array]) -> Any:
        """Runs the program and puts its results together."""
        out = self._program(*storages)
        if not self._plain_outputs:
            out = [
                x if layout is None else wrap(x, shape, layout, self._mesh)
                for x, (shape, layout) in zip(out, self._outputs, strict=True)
            ]
        return jax.tree.unflatten(self._tree, out)

    def lowered(self, platforms: Sequence[str] | None = None) -> Any:
        """The lowered program; `platforms` names those to lower for, whatever is there."""
        storages = [
            Struct(
                storage_shape(tuple(s.shape), layout, self._mesh.axis_sizes),
                s.dtype,
                sharding=None if platforms else storage_sharding(layout, self._mesh),
            )
            for s, layout in zip(self._structs, self._inputs, strict=True)
        ]
        if platforms is None:
            return self._program.lower(*storages)  # pyright: ignore[reportFunctionMemberAccess]
        traced = self._program.trace(*storages)  # pyright: ignore[reportFunctionMemberAccess]
        return traced.lower(lowering_platforms=tuple(platforms))


def lower_program(
    fn: Callable[..., Any],
    structs: Sequence[Struct],
    there: Layouts,
    asked: Layouts,
    asked_outputs: Callable[[Any, list[int]], Layouts],
    names: Sequence[str],
    mesh: ProcessMesh,
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
      donated: the positions of leaves whose memory may be reused.
      partitioner: "meshpar" or "xla".
    """

    def annotated(*leaves: jax.Array) -> Any:
        given = zip(leaves, there, asked, strict=True)
        return fn(*(x if not (a and t) or a == t else annotate(x, mesh, a) for x, t, a in given))

    known = [t or a for t, a in zip(there, asked, strict=True)]
    if partitioner == "xla":
        shapes = jax.eval_shape(annotated, *structs)
        flat, tree = jax.tree.flatten(shapes)
        wanted = asked_outputs(shapes, [len(s.shape) for s in flat])
        return _by_xla(annotated, structs, known, flat, tree, wanted, mesh, donated)
    plan, flat, tree = plan_function(annotated, structs, known, asked_outputs, names, mesh, donated)
    planned = plan.planned
    program = jax.jit(shard_mapped(planned, mesh), donate_argnums=donated)
    outputs = [(tuple(s.shape), o) for s, o in zip(flat, planned.outputs, strict=True)]
    return Lowering(program, structs, planned.inputs, outputs, tree, mesh, plan)


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
    known: Layouts,
    results: Sequence[Struct],
    tree: Any,
    wanted: Layouts,
    mesh: ProcessMesh,
    donated: tuple[int, ...],
) -> Lowering:
    sizes = mesh.axis_sizes
    inputs = [k or Layout.replicated(len(s.shape)) for k, s in zip(known, structs, strict=True)]
    pending = [layout for layout in (*inputs, *wanted) if layout is not None and layout.partial]
    if pending:
        raise NotImplementedError(
            f"mp.jit(partitioner='xla') with {pending[0].placements(mesh)}: XLA's partitioner has "
            "no pending reductions; partitioner='meshpar' has"
        )

    def stored(*storages: jax.Array) -> list[jax.Array]:
        values = [
            from_storage(x, tuple(s.shape), layout, sizes)
            for x, s, layout in zip(storages, structs, inputs, strict=True)
        ]
        out = jax.tree.leaves(fn(*values))
        return [
            x if w is None else to_storage(x, w, sizes) for x, w in zip(out, wanted, strict=True)
        ]

    program = jax.jit(
        stored,
        in_shardings=tuple(storage_sharding(layout, mesh) for layout in inputs),
        out_shardings=[None if w is None else storage_sharding(w, mesh) for w in wanted],
        donate_argnums=donated,
    )
    outputs = [(tuple(s.shape), w) for s, w in zip(results, wanted, strict=True)]
    return Lowering(program, structs, inputs, outputs, tree, mesh, None)
