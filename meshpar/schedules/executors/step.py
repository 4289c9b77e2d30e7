"""A model in stages under a schedule, planned: what every executor starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.compiler.device_model import DeviceModel
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.types import ReduceType
from meshpar.schedules.actions import Costs
from meshpar.schedules.executors.in_time import TIME, is_time_first, without_time
from meshpar.schedules.executors.local import LocalProgram, Within
from meshpar.schedules.executors.local_actions import LocalActions, Placed, Stages, local_actions
from meshpar.schedules.executors.slot_table import SlotTable, slot_table
from meshpar.schedules.schedule import Schedule

__all__ = ["Arrays", "Gradients", "PipelineStep", "Result", "below"]


@dataclass(frozen=True, slots=True)
class Arrays:
    """What a step takes, as leaves: whole, or the blocks of a rank's device.

    Args:
      own: the parameters of all stages, of shape (ranks, chunks, ...); a rank's lack the first dim.
      first: the parameters of the first function.
      last: the parameters of the last function.
      microbatches: of shape (microbatches, ...), or a batch of which they are parts; so are
        `targets` and `extras`.
      targets: what the last function takes of a microbatch.
      extras: what every stage takes of a microbatch.
    """

    own: Sequence[Any]
    first: Sequence[Any]
    last: Sequence[Any]
    microbatches: Sequence[Any]
    targets: Sequence[Any]
    extras: Sequence[Any]

    @property
    def groups(self) -> tuple[Sequence[Any], ...]:
        """The leaves of each, in this order."""
        return (self.own, self.first, self.last, self.microbatches, self.targets, self.extras)


@dataclass(frozen=True, slots=True)
class Result:
    """A result of the step: its layout when the loop ends, and the one it is returned in."""

    shape: tuple[int, ...]
    dtype: Any
    made: Layout
    wanted: Layout


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a step returns besides the results, as leaves of the parameters that are trained."""

    own: list[Any]
    first: list[Any]
    last: list[Any]
    microbatches: list[Any]

    @property
    def groups(self) -> tuple[list[Any], ...]:
        """The leaves of each, in this order."""
        return (self.own, self.first, self.last, self.microbatches)


