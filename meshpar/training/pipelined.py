"""`Strategy.pipeline`: a step whose forward and backward passes run as a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from meshpar.compiler.program import Program, program_of
from meshpar.errors import MeshError, MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout
from meshpar.schedules import NAMES, Schedule, auto, generate
from meshpar.schedules.executors.batch_pipeline import BatchPipeline, Groups
from meshpar.training.rank_meshes import rank_meshes, without_transfers
from meshpar.training.split_point import read_splits
from meshpar.training.stage_counts import OnRanks, Stages, shared_out
from meshpar.training.state import Slots
from meshpar.training.strategy import Strategy

__all__ = ["Pipeline", "pipeline_of", "pipelined"]

Tree = Any  # a pytree of arrays, whose type is the user's


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a model is pipelined.

    Args:
      axis: the mesh axis of the ranks.
      schedule: a name of `schedules.NAMES`, or "auto".
      chunks: stages on a rank.
      microbatches: their number; `None` where their size is given.
      rows: rows of a microbatch on each device; `None` where their number is given.
      split_backward: whether full backwards are split.
      stages: what the user said about stages; `None` shares out equal layers evenly.
      recompute: whether the backward pass runs a stage again.
    """

    axis: str
    schedule: str
    chunks: int
    microbatches: int | None
    rows: int | None
    split_backward: bool
    stages: Stages | None = None
    recompute: bool = False

    def table(self, batch: Slots) -> Schedule:
        """The schedule for a batch.

        Raises:
          MeshparError: the batch has no rows to split.
        """
        P, M, V = batch.mesh.axis_sizes[self.axis], self._count(batch), self.chunks
        if self.schedule == "auto":
            return auto(P, M, V)
        return generate(self.schedule, P, M, V, split_backward=self.split_backward)

    def _count(self, batch: Slots) -> int:
        """The number of microbatches; where rows do not come out even the last ones are smaller."""
        rows = {(s.shape[0], s.layout.dims[0]) for s in batch.leaves if s.shape}
        sizes = {n for n, _ in rows}
        axes = {axis for _, dim in rows for axis in dim}
        cut = math.prod(batch.mesh.axis_sizes[axis] for axis in axes)
        (n,) = sizes if len(sizes) == 1 else (0,)
        if not n:
            empty = sizes == {0}
            raise MeshparError(
                "the batch has no rows."
                if empty
                else "the leaves of the batch have no common number of rows.",
                rows=", ".join(f"{s.name or 'batch'} {s.shape}" for s in batch.leaves),
                because="microbatches are rows of the batch, dim 0 of every leaf that has dims",
                instead="leave the step out"
                if empty
                else "leaves with one number of rows, or without dims for what all rows share",
            )
        own = -(-n // cut)  # rows of the largest part
        size = self.rows or -(-own // (self.microbatches or 1))
        return -(-own // size)


def pipeline_of(
    strategy: Strategy, mesh: ProcessMesh, model: Any, ranks: Mapping[str, int]
) -> Pipeline | None:
    """What `Strategy.pipeline` asks for, checked; `None` if it is not enabled.

    Args:
      strategy: the options.
      mesh: the mesh of the whole pipeline.
      model: the user's model, of whatever form.
      ranks: the parameters that lie on the mesh of one rank, and the rank.

    Raises:
      MeshError: the mesh has no axis for the ranks, or one of another size.
      ValueError: an unknown schedule, sizes that do not fit each other, or stages that are given
        in two ways.
      TypeError: class names, of a model that is no nnx module.
    """
    asked = strategy.pipeline
    if not asked.enable:
        return None
    axis = asked.axis
    if axis not in mesh.axis_sizes:
        raise MeshError(
            f"Strategy.pipeline.axis is {axis!r}, which is no axis of the mesh.",
            mesh=mesh,
            instead='a mesh such as ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])',
        )
    size = mesh.axis_sizes[axis]
    if "pp_degree" in asked.changed() and asked.pp_degree != size:
        raise MeshError(
            f"Strategy.pipeline.pp_degree is {asked.pp_degree}, and mesh axis {axis!r} has size "
            f"{size}.",
            mesh=mesh,
        )
    if asked.schedule_mode not in (*NAMES, "auto"):
        raise ValueError(
            f"Strategy.pipeline.schedule_mode = {asked.schedule_mode!r}: it is one of "
            f"{', '.join(NAMES)} or auto"
        )
    splits = read_splits(asked, model)
    if splits is not None and ranks:
        raise ValueError(
            f"Strategy.pipeline: {next(iter(ranks))!r} lies on the mesh of one rank, which says "
            "where stages are, and so does split_spec or vpp_seg_method; give one of them"
        )
    changed = asked.changed()
    if "accumulate_steps" in changed and "micro_batch_size" in changed:
        raise ValueError(
            "Strategy.pipeline: accumulate_steps is the number of microbatches and "
            "micro_batch_size their size on a device; set one of them, the batch tells the other"
        )
    by_size = "micro_batch_size" in changed
    twofold = asked.schedule_mode in ("ZBVPP", "DualPipeV") and "vpp_degree" not in changed
    pipeline = Pipeline(
        axis,
        asked.schedule_mode,
        2 if twofold else asked.vpp_degree,
        None if by_size else asked.accumulate_steps,
        asked.micro_batch_size if by_size else None,
        asked.split_backward,
        OnRanks(tuple(ranks.items())) if ranks else splits,
        strategy.recompute.enable,
    )
    if asked.schedule_mode != "auto":
        generate(asked.schedule_mode, size, 1, pipeline.chunks)  # refuses a wrong vpp_degree
    return pipeline


def pipelined(
    pipeline: Pipeline,
    forward: Callable[[Tree, Tree, Sequence[Any]], tuple[Any, Tree]],
    params: tuple[Slots, Tree],
    rest: Tree,
    batch: tuple[Slots, Sequence[Any]],
    *,
    train: bool,
) -> tuple[Any, Tree, Tree]:
    """Runs a model as a pipeline, in traced code.

    Args:
      pipeline: how.
      forward: `(params, rest, args) -> (result, rest)`.
      params: where the parameters lie, and their values.
      rest: the other state.
      batch: where the arguments lie, and their values.
      train: whether gradients are wanted; the result is then a scalar, or `(sum, count)`.

    Returns:
      The result, the rest, and the gradients of the parameters (in training).
    """
    slots, values = params
    placed, args = batch
    table = pipeline.table(placed)  # refuses a batch without common rows before the model sees it
    groups = [jax.tree.flatten(tree) for tree in (values, rest, args)]
    counts = [len(leaves) for leaves, _ in groups]
    out_trees: list[Any] = []

    def of_leaves(*leaves: Any) -> list[Any]:
        parts, start = [], 0
        for count, (_, tree) in zip(counts, groups, strict=True):
            parts.append(jax.tree.unflatten(tree, leaves[start : start + count]))
            start += count
        result, after = forward(*parts)
        out_trees[:] = [jax.tree.structure(result)]
        return [*jax.tree.leaves(result), *jax.tree.leaves(after)]

    leaves = [leaf for group, _ in groups for leaf in group]
    program = program_of(jax.make_jaxpr(of_leaves)(*leaves))
    results = out_trees[0].num_leaves
    try:
        step = _planned(pipeline, program, table, slots, placed, results, train=train)
    except MeshparError as error:
        raise error.within("Strategy.pipeline") from None
    made, state, gradients = step(*leaves)
    if train and results == 2:  # the gradients are those of the sum
        gradients = [(g / made[1]).astype(g.dtype) for g in gradients]
    result = jax.tree.unflatten(out_trees[0], made)
    after = jax.tree.unflatten(groups[1][1], state)
    return result, after, jax.tree.unflatten(groups[0][1], gradients) if train else None


def _planned(
    pipeline: Pipeline,
    program: Program,
    table: Schedule,
    slots: Slots,
    batch: Slots,
    results: int,
    *,
    train: bool,
) -> BatchPipeline:
    """A traced model as a pipeline: (parameters, the rest, batch) -> (results, the rest)."""
    count, rows = len(slots.leaves), len(batch.leaves)
    params, given = program.inputs[:count], program.inputs[len(program.inputs) - rows :]
    names, stages = [slot.name for slot in slots.leaves], pipeline.stages
    ranks = dict(stages.ranks) if isinstance(stages, OnRanks) else {}
    program = without_transfers(
        program,
        rank_meshes(batch.mesh, pipeline.axis),
        {v: ranks[name] for v, name in zip(params, names, strict=True) if name in ranks},
        params,
        given,
    )
    return BatchPipeline(
        program,
        Groups(_even(slots), len(program.inputs) - count - rows, batch.layouts),
        results,
        table,
        batch.mesh,
        pipeline.axis,
        tuple(dict.fromkeys(a for s in batch.leaves if s.shape for a in s.layout.dims[0])),
        train=train,
        share=None if stages is None else partial(shared_out, stages, names, table),
        recompute=pipeline.recompute,
    )


def _even(slots: Slots) -> list[Layout]:
    """The layouts, without the axes on dims that they do not divide."""
    sizes = slots.mesh.axis_sizes
    out = []
    for slot in slots.leaves:
        dims = [
            dim if not n % math.prod(sizes[axis] for axis in dim) else ()
            for n, dim in zip(slot.shape, slot.layout.dims, strict=True)
        ]
        out.append(Layout(tuple(dims)))
    return out
