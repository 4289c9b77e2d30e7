"""Paddle's names as front doors: the placements under which an operation runs on blocks.

Paddle's rules answer for one operation at a time: to what placements its inputs have to be brought,
so that every device runs the operation on its own blocks and no device needs to hear of another,
and in what placements the results come. Here the operation is traced, the rules of its primitives
are joined to one (`flows`), and of all ways the one is taken that sends the fewest bytes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.compiler.flows import REPLICATE, Flow, Flows, flows_of
from meshpar.compiler.operations.registry import LocalCall, Operation, infer_reference, named
from meshpar.compiler.program import program_of
from meshpar.mesh import ProcessMesh, get_mesh
from meshpar.placements.blocks import is_even, local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.placements.types import Partial, Placement, ReduceType, Replicate, Shard

__all__ = ["Inferred", "TensorSpec", "infer_backward", "infer_forward"]

Shape = tuple[int, ...]
Nested = Any  # a tensor's entry, or a list of such: an argument of Paddle's may be a list of tensors
Sizes = Mapping[str, int]
Guess = tuple[float, float]  # bytes, elements
Ranked = tuple[Guess, Flow]
_BEAM = 16  # the flows of one axis that are tried
_TRIED = 300  # the combinations of them
SUM, AVG = ReduceType.kRedSum, ReduceType.kRedAvg


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as far as inference sees it.

    Args:
      shape: its global shape.
      layout: where it lies.

    Example:
      >>> TensorSpec((8, 4), Layout((("dp",), ())))
      TensorSpec(shape=(8, 4), layout=Layout(dims=(('dp',), ()), partial=()))
    """

    shape: Shape
    layout: Layout


@dataclass(frozen=True, slots=True)
class Inferred:
    """An answer.

    Args:
      inputs: the layout to which each input has to be brought, in the form in which they were given.
      outputs: the layout in which each result comes; `None` for one that is not there.
      output_shapes: their global shapes.
    """

    inputs: tuple[Nested, ...]
    outputs: tuple[Layout | None, ...]
    output_shapes: tuple[Shape | None, ...]


def infer_forward(
    name: str, specs: Sequence[Nested], *, mesh: ProcessMesh | None = None, **attrs: Any
) -> Inferred:
    """The placements under which an operation runs on blocks, from those of its inputs.

    Of all placements under which no device needs to hear of another while the operation runs, those
    to which the inputs are brought with the fewest bytes per device, the all-reduces that the
    results need later included; among equals those with the smallest blocks.

    Args:
      name: the operation, as Paddle's registry of rules has it, such as `"matmul"`.
      specs: a `TensorSpec` for each tensor, and a list of them for an argument that is a list.
      mesh: the mesh of the layouts; that of `set_mesh` by default.
      **attrs: the operation's attributes, by Paddle's names.

    Returns:
      The layouts of inputs and results.

    Raises:
      NotImplementedError: there is no such operation here.

    Example:
      >>> mesh = ProcessMesh([0, 1], ["tp"])
      >>> x, w = (TensorSpec(s, Layout(d)) for s, d in [((8, 4), ((), ("tp",))), ((4, 6), ((), ()))])
      >>> infer_forward("matmul", [x, w], mesh=mesh).outputs
      (Layout(dims=((), ()), partial=(('tp', ReduceType.kRedSum),)),)

    Follows the SPMD rules of Paddle 3.3.1 (`infer_forward`).
    """
    query = _Query.of(name, specs, mesh, attrs)
    return query.answer(query.first_that_runs(query.forward_candidates()))


