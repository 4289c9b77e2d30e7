"""A traced model in pieces: what comes before its layers, one layer, what comes after them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from meshpar.compiler.program import Constant, Node, Program, Ref
from meshpar.schedules.executors.evaluate import depending_on, values_of
from meshpar.schedules.executors.layers import LayerError, Layers
from meshpar.schedules.executors.split import split

__all__ = ["CutModel", "Piece", "check_state", "cut_model"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model as a program: (parameters, given values) -> outputs.

    Args:
      program: the program.
      params: the parameters that it takes, as inputs of the whole.
      given: what else it takes, as values of the whole.
    """

    program: Program
    params: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CutModel:
    """A model, cut.

    Args:
      whole: the traced program.
      layers: its equal layers.
      before: makes the first layer's input.
      after: (parameters, given values, last layer's output) -> results.
      outside: makes from the inputs of the whole what does not depend on activations: the outputs
        after the results, then `outside_values`.
      outside_values: the values that pieces are given and that are no inputs.
      batched: the values with a first dim of the batch.
    """

    whole: Program
    layers: Layers
    before: Piece
    after: Piece
    outside: Program
    outside_values: tuple[int, ...]
    batched: frozenset[int]


def cut_model(
    program: Program,
    params: Collection[int],
    batch: Collection[int],
    layers: Layers,
    *,
    results: int,
) -> CutModel:
    """Cuts a traced model.

    Args:
      program: (parameters, other state, batch) -> (results, other state).
      params: its inputs that are trained.
      batch: its inputs that are the batch.
      layers: its layers.
      results: how many of its outputs are results; see `check_state` for the others.

    Raises:
      LayerError: what comes after the layers uses more than their output, or layers take what
        others make from parameters.
    """
    sizes = {program.avals[v].shape[0] for v in batch if program.avals[v].ndim}
    of_batch = depending_on(program, batch)
    of_params = depending_on(program, params)
    batched = {
        v
        for v in of_batch
        if program.avals[v].ndim and program.avals[v].shape[0] in sizes and len(sizes) == 1
    }
    # What the batch alone decides and has no rows of its own, such as a count, is computed whole.
    counted = {v for v in of_batch - of_params if v not in batched}
    before = _piece(program, (layers.x,), counted, params, None)
    after = _piece(program, program.outputs[:results], counted, params, layers)
    given = dict.fromkeys((*before.given, *after.given, *layers.shared))
    given |= dict.fromkeys(value for row in layers.own for value in row)
    inputs = set(program.inputs)
    values = tuple(v for v in given if v not in inputs and v != layers.out)
    wrong = [v for v in values if v in of_params]
    if wrong:
        raise LayerError(
            "layers take a value that other operations make from parameters.",
            value=program.avals[wrong[0]],
            because="its gradient would go through several stages",
            instead="compute it inside the layers",
        )
    rest = program.outputs[results:]
    asked = replace(program, outputs=(*rest, *values))
    outside = split(asked, range(len(asked.outputs)), ()).first
    return CutModel(program, layers, before, after, outside, values, frozenset(batched))


def _piece(
    program: Program,
    outputs: Sequence[Ref],
    stops: set[int],
    params: Collection[int],
    layers: Layers | None,
) -> Piece:
    """What makes some values from the inputs, from `stops` and from the last layer's output."""
    stops = {*program.inputs, *stops, *([] if layers is None else [layers.out])}
    needed, nodes = values_of(outputs) - stops, list[Node]()
    taken = values_of(outputs) & stops
    for position in reversed(range(len(program.nodes))):
        node = program.nodes[position]
        if needed.isdisjoint(node.outs):
            continue
        if layers is not None and position <= layers.last and layers.x in values_of(node.ins):
            raise LayerError(
                "what comes after the layers takes the first layer's input too.",
                because="it lies on another rank by then",
                instead="add it inside the layers, or leave the last operations to the loss",
            )
        nodes.append(node)
        ins = values_of(node.ins)
        needed |= ins - stops
        taken |= ins & stops
    own = tuple(v for v in program.inputs if v in taken and v in params)
    out = () if layers is None else (layers.out,)
    given = tuple(sorted(v for v in taken if v not in own and v not in out))
    inputs = (*own, *given, *out)
    piece = Program(program.avals, inputs, program.constants, nodes[::-1], tuple(outputs))
    return Piece(piece, own, given)


def check_state(
    program: Program, params: Collection[int], batch: Collection[int], results: int
) -> None:
    """Refuses a model whose other state depends on activations; arguments as of `cut_model`.

    Raises:
      NotImplementedError: it does.
    """
    active = depending_on(program, params) & depending_on(program, batch)
    for ref in program.outputs[results:]:
        if not isinstance(ref, Constant) and ref in active:
            raise NotImplementedError(
                "Strategy.pipeline: state that a training step computes from activations, such as "
                "running statistics, is not there yet: microbatches would each change it"
            )
