"""The `program` executor: one program, the same on every device, that runs any table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshpar.placements.apply_steps import apply_steps
from meshpar.placements.blocks import local_shape, storage_spec
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.placements.storage import from_storage, to_storage
from meshpar.schedules.executors.in_time import by_microbatch, whole
from meshpar.schedules.executors.local_actions import Placed
from meshpar.schedules.executors.step import Arrays, Gradients, PipelineStep
from meshpar.schedules.executors.tick_loop import TickLoop

__all__ = ["PipelineProgram"]


class PipelineProgram:
    """A step as one program over the whole mesh.

    Args:
      step: what is run.
    """

    def __init__(self, step: PipelineStep) -> None:
        self.step = step

    def __call__(self, arrays: Arrays) -> tuple[list[Any], Gradients]:
        """One step: the result of each microbatch, stacked, and the gradients.

        Traceable; call it inside `jax.jit`.
        """
        s = self.step
        run = jax.shard_map(
            self._local,
            mesh=s.mesh.jax_mesh,
            in_specs=(
                P(s.axis),
                *([self._spec(y) for y in group] for group in (s.own, s.first, s.last, *s.batch)),
            ),
            out_specs=[[self._spec(r.wanted) for r in group] for group in s.results.values()],
            check_vma=False,
        )
        own, first, last, *batch = map(list, arrays.groups)
        if s.in_parts:  # a batch of any number of rows
            batch = [
                [to_storage(x, y, s.sizes) for x, y in zip(leaves, layouts, strict=True)]
                for leaves, layouts in zip(batch, s.batch, strict=True)
            ]
        results, *gradients = run(jnp.asarray(s.table.rows), own, first, last, *batch)
        if s.in_parts:
            made = zip(results, s.results["result"], strict=True)
            results = [from_storage(x, r.shape, r.wanted, s.sizes) for x, r in made]
        return results, Gradients(*gradients)

    def compiled(self) -> Callable[[Arrays], tuple[list[Any], Gradients]]:
        """The same for concrete arrays, compiled once."""

        @jax.jit
        def run(*groups: Sequence[Any]) -> tuple[list[Any], tuple[list[Any], ...]]:
            results, gradients = self(Arrays(*groups))
            return results, gradients.groups

        def call(arrays: Arrays) -> tuple[list[Any], Gradients]:
            results, gradients = run(*map(list, arrays.groups))
            return results, Gradients(*gradients)

        return call

    # --- inside -----------------------------------------------------------------------------------

    def _spec(self, layout: Layout) -> P:
        return storage_spec(layout, self.step.sizes)

    def _local(self, rows: Any, *groups: Sequence[Any]) -> list[list[Any]]:
        """The step on this device's blocks."""
        own, first, last, *batch = groups
        step = self.step
        s, schedule = step.stages, step.schedule
        if step.in_parts:
            batch = [
                [
                    by_microbatch(x, y, schedule.M)
                    for x, y in zip(leaves, placed.layouts, strict=True)
                ]
                for leaves, placed in zip(batch, (s.microbatch, s.target, s.extras), strict=True)
            ]
        first = self._gathered(first, s.first_params, step.first)
        last = self._gathered(last, s.last_params, step.last)
        loop = TickLoop(
            step.table,
            step.actions,
            schedule.P * schedule.V,
            schedule.P,
            step.axis,
            schedule.M,
            Arrays([x[0] for x in own], first, last, *batch),
            keep_given=step.keep_given,
        )
        state = loop.run(
            rows[0], loop.start({name: step.sums(name) for name in ("own", "first", "last")})
        )
        state["own"] = [x[None] for x in state["own"]]
        if step.in_parts:
            state["result"] = [
                whole(x, y, local_shape(r.shape, r.made, step.sizes))
                for x, y, r in zip(
                    state["result"],
                    step.actions.result.layouts,
                    step.results["result"],
                    strict=True,
                )
            ]
        return [
            [
                self._turned(block.astype(r.dtype), r.made, r.wanted, r.shape)
                for block, r in zip(state[name], group, strict=True)
            ]
            for name, group in step.results.items()
        ]

    def _gathered(
        self, blocks: Sequence[Any], params: Placed, stored: Sequence[Layout]
    ) -> list[Any]:
        leaves = zip(blocks, stored, params.layouts, params.leaves, strict=True)
        return [self._turned(x, src, dst, tuple(leaf.shape)) for x, src, dst, leaf in leaves]

    def _turned(self, block: Any, src: Layout, dst: Layout, shape: tuple[int, ...]) -> Any:
        steps = planned_steps(src, dst, shape, block.dtype, self.step.sizes)
        return apply_steps(block, steps, shape, self.step.sizes)