def infer_backward(
    name: str,
    specs: Sequence[Nested],
    outputs: Sequence[Nested],
    *,
    mesh: ProcessMesh | None = None,
    **attrs: Any,
) -> Inferred:
    """The placements of an operation's inputs from which its results come where they are wanted.

    Of all placements under which no device needs to hear of another while the operation runs, those
    whose results are brought to the given layouts with the fewest bytes per device; among equals
    those with the smallest blocks of the inputs.

    Args:
      name: the operation, as Paddle's registry of rules has it, such as `"matmul"`.
      specs: a `TensorSpec` for each input; only its shape matters.
      outputs: a `TensorSpec` for each result, or lists of them.
      mesh: the mesh of the layouts; that of `set_mesh` by default.
      **attrs: the operation's attributes, by Paddle's names.

    Returns:
      The layouts of inputs and results; a result that cannot come as wanted comes differently.

    Raises:
      NotImplementedError: there is no such operation here.

    Example:
      >>> mesh = ProcessMesh([0, 1], ["tp"])
      >>> x, y = (TensorSpec((8, 4), Layout(((), cut))) for cut in [(), ("tp",)])
      >>> infer_backward("relu", [x], [y], mesh=mesh).inputs
      (Layout(dims=((), ('tp',)), partial=()),)

    Follows the SPMD rules of Paddle 3.3.1 (`infer_backward`).
    """
    if infer_reference(name).templates:
        specs = [*specs, _flat(list(outputs))]
    query = _Query.of(name, specs, mesh, attrs)
    return query.answer(query.first_that_runs(query.backward_candidates(_flat(list(outputs)))))


@dataclass(frozen=True, slots=True)
class _Traced:
    """An operation for given shapes and attributes, as its flows."""

    flows: Flows
    averages: bool
    call: _Call
    present: tuple[int, ...]  # the flat positions of the inputs that are there
    shapes: tuple[Shape, ...]  # of those
    outputs: tuple[Shape | None, ...]
    dtypes: tuple[Any, ...]

    @property
    def operation(self) -> Operation:
        return self.call.operation