class PipelineStep:
    """A model in stages under a schedule, on a mesh.

    Attributes:
      schedule: the table that is run, without combined cells.
      actions: what a rank does, on its blocks.
      table: the slots that the values take.
      own: the layouts of the parameters of the stages, of shape (ranks, chunks, ...).
      first: those in which the parameters of the first function lie.
      last: those of the last function's.
      batch: those of microbatches, targets and extras, each with all microbatches.
      by_microbatch: the same, with a dim of microbatches first.
      results: the results by name, in the order in which an executor returns them.

    Args:
      stages: the model; its layouts are of the axes within a rank.
      schedule: a valid table.
      mesh: the mesh.
      axis: its axis along which the ranks lie.
      train: whether to run the backward pass; without it the table's forwards are run.
      keep_given: whether the gradients of the microbatches are wanted.
      scale: what a microbatch's result counts in the whole.
      in_parts: whether microbatches are parts of a batch: the model's functions are of the whole
        batch, whose layouts have the axis `TIME`. Else they are of one microbatch.
      stored: the layouts in which the parameters of the first and of the last function lie, where
        they are cut over `axis` too: they are gathered once, before the first tick.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        mesh: ProcessMesh,
        axis: str,
        *,
        train: bool,
        keep_given: bool = False,
        scale: float = 1.0,
        in_parts: bool = False,
        stored: tuple[Sequence[Layout], Sequence[Layout]] | None = None,
    ) -> None:
        self.stages, self.mesh, self.axis = stages, mesh, axis
        self.train, self.keep_given = train, keep_given
        self.sizes = dict(mesh.axis_sizes)
        self.in_parts = in_parts
        inside = {name: size for name, size in self.sizes.items() if name != axis}
        if in_parts:  # where axes meet on a dim, plans put them in this order
            batch = (*stages.microbatch.layouts, *stages.target.layouts, *stages.extras.layouts)
            time = {TIME: schedule.M}
            inside = time | inside if any(map(is_time_first, batch)) else inside | time
        self.model = DeviceModel.of(mesh.jax_mesh.devices.flat[0].platform)
        within = Within(inside, self.model, {axis: self.sizes[axis]})
        self.schedule = schedule.uncombined() if train else schedule.forwards()
        self.actions: LocalActions = local_actions(
            stages, within, train=train, scale=scale, in_parts=in_parts
        )
        self.table: SlotTable = slot_table(self.schedule, self.actions.uses)
        self.first, self.last = stored or (
            stages.first_params.layouts,
            stages.last_params.layouts,
        )
        self.own = [below(y, (axis,), ()) for y in stages.own.layouts]
        self.batch = [
            [self._batch(y) for y in placed.layouts]
            for placed in (stages.microbatch, stages.target, stages.extras)
        ]
        self.by_microbatch = [
            [below(without_time(y), ()) for y in placed.layouts]
            for placed in (stages.microbatch, stages.target, stages.extras)
        ]
        self.results: dict[str, list[Result]] = self._results()

    def sums(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """The blocks in which gradients are summed; those of own parameters lack the ranks' dim.

        Narrow floats are summed in float32: a sum of 8 bits stays where it is from 256 equal terms.
        """
        results = self.results[name]
        blocks = [local_shape(r.shape, r.made, self.sizes) for r in results]
        shapes = [block[1:] if name == "own" else block for block in blocks]
        return [
            jax.ShapeDtypeStruct(s, _sum_dtype(r.dtype))
            for s, r in zip(shapes, results, strict=True)
        ]

    def estimated(self) -> Costs:
        """The seconds of a stage's actions and of a hop, by the model of the device."""
        actions = self.actions
        sent = sum(math.prod(x.shape) * x.dtype.itemsize for x in actions.x)

        def of(program: LocalProgram | None) -> float:
            least = 1e-9  # a stage may do nothing at all
            return float(f"{max(0.0 if program is None else program.seconds, least):.3g}")

        return Costs(
            F=of(actions.forward),
            I=of(actions.for_input),
            W=of(actions.for_weight),
            B=of(actions.full),
            hop=float(f"{self.model.collective_seconds(sent):.3g}"),
        )

    # --- inside -----------------------------------------------------------------------------------

    def _results(self) -> dict[str, list[Result]]:
        """All results, in the order in which they are returned."""
        s, actions, schedule = self.stages, self.actions, self.schedule
        out: dict[str, list[Result]] = {
            "result": [
                self._per_microbatch(leaf, layout)
                for leaf, layout in zip(actions.result.leaves, actions.result.layouts, strict=True)
            ],
            "own": [],
            "first": [],
            "last": [],
            "given": [],
        }
        if not self.train:
            return out
        assert actions.full is not None, "training has a backward pass"
        made = actions.full.outputs[len(actions.x) :]
        for k, layout in zip(s.own.trained, made, strict=True):
            leaf = s.own.leaves[k]
            shape = (schedule.P, schedule.V, *leaf.shape)
            layout = without_time(layout)
            out["own"].append(
                Result(shape, leaf.dtype, below(layout, (self.axis,), ()), self.own[k])
            )
        if actions.first_backward is not None:
            made = actions.first_backward.outputs
            out["first"] = self._of_ends(s.first_params, made, self.first)
        made = actions.last.outputs[len(actions.result.layouts) + len(actions.x) :]
        out["last"] = self._of_ends(s.last_params, made, self.last)
        if self.keep_given:
            out["given"] = [
                self._per_microbatch(leaf, layout)
                for leaf, layout in zip(s.microbatch.leaves, actions.x_layouts, strict=True)
            ]
        return out

    def _of_ends(
        self, params: Placed, made: Sequence[Layout], stored: Sequence[Layout]
    ) -> list[Result]:
        """The gradients of an end's parameters: one rank has them, the others add nothing."""
        return [
            Result(
                tuple(params.leaves[k].shape),
                params.leaves[k].dtype,
                without_time(layout).with_partial(self.axis, ReduceType.kRedSum),
                stored[k],
            )
            for k, layout in zip(params.trained, made, strict=True)
        ]

    def _batch(self, layout: Layout) -> Layout:
        """The layout of an argument that microbatches are taken from."""
        split = self.in_parts and not is_time_first(layout)
        return without_time(layout) if split else below(without_time(layout), ())

    def _per_microbatch(self, leaf: Any, layout: Layout) -> Result:
        if self.in_parts:
            shape, lead = list(leaf.shape), list[tuple[str, ...]]()
            if is_time_first(layout):
                dim = layout.dim_of(TIME)
                assert dim is not None, "a dim is cut into microbatches"
                shape[dim] = -(-shape[dim] // self.schedule.M)
                shape, lead = [self.schedule.M, *shape], [()]
            made = below(without_time(layout), *lead)
            wanted = made.without_partial()
            made = made.with_partial(self.axis, ReduceType.kRedSum)
            return Result(tuple(shape), leaf.dtype, made, wanted)
        made = below(layout, ()).with_partial(self.axis, ReduceType.kRedSum)
        wanted = below(layout.without_partial(), ())
        return Result((self.schedule.M, *leaf.shape), leaf.dtype, made, wanted)


def _sum_dtype(dtype: Any) -> Any:
    floats = jnp.issubdtype(dtype, jnp.floating)
    return jnp.promote_types(dtype, jnp.float32) if floats else dtype


def below(layout: Layout, *dims: tuple[str, ...]) -> Layout:
    """The layout with more dims before the others."""
    return Layout((*dims, *layout.dims), layout.partial)
