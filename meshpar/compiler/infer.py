"""Paddle's names as front doors: the placements under which an operation runs on blocks.

Paddle's rules answer for one operation at a time: to what placements its inputs have to be brought,
so that every device runs the operation on its own blocks and no device needs to hear of another,
and in what placements the results come. Here the operation is traced, the rules of its primitives
are joined to one (`flows`), and of all ways the one is taken that sends the fewest bytes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.compiler.candidates import (
    Candidate,
    Ways,
    backward_candidates,
    best_of,
    forward_candidates,
)
from meshpar.compiler.operations.registry import infer_reference
from meshpar.compiler.traced_operation import (
    Nested,
    TracedOperation,
    flat,
    mapped,
    traced_operation,
)
from meshpar.errors import PlacementError
from meshpar.mesh import ProcessMesh, get_mesh
from meshpar.placements.layout import Layout

__all__ = ["Inferred", "TensorSpec", "infer_backward", "infer_forward"]

Shape = tuple[int, ...]


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
      inputs: the layout to which each input has to be brought, nested as the inputs were.
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
    results need later included; among equals those that change the fewest inputs, then those with
    the smallest blocks.

    Args:
      name: the operation, as Paddle's registry of rules has it, such as `"matmul"`.
      specs: a `TensorSpec` for each tensor, and a list of them for an argument that is a list; an
        optional tensor that is absent has shape `(0,)` or `()`.
      mesh: the mesh of the layouts; that of `set_mesh` by default.
      **attrs: the operation's attributes, by Paddle's names.

    Returns:
      The layouts of inputs and results.

    Raises:
      NotImplementedError: there is no such operation here.
      ValueError: no mesh, or the operation does not take such inputs and attributes.
      PlacementError: a layout does not fit its shape or the mesh.

    Example:
      >>> mesh = ProcessMesh([0, 1], ["tp"])
      >>> x = TensorSpec((8, 64), Layout(((), ("tp",))))
      >>> w = TensorSpec((64, 6), Layout(((), ())))
      >>> infer_forward("matmul", [x, w], mesh=mesh).outputs
      (Layout(dims=((), ()), partial=(('tp', ReduceType.kRedSum),)),)

    Follows the SPMD rules of Paddle 3.3.1 (`infer_forward`).
    """
    ways = _ways("infer_forward", name, specs, mesh, attrs)
    tensors = flat(list(specs))
    given = tuple(tensors[i].layout for i in ways.traced.present)
    if ways.traced.operation.shape_only:
        given = tuple(layout.without_partial() for layout in given)
    return _answer(ways.traced, specs, best_of(ways, forward_candidates(ways, given)))


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
      ValueError: no mesh, or the operation does not take such inputs and attributes.
      PlacementError: a layout does not fit its shape or the mesh.

    Example:
      >>> mesh = ProcessMesh([0, 1], ["tp"])
      >>> x, y = (TensorSpec((8, 4), Layout(((), cut))) for cut in [(), ("tp",)])
      >>> infer_backward("relu", [x], [y], mesh=mesh).inputs
      (Layout(dims=((), ('tp',)), partial=()),)

    Follows the SPMD rules of Paddle 3.3.1 (`infer_backward`).
    """
    results = flat(list(outputs))
    if infer_reference(name).templates:
        specs = [*specs, results]
    ways = _ways("infer_backward", name, specs, mesh, attrs)
    wanted = list(_wanted(ways.traced, results))
    return _answer(ways.traced, specs, best_of(ways, backward_candidates(ways, wanted)))


def _ways(
    call: str, name: str, specs: Sequence[Nested], mesh: ProcessMesh | None, attrs: dict[str, Any]
) -> Ways:
    where = mesh or get_mesh()
    if where is None:
        raise ValueError(
            f"{call}({name!r}): layouts name the axes of a mesh, and there is none; pass "
            "mesh=ProcessMesh(...), or call set_mesh(...) before"
        )
    for position, spec in enumerate(flat(list(specs))):
        spec.layout.check_axes(where)
        if spec.layout.ndim != len(spec.shape):
            raise PlacementError(
                f"{call}({name!r}): tensor {position} has {len(spec.shape)} dims, its layout "
                f"{spec.layout.ndim}.",
                layout=spec.layout,
                because=f"its shape is {spec.shape}, and each dim has its tuple of mesh axes",
            )
    shapes = json.dumps(mapped(lambda spec: list(spec.shape), list(specs)))
    traced = traced_operation(name.removeprefix("pd_op."), shapes, json.dumps(attrs))
    return Ways(traced, dict(where.axis_sizes))


def _wanted(traced: TracedOperation, results: Sequence[TensorSpec]) -> Iterator[Layout | None]:
    """What is wanted of each result that is there; `None` where nothing is said of it."""
    said = itertools.chain(results, itertools.repeat(None))
    for spec, shape in zip(said, traced.outputs, strict=False):
        if shape is not None:
            fits = spec is not None and spec.layout.ndim == len(shape)
            yield spec.layout if spec is not None and fits else None


def _answer(traced: TracedOperation, specs: Sequence[Nested], best: Candidate) -> Inferred:
    """A candidate in the form of the question."""
    found = dict(zip(traced.present, best.inputs, strict=True))
    numbers = itertools.count()

    def answered(spec: TensorSpec) -> Layout:
        layout = found.get(next(numbers))
        if layout is None:
            return spec.layout.without_partial()
        if not traced.operation.shape_only:
            return layout
        kept = tuple(p for p in spec.layout.partial if p[0] not in layout.shard_axes)
        return Layout(layout.dims, kept)

    inputs = mapped(answered, list(specs[: len(specs) - traced.operation.templates]))
    made = iter(best.outputs)
    outputs = tuple(None if shape is None else next(made) for shape in traced.outputs)
    return Inferred(tuple(inputs), outputs, traced.outputs)