@dataclass(frozen=True, slots=True)
class _Candidate:
    key: tuple[Any, ...]  # compared with those of other candidates
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Query:
    traced: _Traced
    specs: tuple[Nested, ...]
    given: tuple[Layout, ...]  # of the inputs that are there
    sizes: Sizes

    @staticmethod
    def of(
        name: str, specs: Sequence[Nested], mesh: ProcessMesh | None, attrs: Mapping[str, Any]
    ) -> _Query:
        where = mesh or get_mesh()
        if where is None:
            raise ValueError(
                f"infer_forward({name!r}): no mesh; pass mesh=ProcessMesh(...) or call set_mesh(...)"
            )
        shapes = json.dumps(_mapped(lambda spec: list(spec.shape), list(specs)))
        traced = _traced(name.removeprefix("pd_op."), shapes, json.dumps(dict(attrs)))
        flat = _flat(list(specs))
        given = tuple(flat[i].layout for i in traced.present)
        if traced.operation.shape_only:
            given = tuple(layout.without_partial() for layout in given)
        return _Query(traced, tuple(specs), given, dict(where.axis_sizes))

    def answer(self, best: _Candidate) -> Inferred:
        """A candidate in the form of the question."""
        found = dict(zip(self.traced.present, best.inputs, strict=True))
        if self.traced.operation.shape_only:
            found = {i: _still_pending(self.specs[i].layout, x) for i, x in found.items()}
        count = itertools.count()
        tensors = list(self.specs[: len(self.specs) - self.traced.operation.templates])
        inputs = _mapped(
            lambda spec: found.get(next(count), spec.layout.without_partial()), tensors
        )
        made = iter(best.outputs)
        outputs = tuple(None if shape is None else next(made) for shape in self.traced.outputs)
        return Inferred(tuple(inputs), outputs, self.traced.outputs)

    def first_that_runs(self, candidates: Iterable[_Candidate]) -> _Candidate:
        """The best candidate on whose blocks the operation can be called, and gives blocks."""
        for candidate in sorted(candidates, key=lambda c: c.key):
            if self._runs(candidate):
                return candidate
        raise AssertionError("the operation runs on whole tensors")

    def _runs(self, candidate: _Candidate) -> bool:
        if not any(any(layout.dims) for layout in candidate.inputs):
            return True
        blocks, made = (
            tuple(local_shape(s, layout, self.sizes) for s, layout in zip(shapes, layouts, strict=True))
            for shapes, layouts in (
                (self.traced.shapes, candidate.inputs),
                (self._output_shapes, candidate.outputs),
            )
        )
        key = (id(self.traced), blocks, made)
        return _runs_on(_Blocks(key, self.traced, blocks, made))

    # --- forward ----------------------------------------------------------------------------------

    def forward_candidates(self) -> Iterator[_Candidate]:
        """Every way that the given placements suggest, with its cost."""
        used = {axis for layout in self.given for axis in (*layout.shard_axes, *layout.partial_axes)}
        axes = [axis for axis in self.sizes if axis in used and self.sizes[axis] > 1]
        ways = [
            self._ranked(
                [flow for flow in self._flows() if self._suggested(axis, flow)],
                lambda flow, axis=axis: self._forward_guess(axis, flow),
            )
            for axis in axes
        ]
        for number, choice in enumerate(_likeliest(ways)):
            joined = self._joined(dict(zip(axes, choice, strict=True)), self.given)
            if joined is None:
                continue
            inputs, outputs = joined
            moved = sum(
                reshard_bytes(src, dst, shape, self.sizes)
                for src, dst, shape in zip(self.given, inputs, self.traced.shapes, strict=True)
            )
            later = sum(
                _all_reduce_bytes(layout, shape, self.sizes)
                for layout, shape in zip(outputs, self._output_shapes, strict=True)
            )
            blocks = self._elements(inputs, self.traced.shapes)
            made = self._elements(outputs, self._output_shapes)
            changed = tuple(src != dst for src, dst in zip(self.given, inputs, strict=True))
            key = (round(moved + later, 3), sum(changed), blocks + made, changed, number)
            yield _Candidate(key, inputs, outputs)

    def _suggested(self, axis: str, flow: Flow) -> bool:
        """Whether an axis goes on cutting some tensor that it cuts, or does nothing at all."""
        if flow.is_replicated:
            return True
        kept = False
        for layout, placement in zip(self.given, flow.inputs, strict=True):
            if placement is None or placement == REPLICATE:
                continue
            there = placement_on(layout, axis)
            if isinstance(placement, Partial) and there not in (REPLICATE, placement):
                return False
            kept = kept or there != REPLICATE
        return kept

    def _forward_guess(self, axis: str, flow: Flow) -> Guess:
        """Bytes and elements if there were no other axis."""
        n, moved, elements = self.sizes[axis], 0.0, 0.0
        for layout, there, shape in zip(self.given, flow.inputs, self.traced.shapes, strict=True):
            size = math.prod(shape)
            if there is not None:
                moved += size * _moved_share(placement_on(layout, axis), there, n)
                elements += size / n if isinstance(there, Shard) else size
        for there, shape in zip(self._present_outputs(flow), self._output_shapes, strict=True):
            size = math.prod(shape)
            moved += size * _moved_share(there, REPLICATE, n) if isinstance(there, Partial) else 0
            elements += size / n if isinstance(there, Shard) else size
        return moved, elements

    # --- backward ---------------------------------------------------------------------------------

    def backward_candidates(self, outputs: Sequence[TensorSpec]) -> Iterator[_Candidate]:
        """Every way that the wanted placements suggest, with its cost."""
        wanted = self._wanted_layouts(outputs)
        used = {a for x in wanted if x for a in (*x.shard_axes, *x.partial_axes)}
        axes = _nested([a for a in self.sizes if a in used and self.sizes[a] > 1], wanted)
        ways = [
            self._ranked(
                [flow for flow in self._flows() if self._wanted(axis, flow, wanted)],
                lambda flow, axis=axis: self._backward_guess(axis, flow, wanted),
            )
            for axis in axes
        ]
        plain = [Layout.replicated(len(shape)) for shape in self.traced.shapes]
        for number, choice in enumerate(_likeliest(ways)):
            joined = self._joined(dict(zip(axes, choice, strict=True)), plain)
            if joined is None:
                continue
            inputs, made = joined
            moved = sum(
                reshard_bytes(src, dst, shape, self.sizes)
                for src, dst, shape in zip(made, wanted, self._output_shapes, strict=True)
                if dst is not None
            )
            blocks = self._elements(inputs, self.traced.shapes)
            pending = sum(len(layout.partial) for layout in inputs)
            far = sum(src != dst for src, dst in zip(made, wanted, strict=True))
            yield _Candidate((round(moved, 3), blocks, pending, far, number), inputs, made)

    def _wanted_layouts(self, outputs: Sequence[TensorSpec]) -> list[Layout | None]:
        """What is wanted of each result that is there; `None` where nothing is said of it."""
        said = list(outputs) + [None] * len(self.traced.outputs)
        return [
            spec.layout if spec is not None and spec.layout.ndim == len(shape) else None
            for spec, shape in zip(said, self.traced.outputs, strict=False)
            if shape is not None
        ]

    def _wanted(self, axis: str, flow: Flow, wanted: Sequence[Layout | None]) -> bool:
        """Whether an axis does in some result what is wanted, or nothing at all."""
        if flow.is_replicated:
            return True
        return any(
            placement != REPLICATE and layout and placement == placement_on(layout, axis)
            for layout, placement in zip(wanted, self._present_outputs(flow), strict=True)
        )

    def _backward_guess(
        self, axis: str, flow: Flow, wanted: Sequence[Layout | None]
    ) -> Guess:
        """Bytes and elements if there were no other axis."""
        n = self.sizes[axis]
        outputs = zip(self._present_outputs(flow), wanted, self._output_shapes, strict=True)
        moved = sum(
            math.prod(shape) * _moved_share(there, placement_on(layout, axis), n)
            for there, layout, shape in outputs
            if layout is not None
        )
        inputs = zip(flow.inputs, self.traced.shapes, strict=True)
        elements = sum(math.prod(s) / (n if isinstance(p, Shard) else 1) for p, s in inputs)
        return moved, elements

    # --- both -------------------------------------------------------------------------------------

    @property
    def _output_shapes(self) -> list[Shape]:
        return [shape for shape in self.traced.outputs if shape is not None]

    def _flows(self) -> Iterator[Flow]:
        """The flows on which a device need not know where its block begins, or may.

        With all inputs whole each device would do the same: then no result can be cut.
        """
        for flow in self.traced.flows.flows:
            if flow.located and not self.traced.operation.located:
                continue
            if flow.is_replicated and any(p != REPLICATE for p in flow.outputs):
                continue
            yield flow

    def _ranked(self, flows: list[Flow], guess: Callable[[Flow], Guess]) -> list[Ranked]:
        """The likeliest flows of one axis with their guesses; to do nothing is always among them."""
        ranked = sorted(((guess(flow), i, flow) for i, flow in enumerate(flows)))
        first, rest = ranked[:_BEAM], ranked[_BEAM:]
        return [(g, flow) for g, _, flow in (*first, *(r for r in rest if r[2].is_replicated))]

    def _present_outputs(self, flow: Flow) -> list[Placement]:
        """The placements of the results that are there."""
        return list(self._renamed(flow).outputs)

    def _renamed(self, flow: Flow) -> Flow:
        """Of an operation that divides by the number of its elements, sums are averages."""
        if not _averages(self.traced, flow):
            return flow
        outputs = tuple(Partial(AVG) if p == Partial(SUM) else p for p in flow.outputs)
        return Flow(flow.inputs, outputs, flow.cuts, flow.located)

    def _joined(
        self, chosen: Mapping[str, Flow], given: Sequence[Layout]
    ) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
        joined = self.traced.flows.joined(chosen, given, self.sizes)
        averaged = [a for a, flow in chosen.items() if _averages(self.traced, flow)]
        if joined is None or not averaged:
            return joined
        inputs, outputs = joined
        if not all(map(is_even, self.traced.shapes, inputs, itertools.repeat(self.sizes))):
            return None  # blocks of different sizes weigh differently in an average
        return inputs, tuple(_averaged(layout, averaged) for layout in outputs)

    def _elements(self, layouts: Sequence[Layout], shapes: Sequence[Shape]) -> int:
        return sum(
            math.prod(local_shape(shape, layout, self.sizes))
            for layout, shape in zip(layouts, shapes, strict=True)
        )


