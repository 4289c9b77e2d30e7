"""The `program` executor: one program, the same on every device, that runs any table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshpar.compiler.device_model import DeviceModel
from meshpar.mesh import ProcessMesh
from meshpar.placements.apply_steps import apply_steps
from meshpar.placements.blocks import local_shape, storage_spec
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.placements.types import ReduceType
from meshpar.schedules.executors.in_time import TIME, by_microbatch, whole, without_time
from meshpar.schedules.executors.local import Within
from meshpar.schedules.executors.local_actions import LocalActions, Placed, Stages, local_actions
from meshpar.schedules.executors.slot_table import SlotTable, slot_table
from meshpar.schedules.executors.tick_loop import Inputs, TickLoop
from meshpar.schedules.schedule import Schedule

__all__ = ["Arrays", "Gradients", "PipelineProgram"]


@dataclass(frozen=True, slots=True)
class Arrays:
    """What a step takes, as leaves.

    Args:
      own: the parameters of all stages, of shape (ranks, chunks, ...).
      first: the parameters of the first function.
      last: the parameters of the last function.
      microbatches: of shape (microbatches, ...); so are `targets` and `extras`.
      targets: see `microbatches`.
      extras: see `microbatches`.
    """

    own: Sequence[Any]
    first: Sequence[Any]
    last: Sequence[Any]
    microbatches: Sequence[Any]
    targets: Sequence[Any]
    extras: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Result:
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


class PipelineProgram:
    """A model in stages under a schedule, on a mesh.

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
        self._in_parts = in_parts
        inside = {name: size for name, size in self.sizes.items() if name != axis}
        inside |= {TIME: schedule.M} if in_parts else {}
        within = Within(inside, DeviceModel.of(mesh.jax_mesh.devices.flat[0].platform))
        self.schedule = schedule.uncombined() if train else schedule.forwards()
        self.actions: LocalActions = local_actions(
            stages, within, train=train, scale=scale, in_parts=in_parts
        )
        self.table: SlotTable = slot_table(self.schedule, self.actions.uses)
        self._first, self._last = stored or (
            stages.first_params.layouts,
            stages.last_params.layouts,
        )
        self._own = [_below(y, (axis,), ()) for y in stages.own.layouts]

    def __call__(self, arrays: Arrays) -> tuple[list[Any], Gradients]:
        """One step: the result of each microbatch, stacked, and the gradients.

        Traceable; call it inside `jax.jit`.
        """
        s = self.stages
        layouts = [
            self._own,
            self._first,
            self._last,
            *([self._batch(y) for y in p.layouts] for p in (s.microbatch, s.target, s.extras)),
        ]
        leaves = (
            arrays.own,
            arrays.first,
            arrays.last,
            arrays.microbatches,
            arrays.targets,
            arrays.extras,
        )
        run = jax.shard_map(
            self._local,
            mesh=self.mesh.jax_mesh,
            in_specs=(P(self.axis), *([self._spec(y) for y in group] for group in layouts)),
            out_specs=[[self._spec(r.wanted) for r in group] for group in self._results().values()],
            check_vma=False,
        )
        results, *gradients = run(jnp.asarray(self.table.rows), *map(list, leaves))
        return results, Gradients(*gradients)

    # --- inside -----------------------------------------------------------------------------------

    def _spec(self, layout: Layout) -> P:
        return storage_spec(layout, self.sizes)

    def _local(self, rows: Any, *groups: Sequence[Any]) -> list[list[Any]]:
        """The step on this device's blocks."""
        own, first, last, *batch = groups
        s = self.stages
        if self._in_parts:
            batch = [
                [
                    by_microbatch(x, y, self.schedule.M)
                    for x, y in zip(leaves, placed.layouts, strict=True)
                ]
                for leaves, placed in zip(batch, (s.microbatch, s.target, s.extras), strict=True)
            ]
        first = self._gathered(first, self.stages.first_params, self._first)
        last = self._gathered(last, self.stages.last_params, self._last)
        schedule, results = self.schedule, self._results()
        loop = TickLoop(
            self.table,
            self.actions,
            schedule.P * schedule.V,
            schedule.P,
            self.axis,
            schedule.M,
            Inputs([x[0] for x in own], first, last, *batch),
            keep_given=self.keep_given,
        )
        sums = {name: self._sums(name, results[name]) for name in ("own", "first", "last")}
        state = loop.run(rows[0], loop.start(sums))
        state["own"] = [x[None] for x in state["own"]]
        if self._in_parts:
            made = self.actions.result.layouts
            state["result"] = [whole(x, y) for x, y in zip(state["result"], made, strict=True)]
        return [
            [
                self._turned(block, r.made, r.wanted, r.shape)
                for block, r in zip(state[name], group, strict=True)
            ]
            for name, group in results.items()
        ]

    def _gathered(
        self, blocks: Sequence[Any], params: Placed, stored: Sequence[Layout]
    ) -> list[Any]:
        leaves = zip(blocks, stored, params.layouts, params.leaves, strict=True)
        return [self._turned(x, src, dst, tuple(leaf.shape)) for x, src, dst, leaf in leaves]

    def _turned(self, block: Any, src: Layout, dst: Layout, shape: tuple[int, ...]) -> Any:
        steps = planned_steps(src, dst, shape, block.dtype, self.sizes)
        return apply_steps(block, steps, shape, self.sizes)

    def _sums(self, name: str, results: Sequence[_Result]) -> list[jax.ShapeDtypeStruct]:
        """The blocks in which gradients are summed; those of own parameters lack the ranks' dim."""
        blocks = [local_shape(r.shape, r.made, self.sizes) for r in results]
        shapes = [block[1:] if name == "own" else block for block in blocks]
        return [jax.ShapeDtypeStruct(s, r.dtype) for s, r in zip(shapes, results, strict=True)]

    def _results(self) -> dict[str, list[_Result]]:
        """All results, in the order in which they are returned."""
        s, actions, schedule = self.stages, self.actions, self.schedule
        out: dict[str, list[_Result]] = {
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
                _Result(shape, leaf.dtype, _below(layout, (self.axis,), ()), self._own[k])
            )
        if actions.first_backward is not None:
            made = actions.first_backward.outputs
            out["first"] = self._of_ends(s.first_params, made, self._first)
        made = actions.last.outputs[len(actions.result.layouts) + len(actions.x) :]
        out["last"] = self._of_ends(s.last_params, made, self._last)
        if self.keep_given:
            out["given"] = [
                self._per_microbatch(leaf, layout)
                for leaf, layout in zip(s.microbatch.leaves, actions.x_layouts, strict=True)
            ]
        return out

    def _of_ends(
        self, params: Placed, made: Sequence[Layout], stored: Sequence[Layout]
    ) -> list[_Result]:
        """The gradients of an end's parameters: one rank has them, the others add nothing."""
        return [
            _Result(
                tuple(params.leaves[k].shape),
                params.leaves[k].dtype,
                without_time(layout).with_partial(self.axis, ReduceType.kRedSum),
                stored[k],
            )
            for k, layout in zip(params.trained, made, strict=True)
        ]

    def _batch(self, layout: Layout) -> Layout:
        """The layout of an argument that microbatches are taken from."""
        return without_time(layout) if self._in_parts else _below(layout, ())

    def _per_microbatch(self, leaf: Any, layout: Layout) -> _Result:
        if self._in_parts:
            made = without_time(layout).with_partial(self.axis, ReduceType.kRedSum)
            wanted = without_time(layout).without_partial()
            return _Result(tuple(leaf.shape), leaf.dtype, made, wanted)
        made = _below(layout, ()).with_partial(self.axis, ReduceType.kRedSum)
        wanted = _below(layout.without_partial(), ())
        return _Result((self.schedule.M, *leaf.shape), leaf.dtype, made, wanted)


def _below(layout: Layout, *dims: tuple[str, ...]) -> Layout:
    """The layout with more dims before the others."""
    return Layout((*dims, *layout.dims), layout.partial)
