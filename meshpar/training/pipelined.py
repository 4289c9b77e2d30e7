"""A model whose forward and backward passes run as a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from meshpar.compiler.program import Program, program_of
from meshpar.errors import MeshparError
from meshpar.placements.layout import Layout
from meshpar.schedules import Schedule
from meshpar.schedules.executors.batch_pipeline import BatchPipeline, Groups
from meshpar.schedules.executors.program import PipelineProgram
from meshpar.training.pipeline_options import Pipeline
from meshpar.training.rank_meshes import rank_meshes, without_transfers
from meshpar.training.stage_counts import OnRanks, shared_out
from meshpar.training.state import Slots

__all__ = ["PipelinedModel", "pipelined", "planned_model"]

Tree = Any  # a pytree of arrays, whose type is the user's


@dataclass(frozen=True, slots=True)
class PipelinedModel:
    """A model as a pipeline for batches of one kind.

    Args:
      pipeline: (parameters, the rest, batch) -> (results, the rest), as leaves.
      result: the tree of the results.
      params: the tree of the parameters.
      rest: the tree of the other state.
      train: whether gradients are wanted.
    """

    pipeline: BatchPipeline
    result: Any  # jax.tree_util.PyTreeDef
    params: Any
    rest: Any
    train: bool

    def finished(self, made: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, Tree]:
        """The result, and in training the gradients of the parameters, in traced code.

        Args:
          made: the leaves of the result.
          gradients: those of the gradients of the first.
        """
        if self.train and len(made) == 2:  # the gradients are those of the sum
            gradients = [(g / made[1]).astype(g.dtype) for g in gradients]
        result = jax.tree.unflatten(self.result, made)
        return result, jax.tree.unflatten(self.params, gradients) if self.train else None


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
    model = planned_model(pipeline, forward, params, rest, batch, train=train)
    values = jax.tree.leaves(params[1])
    arrays, state = model.pipeline.inputs(*values, *jax.tree.leaves((rest, batch[1])))
    made, sums = PipelineProgram(model.pipeline.step)(arrays)
    gradients = model.pipeline.gradients(sums, values) if train else []
    result, of_params = model.finished(model.pipeline.results(made), gradients)
    return result, jax.tree.unflatten(model.rest, state), of_params


def planned_model(
    pipeline: Pipeline,
    forward: Callable[[Tree, Tree, Sequence[Any]], tuple[Any, Tree]],
    params: tuple[Slots, Tree],
    rest: Tree,
    batch: tuple[Slots, Sequence[Any]],
    *,
    train: bool,
) -> PipelinedModel:
    """Traces and plans a model; arguments as of `pipelined`, values may be structs."""
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
        run = _planned(pipeline, program, table, slots, placed, results, train=train)
    except MeshparError as error:
        raise error.within("Strategy.pipeline") from None
    return PipelinedModel(run, out_trees[0], groups[0][1], groups[1][1], train)


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