def _still_pending(given: Layout, answered: Layout) -> Layout:
    """An answer with the reductions that were pending, over axes that it does not use."""
    kept = tuple(p for p in given.partial if p[0] not in answered.shard_axes)
    return Layout(answered.dims, kept)


def _averages(traced: _Traced, flow: Flow) -> bool:
    """Whether sums that are pending in a flow come from elements being counted block by block."""
    pending_before = any(isinstance(p, Partial) for p in flow.inputs)
    return traced.averages and not pending_before and Partial(SUM) in flow.outputs


def _averaged(layout: Layout, axes: Sequence[str]) -> Layout:
    pending = tuple(
        (axis, AVG if axis in axes and kind is SUM else kind) for axis, kind in layout.partial
    )
    return Layout(layout.dims, pending)


def _likeliest(ways: Sequence[list[Ranked]]) -> Iterator[tuple[Flow, ...]]:
    """One flow per axis, by the sum of the guesses; so many, and doing nothing at last."""
    combined = [
        (sum(g[0] for g, _ in choice), sum(g[1] for g, _ in choice), number, choice)
        for number, choice in enumerate(itertools.product(*ways))
    ]
    combined.sort(key=lambda c: c[:3])
    nothing = tuple(next(flow for _, flow in way if flow.is_replicated) for way in ways)
    for *_, choice in combined[:_TRIED]:
        yield tuple(flow for _, flow in choice)
    if len(combined) > _TRIED:
        yield nothing


