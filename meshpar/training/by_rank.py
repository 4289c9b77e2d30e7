"""A step whose pipeline the host drives, action by action (`Strategy.pipeline.executor`).

Before it a program puts the state and the batch into the pipeline's form; after it, in training,
another one updates the parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from meshpar.placements.values import wrap
from meshpar.schedules.executors.choice import choose
from meshpar.schedules.executors.mpmd import PipelineByRank, is_one_process
from meshpar.schedules.executors.step import Arrays as PipelineArrays
from meshpar.schedules.executors.step import Gradients
from meshpar.training.pipelined import PipelinedModel, planned_model
from meshpar.training.state import Arrays, Slot, Slots
from meshpar.training.step import Recipe, State, forward_of, mean_of, updated
from meshpar.training.stored_program import stored_program

__all__ = ["StepByRank", "runs_by_rank"]


def runs_by_rank(recipe: Recipe, mode: str, batch: Slots) -> PipelinedModel | None:
    """The model as a pipeline, if the host is to drive it.

    That is decided for training; without a backward pass "auto" is one program.
    """
    pipeline = recipe.pipeline
    if pipeline is None or pipeline.executor == "program":
        return None
    chosen = pipeline.executor == "mpmd"
    if not chosen and (mode != "train" or not is_one_process(batch.mesh)):
        return None
    params, rest, args = (
        jax.tree.unflatten(slots.treedef, slots.structs)
        for slots in (recipe.params, recipe.rest, batch)
    )
    model = planned_model(
        pipeline,
        forward_of(recipe, mode),
        (recipe.params, params),
        rest,
        (batch, args),
        train=mode == "train",
    )
    step = model.pipeline.step
    return model if chosen or choose(step.schedule, step.estimated()) == "mpmd" else None


class StepByRank:
    """A mode's step as programs of the pipeline's ranks; each is compiled when it first runs.

    Args:
      recipe: what the step is made of.
      mode: "train", "eval" or "predict".
      batch: where the arguments lie.
      model: the model as a pipeline.
    """

    def __init__(self, recipe: Recipe, mode: str, batch: Slots, model: PipelinedModel) -> None:
        self.mode, self.batch = mode, batch
        self._recipe, self._model = recipe, model
        self._step = step = model.pipeline.step
        self._pipeline = PipelineByRank(step)
        self._rest = recipe.rest.layouts if mode == "train" else []
        self._groups = [step.own, step.first, step.last, *step.batch]
        self._enter = stored_program(
            self._entered,
            (*recipe.params.leaves, *recipe.rest.leaves, *batch.leaves),
            [*self._rest, *itertools.chain(*self._groups)],
            batch.mesh,
            recipe.partitioner,
        )
        self._mean = jax.jit(lambda made: mean_of(model.finished(made, ())[0]))
        self._layouts = model.pipeline.result_layouts
        if mode == "predict":
            self._outputs = stored_program(
                lambda *made: model.pipeline.results(made),
                self._made("result"),
                self._layouts,
                batch.mesh,
                recipe.partitioner,
            )
        if mode == "train":
            assert recipe.opt is not None, "train() checks the optimizer"
            state = (*recipe.params.leaves, *recipe.opt.leaves)
            self._update = stored_program(
                self._updated,
                (*state, *self._made(*step.results)),
                [*(slot.layout for slot in state), step.results["result"][0].wanted],
                batch.mesh,
                recipe.partitioner,
                donated=len(state),
            )

    def __call__(self, state: State, arrays: Arrays) -> Any:
        """Runs it.

        Args:
          state: in training its parameters and optimizer state are donated.
          arrays: the storages of the batch.

        Returns:
          (state, loss) in training, the loss in evaluation, the storages of the outputs in
          prediction.
        """
        entered = iter(self._enter(*state.params, *state.rest, *arrays))
        rest = tuple(itertools.islice(entered, len(self._rest)))
        results, gradients = self._pipeline(PipelineArrays(*_parts(entered, self._groups)))
        if self.mode != "train":
            return self._mean(results) if self.mode == "eval" else self._outputs(*results)
        made = itertools.chain(results, *gradients.groups)
        *kept, loss = self._update(*state.params, *state.opt, *made)
        params, opt = _parts(kept, (state.params, state.opt))
        return State(tuple(params), rest, tuple(opt)), loss

    def finish(self, result: Any) -> Any:
        """What the caller gets of what a call returns."""
        if self.mode != "predict":
            return result
        shapes = (tuple(leaf.shape) for leaf in self._step.actions.result.leaves)
        made = zip(result, shapes, self._layouts, strict=True)
        values = [wrap(x, shape, layout, self.batch.mesh) for x, shape, layout in made]
        return jax.tree.unflatten(self._model.result, values)

    # --- traced -----------------------------------------------------------------------------------

    def _entered(self, *leaves: Any) -> list[Any]:
        """The other state after a training step, and what the pipeline takes."""
        arrays, state = self._model.pipeline.inputs(*leaves)
        after = jax.tree.unflatten(self._model.rest, state)
        rest = self._recipe.rest.values(after) if self._rest else []
        return [*rest, *itertools.chain(*arrays.groups)]

    def _updated(self, *leaves: Any) -> list[Any]:
        """Parameters and optimizer state after an update, and the loss."""
        recipe, opt = self._recipe, self._recipe.opt
        assert opt is not None, "train() checks the optimizer"
        groups = [recipe.params.leaves, opt.leaves, *self._step.results.values()]
        params, opt_state, results, *sums = _parts(leaves, groups)
        gradients = self._model.pipeline.gradients(Gradients(*sums), params)
        result, grads = self._model.finished(results, gradients)
        loss = mean_of(result)
        new, new_opt = updated(
            recipe,
            jax.tree.unflatten(recipe.params.treedef, params),
            jax.tree.unflatten(opt.treedef, opt_state),
            grads,
            loss,
        )
        return [*recipe.params.values(new), *opt.values(new_opt), loss]

    def _made(self, *names: str) -> list[Slot]:
        """What the pipeline makes, as arguments of what comes after it."""
        results = self._step.results
        return [Slot(n, r.shape, r.dtype, r.wanted) for n in names for r in results[n]]


def _parts(leaves: Iterable[Any], groups: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """The leaves of each group, which is as long as they are."""
    rest = iter(leaves)
    return [list(itertools.islice(rest, len(group))) for group in groups]
