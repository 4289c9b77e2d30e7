"""What one rank runs under the `mpmd` executor: programs on the rank's own mesh.

That mesh has the axes of the whole, the pipeline's with size 1. A value between two programs is the
storage of its layout there (see `placements.blocks`), of which each device has its block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.mesh import ProcessMesh
from meshpar.placements.apply_steps import apply_steps
from meshpar.placements.axis_position import in_time
from meshpar.placements.blocks import local_shape, partial_axes_in_order, storage_spec
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.schedules.executors.in_time import TIME, whole
from meshpar.schedules.executors.rank_actions import RankActions
from meshpar.schedules.executors.signatures import Blocks, Kind, Signatures
from meshpar.schedules.executors.step import PipelineStep, Result

__all__ = ["RankPrograms"]

Layouts = dict[str, Sequence[Layout]]


class RankPrograms:
    """The programs of one rank, compiled when they are first run.

    Args:
      step: what is run.
      signatures: what the actions take and make.
      rank: the position on the axis of ranks.
    """

    def __init__(self, step: PipelineStep, signatures: Signatures, rank: int) -> None:
        self._step, self._signatures = step, signatures
        self._actions = RankActions(step, signatures)
        place = step.mesh.axis_index(step.axis)
        ranks = np.take(np.asarray(step.mesh.mesh), [rank], place)
        self.mesh = ProcessMesh(ranks, list(step.mesh.dim_names))
        self._sizes = dict(self.mesh.axis_sizes)
        self.action = cache(self._action)
        self._start, self._finish = cache(self._start_program), cache(self._finish_program)
        self.numbers = [
            jax.device_put(np.int32(k), self.sharding(Layout(())))
            for k in range(max(step.schedule.M, step.schedule.V))
        ]

    def sharding(self, layout: Layout) -> NamedSharding:
        """That of a value's storage on this rank's mesh."""
        return NamedSharding(self.mesh.jax_mesh, storage_spec(layout, self._sizes))

    def _action(self, kind: Kind) -> Callable[..., tuple[Blocks, Blocks, Any]]:
        """An action as a program: (totals, values, chunk, microbatch) -> (totals, made, token).

        The totals are donated. The token tells when the action has ended.
        """
        s = self._signatures
        values: Layouts = {name: s.layouts(name) for name in s.takes(kind)}
        made: Layouts = {name: s.layouts(name) for name in s.makes(kind)}
        for groups, numbers in ((values, s.reads(kind)), (made, s.writes(kind))):
            groups["kept"] = [groups["kept"][v] for v in numbers]
        totals: Layouts = {name: s.total_layouts(name) for name in s.totals(kind)}

        def local(sums: Blocks, given: Blocks, chunk: Any, microbatch: Any) -> Any:
            step = self._step
            count = step.schedule.M
            with in_time(TIME, microbatch, count) if step.in_parts else nullcontext():
                new, out = self._actions.run(
                    kind, self._opened(sums, totals), self._opened(given, values), chunk, microbatch
                )
            return self._closed(new, totals), self._closed(out, made), microbatch + 0

        number = PartitionSpec()
        inputs = (self._specs(totals), self._specs(values), number, number)
        outputs = (self._specs(totals), self._specs(made), number)
        return self._compiled(local, inputs, outputs, donate=(0,))

    def start(self, names: Sequence[str]) -> Blocks:
        """Totals of nothing yet."""
        return self._start(tuple(names))()

    def finish(self, totals: Blocks) -> Blocks:
        """Totals as they are returned, but for the axis of ranks."""
        return self._finish(tuple(totals))(totals)

    # --- inside -----------------------------------------------------------------------------------

    def _start_program(self, names: tuple[str, ...]) -> Callable[..., Blocks]:
        layouts: Layouts = {name: self._signatures.total_layouts(name) for name in names}

        def local() -> Blocks:
            return self._closed({n: self._signatures.zeros(n) for n in names}, layouts)

        return self._compiled(local, (), self._specs(layouts))

    def _finish_program(self, names: tuple[str, ...]) -> Callable[..., Blocks]:
        made = self._step.results
        layouts: Layouts = {name: self._signatures.total_layouts(name) for name in names}
        results = {name: [self._of_rank(name, r) for r in made[name]] for name in names}
        wanted: Layouts = {name: [r.wanted for r in group] for name, group in results.items()}

        def local(sums: Blocks) -> Blocks:
            blocks = self._opened(sums, layouts)
            if self._step.in_parts and "result" in blocks:
                blocks["result"] = self._of_batch(blocks["result"], results["result"])
            return {
                name: [
                    self._turned(x.astype(r.dtype), r)
                    for x, r in zip(group, results[name], strict=True)
                ]
                for name, group in blocks.items()
            }

        return self._compiled(local, (self._specs(layouts),), self._specs(wanted))

    def _of_batch(self, blocks: Sequence[Any], results: Sequence[Result]) -> list[Any]:
        """Blocks of the results of a batch, from those of its microbatches."""
        layouts = self._step.actions.result.layouts
        return [
            whole(x, y, local_shape(r.shape, r.made, self._sizes))
            for x, y, r in zip(blocks, layouts, results, strict=True)
        ]

    def _of_rank(self, name: str, result: Result) -> Result:
        """A result as this rank has it; own parameters have a dim of ranks, here of size 1."""
        if name == "own":
            return replace(result, shape=(1, *result.shape[1:]))
        axis, made, wanted = self._step.axis, result.made, result.wanted
        dims = tuple(tuple(a for a in dim if a != axis) for dim in wanted.dims)
        return replace(result, made=made.without_partial((axis,)), wanted=Layout(dims))

    def _turned(self, block: Any, result: Result) -> Any:
        shape, sizes = result.shape, self._sizes
        steps = planned_steps(result.made, result.wanted, shape, block.dtype, sizes)
        return apply_steps(block, steps, shape, sizes)

    def _compiled(
        self, local: Callable[..., Any], inputs: Any, outputs: Any, donate: Sequence[int] = ()
    ) -> Callable[..., Any]:
        run = jax.shard_map(
            local, mesh=self.mesh.jax_mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        return jax.jit(run, donate_argnums=donate)

    def _specs(self, layouts: Layouts) -> dict[str, list[PartitionSpec]]:
        return {
            name: [storage_spec(y, self._sizes) for y in group] for name, group in layouts.items()
        }

    def _opened(self, storage: Blocks, layouts: Layouts) -> Blocks:
        """Blocks without the dims that storage has for pending reductions."""
        return {
            name: [
                x.reshape(x.shape[self._pending(y) :])
                for x, y in zip(xs, layouts[name], strict=True)
            ]
            for name, xs in storage.items()
        }

    def _closed(self, blocks: Blocks, layouts: Layouts) -> Blocks:
        return {
            name: [x[(None,) * self._pending(y)] for x, y in zip(blocks[name], ys, strict=True)]
            for name, ys in layouts.items()
        }

    def _pending(self, layout: Layout) -> int:
        return len(partial_axes_in_order(layout, self._sizes))