def _moved_share(src: Placement, dst: Placement, n: int) -> float:
    """The bytes of a change on one axis, per byte of the whole tensor."""
    if src == dst or isinstance(src, Replicate):
        return 0.0
    if isinstance(src, Shard):
        return (n - 1) / n if not isinstance(dst, Shard) else (n - 1) / n / n
    return (n - 1) / n * (1 if isinstance(dst, Shard) else 2)


def _nested(axes: list[str], layouts: Sequence[Layout | None]) -> list[str]:
    """Axes in an order in which those on one dim of a layout come from the outside in."""
    for layout in layouts:
        for on in layout.dims if layout is not None else ():
            places = iter(sorted(axes.index(a) for a in on if a in axes))
            for axis, place in zip([a for a in on if a in axes], list(places), strict=True):
                axes = [*axes[:place], axis, *axes[place + 1 :]]
    return axes


def placement_on(layout: Layout, axis: str) -> Placement:
    """The placement of a layout on one axis."""
    dim, kind = layout.dim_of(axis), layout.kind_of(axis)
    return Shard(dim) if dim is not None else Partial(kind) if kind is not None else Replicate()


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation with its attributes, as a function of the tensors that are there.

    Args:
      operation: the operation.
      arguments: for each argument the number of its tensor, or a list of such; `None` if absent.
      templates: the shapes of the results, if the operation takes them.
      attrs: its attributes.
    """

    operation: Operation
    arguments: list[Nested]
    templates: list[list[Shape]]
    attrs: dict[str, Any]

    def __call__(self, *xs: jax.Array) -> list[jax.Array | None]:
        picked = _mapped(lambda i: None if i is None else xs[i], self.arguments)
        out = self.operation.form(*picked, *self.templates, **self.attrs)
        leaves = _flat(out if isinstance(out, (list, tuple)) else [out])
        # A result that is an argument is an operation too: it may be had in any placement.
        return [jnp.copy(x) if any(x is y for y in xs) else x for x in leaves]

    def traced(self, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, list[Shape | None]]:
        """The jaxpr of the results that are there, and the shapes of all."""
        found: list[Shape | None] = []

        def present(*xs: jax.Array) -> list[jax.Array]:
            out = self(*xs)
            found.extend(None if x is None else tuple(x.shape) for x in out)
            return [x for x in out if x is not None]

        with jax.numpy_rank_promotion("allow"):
            jaxpr = jax.make_jaxpr(present)(*avals)
        return jaxpr, found


@lru_cache(maxsize=4096)
def _traced(name: str, shapes: str, attrs: str) -> _Traced:
    """An operation traced for shapes and attributes, both as JSON."""
    operation = infer_reference(name)
    arguments: list[Nested] = []
    present: list[int] = []
    avals: list[jax.ShapeDtypeStruct] = []
    count = itertools.count()
    trees = _shape_tree(json.loads(shapes))
    templates = trees[-1:] if operation.templates else []
    for position, argument in enumerate(trees[: len(trees) - len(templates)]):
        dtype = _KINDS[operation.kind(position)]

        def place(shape: Shape, position: int = position, dtype: Any = dtype) -> int | None:
            number = next(count)
            if position in operation.optional and shape in ((), (0,)):
                return None
            present.append(number)
            avals.append(jax.ShapeDtypeStruct(shape, dtype))
            return len(avals) - 1

        arguments.append(_mapped(place, argument))
    call = _Call(operation, arguments, templates, named(json.loads(attrs)))
    jaxpr, outputs = call.traced(avals)
    averages = operation.mean is not None and operation.mean(call.attrs)
    return _Traced(
        flows_of(program_of(jaxpr)),
        averages,
        call,
        tuple(present),
        tuple(tuple(aval.shape) for aval in avals),
        tuple(outputs),
        tuple(aval.dtype for aval in avals),
    )


_KINDS: dict[str, Any] = {"f": np.float32, "i": np.int32, "b": np.bool_}


def _shape_tree(tree: list[Any]) -> list[Nested]:
    """Shapes as tuples; a list of lists is an argument of several tensors."""
    return [
        [tuple(shape) for shape in entry]
        if entry and isinstance(entry[0], list)
        else tuple(entry)
        for entry in tree
    ]


def _mapped(fn: Any, tree: Nested) -> Nested:
    return [_mapped(fn, x) for x in tree] if isinstance(tree, list) else fn(tree)


def _flat(tree: Nested) -> list[Any]:
    return [y for x in tree for y in _flat(x)] if isinstance(tree, (list, tuple)) else [tree]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """An operation on blocks of given shapes."""

    key: Hashable
    traced: _Traced = field(compare=False)
    inputs: tuple[Shape, ...] = field(compare=False)
    outputs: tuple[Shape, ...] = field(compare=False)


@lru_cache(maxsize=65536)
def _runs_on(blocks: _Blocks) -> bool:
    """Whether the operation takes blocks of these shapes, and gives such."""
    traced, operation = blocks.traced, blocks.traced.operation
    attrs = traced.call.attrs
    if operation.local is not None:
        starts = tuple((0,) * len(shape) for shape in blocks.inputs)
        positions = dict(zip(traced.present, range(len(traced.present)), strict=True))
        wide = [positions.get(i) for i in range(max(traced.present, default=-1) + 1)]
        listed = [
            tuple(() if i is None else shapes[i] for i in wide)
            for shapes in (traced.shapes, blocks.inputs, starts)
        ]
        attrs = operation.local(attrs, LocalCall(listed[0], listed[1], blocks.outputs, listed[2]))
    templates = [list(blocks.outputs)] if traced.call.templates else []
    call = _Call(operation, traced.call.arguments, templates, attrs)
    avals = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(blocks.inputs, traced.dtypes, strict=True)
    ]
    try:
        _, shapes = call.traced(avals)
    except (TypeError, ValueError, IndexError, ZeroDivisionError):
        return False
    return tuple(shape for shape in shapes if shape is not None) == blocks.outputs


@lru_cache(maxsize=65536)
def _bytes(src: Layout, dst: Layout, shape: Shape, sizes: tuple[tuple[str, int], ...]) -> float:
    steps = planned_steps(_summed(src), _summed(dst), shape, np.float32, dict(sizes))
    return sum(step.bytes for step in steps)


def _summed(layout: Layout) -> Layout:
    """Every pending reduction as a sum: they all cost the same."""
    return Layout(layout.dims, tuple((axis, SUM) for axis, _ in layout.partial))


def reshard_bytes(src: Layout, dst: Layout, shape: Shape, sizes: Sizes) -> float:
    """The bytes per device of a reshard of float32; see `mp.reshard`."""
    return 0.0 if src == dst else _bytes(src, dst, shape, tuple(sizes.items()))


def _all_reduce_bytes(layout: Layout, shape: Shape, sizes: Sizes) -> float:
    block = 4 * math.prod(local_shape(shape, layout, sizes))
    return sum(2 * block * (sizes[axis] - 1) / sizes[axis] for axis in layout.partial_axes)
