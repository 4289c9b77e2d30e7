"""A model that is traced with a whole batch, run as a pipeline of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.compiler.annotations import Surroundings
from meshpar.compiler.program import Program
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout
from meshpar.schedules.executors.cut_model import CutModel, Piece, check_state, cut_model
from meshpar.schedules.executors.evaluate import run_program
from meshpar.schedules.executors.in_time import TIME, is_time_first, merged, stacked, without_time
from meshpar.schedules.executors.layer_order import LayerOrder, even_counts
from meshpar.schedules.executors.layers import LayerError, Layers, find_layers
from meshpar.schedules.executors.local_actions import Placed, Stages
from meshpar.schedules.executors.moved_rows import moves_rows
from meshpar.schedules.executors.step import Arrays, Gradients, PipelineStep
from meshpar.schedules.executors.two_pieces import cut_in_half
from meshpar.schedules.schedule import Schedule

__all__ = ["BatchPipeline", "Groups", "Share"]

Share = Callable[[Program, Sequence[int], Sequence[int]], tuple[Layers, Sequence[int]]]
"""Finds the layers of a program, given the numbers of its trained inputs and of those of the batch,
and says how many each stage has."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The inputs of a model's program, in this order, and where they lie.

    Args:
      params: the layouts of the trained inputs.
      rest: the number of other inputs but the batch.
      batch: the layouts of the batch.
    """

    params: Sequence[Layout]
    rest: int
    batch: Sequence[Layout]


class BatchPipeline:
    """A model under a schedule.

    Args:
      program: (parameters, other state, batch) -> (result, other state).
      groups: its inputs.
      results: the number of outputs that are results; scalars in training, where the gradients are
        of the first.
      schedule: a valid table.
      mesh: the mesh.
      axis: its axis of ranks.
      data_axes: those that cut the batch.
      train: whether gradients are wanted.
      share: finds the layers and shares them out; `None` does so evenly.
      recompute: whether the backward pass runs stages again.
    """

    def __init__(
        self,
        program: Program,
        groups: Groups,
        results: int,
        schedule: Schedule,
        mesh: ProcessMesh,
        axis: str,
        data_axes: Sequence[str],
        *,
        train: bool,
        share: Share | None = None,
        recompute: bool = False,
    ) -> None:
        count = len(groups.params)
        params = program.inputs[:count]
        batch = program.inputs[count + groups.rest :]
        check_state(program, params, batch, results)
        if share is None:
            layers, counts = _found(program, params, batch, schedule.P * schedule.V)
        else:
            layers, counts = share(program, params, batch)
        self.cut: CutModel = cut_model(program, params, batch, layers, results=results)
        self._program, self._axis, self._mesh = program, axis, mesh
        rows = tuple(a for a in data_axes if a in mesh.axis_sizes and a != axis)
        inside = {name: size for name, size in mesh.axis_sizes.items() if name != axis}
        around = Surroundings({axis: mesh.axis_sizes[axis]})
        time_first = moves_rows(program, batch, rows, inside, around)
        self._rows = (TIME, *rows) if time_first else (*rows, TIME)
        self._layouts = dict(zip(params, groups.params, strict=True))
        self._order = LayerOrder.of(counts, schedule)
        stages = self._stages(recompute)
        stored = tuple(
            tuple(self._layouts[v] for v in piece.params)
            for piece in (self.cut.before, self.cut.after)
        )
        self.step = PipelineStep(
            stages,
            schedule,
            mesh,
            axis,
            train=train,
            in_parts=True,
            stored=(stored[0], stored[1]),
        )

    def inputs(self, *leaves: Any) -> tuple[Arrays, list[Any]]:
        """What the step takes, and the other state, from the inputs of the model's program."""
        cut = self.cut
        values = dict(zip(self._program.inputs, leaves, strict=True))
        outside = run_program(cut.outside, *leaves)
        state = outside[: len(outside) - len(cut.outside_values)]
        values |= dict(zip(cut.outside_values, outside[len(state) :], strict=True))
        own = [self._order.stack(rows, values) for rows in self._own_rows()]
        own += [] if self._order.full else [self._order.active]

        def of(numbers: Sequence[int]) -> list[Any]:
            return [values[v] for v in numbers]

        arrays = Arrays(
            own,
            of(cut.before.params),
            of(cut.after.params),
            *([self._given(v, values[v]) for v in numbers] for numbers in self._batches()),
        )
        return arrays, state

    def results(self, made: Sequence[Any]) -> list[Any]:
        """The results, from what the step made of them."""
        placed = self.step.actions.result
        return [
            merged(x, y, leaf.shape[y.dim_of(TIME)]) if is_time_first(y) else x
            for x, y, leaf in zip(made, placed.layouts, placed.leaves, strict=True)
        ]

    @property
    def result_layouts(self) -> list[Layout]:
        """Where results lie on the mesh."""
        return [without_time(y).without_partial() for y in self.step.actions.result.layouts]

    def gradients(self, made: Gradients, params: Sequence[Any]) -> list[Any]:
        """Those of the parameters, from what the step made; zeros where it made none."""
        sums: dict[int, Any] = {}

        def add(value: int, gradient: Any) -> None:
            sums[value] = sums[value] + gradient if value in sums else gradient

        rows = [row for row in self._own_rows() if row[0] in self._layouts]
        for row, gradient in zip(rows, made.own, strict=True):
            for value, part in zip(row, self._order.unstack(gradient, row), strict=True):
                add(value, part)
        for piece, gradients in ((self.cut.before, made.first), (self.cut.after, made.last)):
            for value, gradient in zip(piece.params, gradients, strict=True):
                add(value, gradient)
        pairs = zip(self._layouts, params, strict=True)
        return [sums[v] if v in sums else jnp.zeros_like(x) for v, x in pairs]

    # --- inside -----------------------------------------------------------------------------------

    def _own_rows(self) -> list[tuple[int, ...]]:
        """For each own value of a layer, the values of all layers; or the one that is stacked."""
        return list(zip(*self.cut.layers.own, strict=True))

    def _stages(self, recompute: bool) -> Stages:
        cut, order = self.cut, self._order
        layer = cut.layers.body
        several = order.per_stage > 1

        def stage(own: list[Any], x: list[Any], shared: list[Any]) -> list[Any]:
            def one(x: Any, mine: list[Any]) -> tuple[Any, None]:
                values = mine if order.full else mine[:-1]
                (y,) = run_program(layer, x, *values, *shared)
                return (y if order.full else jnp.where(mine[-1], y, x)), None

            if not several:
                return [one(x[0], [leaf[0] for leaf in own])[0]]
            return [lax.scan(one, x[0], own)[0]]

        def first(params: list[Any], given: list[Any]) -> list[Any]:
            return run_program(cut.before.program, *params, *given)

        def last(params: list[Any], y: list[Any], given: list[Any]) -> Any:
            return run_program(cut.after.program, *params, *given, *y)

        return Stages(
            stage,
            self._own_placed(),
            self._placed(cut.layers.shared),
            first,
            self._ends(cut.before),
            self._placed(cut.before.given),
            last,
            self._ends(cut.after),
            self._placed(cut.after.given),
            recompute,
        )

    def _batches(self) -> tuple[Sequence[int], ...]:
        """What comes of the batch, for the first function, the last one and every stage."""
        return self.cut.before.given, self.cut.after.given, self.cut.layers.shared

    def _given(self, value: int, x: Any) -> Any:
        """A value of the batch, or what all microbatches share, as the step takes it."""
        (layout,) = self._placed([value]).layouts
        if not is_time_first(layout):
            return x
        return stacked(x, self.step.schedule.M)

    def _own_placed(self) -> Placed:
        structs, layouts = [], []
        for row in self._own_rows():
            aval = self._program.avals[row[0]]
            lead = 1 if self.cut.layers.stacked else 0
            structs.append(
                jax.ShapeDtypeStruct((self._order.per_stage, *aval.shape[lead:]), aval.dtype)
            )
            known = self._layouts.get(row[0], Layout.replicated(aval.ndim))
            layouts.append(_without(Layout(((), *known.dims[lead:])), self._axis))
        if not self._order.full:
            structs.append(jax.ShapeDtypeStruct((self._order.per_stage,), jnp.bool_))
            layouts.append(Layout(((),)))
        return Placed(structs, tuple(layouts))

    def _ends(self, piece: Piece) -> Placed:
        layouts = (_without(self._layouts[v], self._axis) for v in piece.params)
        return Placed([self._struct(v) for v in piece.params], tuple(layouts))

    def _placed(self, values: Sequence[int]) -> Placed:
        """Rows of the batch are cut by microbatches, within the axes that cut it anyway."""
        layouts = []
        for value in values:
            layout = Layout.replicated(self._program.avals[value].ndim)
            if value in self.cut.batched:
                layout = layout.with_dim(0, self._rows)
            layouts.append(layout)
        return Placed([self._struct(v) for v in values], tuple(layouts))

    def _struct(self, value: int) -> jax.ShapeDtypeStruct:
        aval = self._program.avals[value]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _found(
    program: Program, params: Sequence[int], batch: Sequence[int], stages: int
) -> tuple[Layers, Sequence[int]]:
    """Equal layers, shared out evenly; two stages without them are two halves."""
    try:
        layers = find_layers(program, params, batch, stages)
    except LayerError:
        halves = cut_in_half(program, params, batch) if stages == 2 else None
        if halves is None:
            raise
        return halves, (0, 0)
    return layers, even_counts(layers.count, stages)


def _without(layout: Layout, axis: str) -> Layout:
    return Layout(tuple(tuple(a for a in dim if a != axis) for dim in layout.dims))
