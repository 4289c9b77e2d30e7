"""All that a pipeline rank can do in a tick, as functions of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.compiler.program import Program, program_of
from meshpar.placements.layout import Layout
from meshpar.schedules.executors.evaluate import sliced, without_calls
from meshpar.schedules.executors.local import LocalProgram, Within, block_struct
from meshpar.schedules.executors.slot_table import Uses
from meshpar.schedules.executors.stage import (
    Kept,
    StagePrograms,
    is_differentiable,
    stage_programs,
)

__all__ = ["LocalActions", "Placed", "Stages", "local_actions"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A pytree of structs, and the layout of each leaf on the axes within a rank.

    Args:
      tree: the structs.
      layouts: one per leaf.
    """

    tree: Any
    layouts: tuple[Layout, ...]

    @property
    def leaves(self) -> list[Any]:
        """The structs."""
        return jax.tree.leaves(self.tree)

    @property
    def trained(self) -> tuple[int, ...]:
        """The positions of the leaves that have a gradient."""
        return tuple(k for k, leaf in enumerate(self.leaves) if is_differentiable(leaf))


@dataclass(frozen=True, slots=True)
class Stages:
    """A model in stages, as functions on one microbatch.

    Args:
      stage: `(parameters, x, extras) -> y`, where y is like x.
      own: the parameters of one stage.
      extras: what else a stage takes of a microbatch.
      first: `(parameters, microbatch) -> x`; `None` where the microbatch is x.
      first_params: its parameters.
      microbatch: one microbatch.
      last: `(parameters, y, target) -> result`, in training scalars, of which the gradient is the
        first's.
      last_params: its parameters.
      target: one microbatch's target.
      recompute: whether the backward pass runs a stage again instead of keeping its values.
    """

    stage: Callable[[Any, Any, Any], Any]
    own: Placed
    extras: Placed
    first: Callable[[Any, Any], Any] | None
    first_params: Placed
    microbatch: Placed
    last: Callable[[Any, Any, Any], Any]
    last_params: Placed
    target: Placed
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class LocalActions:
    """The actions on blocks. `StagePrograms` says what those of a stage take and return.

    Args:
      forward: F.
      full: B; like all that is for the backward pass `None` where there is none.
      for_input: I.
      for_weight: W.
      first: (first parameters, microbatch) -> x; `None` where the microbatch is x.
      first_backward: (first parameters, microbatch, x gradient) -> first parameter gradients.
      last: (last parameters, y, target) -> result, and in training (y gradient, last parameter
        gradients).
      uses: the values that a stage keeps.
      layouts: the layout of each of them.
      residuals: which of them F keeps for the backward pass; its input may be among them.
      cut: which of them I keeps for W; the output's gradient may be among them.
      x: struct of the block of each array of x.
      x_layouts: their layouts.
      result: the result of a microbatch.
      result_blocks: structs of its blocks.
    """

    forward: LocalProgram
    full: LocalProgram | None
    for_input: LocalProgram | None
    for_weight: LocalProgram | None
    first: LocalProgram | None
    first_backward: LocalProgram | None
    last: LocalProgram
    uses: tuple[Uses, ...]
    layouts: tuple[Layout, ...]
    residuals: tuple[int, ...]
    cut: tuple[int, ...]
    x: tuple[jax.ShapeDtypeStruct, ...]
    x_layouts: tuple[Layout, ...]
    result: Placed
    result_blocks: tuple[jax.ShapeDtypeStruct, ...]


def local_actions(
    stages: Stages,
    within: Within,
    *,
    train: bool,
    scale: float = 1.0,
    in_parts: bool = False,
) -> LocalActions:
    """Traces a model's actions and plans them over the axes within a rank.

    Args:
      stages: the model.
      within: these axes.
      train: whether there is a backward pass.
      scale: what a microbatch's result counts in the whole, for its gradient.
      in_parts: whether the results of the microbatches may be pending, terms of one result.
    """
    first, x = _first(stages, within)
    parts = stage_programs(
        stages.stage, stages.own.tree, x.tree, stages.extras.tree, recompute=stages.recompute
    )
    given = (*stages.own.layouts, *stages.extras.layouts)
    count = len(x.leaves)
    blocks = [_block(*pair, within) for pair in zip(x.leaves, x.layouts, strict=True)]
    uses, layouts = [Uses(block, "x") for block in blocks], [*x.layouts]
    residuals, cut = (), ()
    full = for_input = for_weight = backward = None
    if train:
        forward = within.local(
            parts.forward,
            (*given, *x.layouts),
            (*x.layouts, *[None] * len(parts.residuals)),
        )
        kept = forward.outputs[count:]
        full, for_input, for_weight = _backward(parts, within, given, kept, x.layouts)
        backward = _first_backward(stages, within, x)
        uses += [Uses(block, "g", by_input=True) for block in blocks]
        layouts += x.layouts
        values = uses, layouts
        residuals = _keep(values, parts.residuals, forward, "F", within, taken=range(count))
        cut = _keep(values, parts.cut, for_input, "I", within, taken=range(count, 2 * count))
    else:
        alone = sliced(parts.forward, parts.forward.inputs, parts.forward.outputs[:count])
        forward = within.local(alone, (*given, *x.layouts), x.layouts)
    last, result = _last(stages, within, x, scale if train else None, in_parts=in_parts)
    return LocalActions(
        forward,
        full,
        for_input,
        for_weight,
        first,
        backward,
        last,
        tuple(uses),
        tuple(layouts),
        residuals,
        cut,
        tuple(blocks),
        x.layouts,
        result,
        tuple(_block(*pair, within) for pair in zip(result.leaves, result.layouts, strict=True)),
    )


def _backward(
    parts: StagePrograms,
    within: Within,
    given: Sequence[Layout],
    kept: Sequence[Layout],
    x_layouts: Sequence[Layout],
) -> tuple[LocalProgram, LocalProgram, LocalProgram]:
    """B, I and W, the first and the last with gradients of the same layouts."""
    count = len(x_layouts)
    pending = [None] * len(parts.trained)
    inputs = (*given, *kept, *x_layouts)
    full = within.local(parts.full, inputs, (*x_layouts, *pending), leave_pending=True)
    for_input = within.local(parts.for_input, inputs, (*x_layouts, *[None] * len(parts.cut)))
    cut = for_input.outputs[count:]
    for_weight = within.local(parts.for_weight, (*given, *kept, *cut), full.outputs[count:])
    return full, for_input, for_weight


def _keep(
    values: tuple[list[Uses], list[Layout]],
    kinds: Sequence[Kept],
    program: LocalProgram,
    op: str,
    within: Within,
    *,
    taken: range,
) -> tuple[int, ...]:
    """Adds what an action leaves for later ones to the values, and returns their numbers.

    A value that it took, one of the last arguments of `program`, and leaves as it came stays where
    it is.

    Args:
      values: those so far, and their layouts; gets more.
      kinds: what is left.
      program: the action.
      op: its op.
      within: the axes within a rank.
      taken: the numbers of the values that it took.
    """
    (uses, layouts), count, numbers = values, len(taken), list[int]()
    start = len(program.inputs) - count
    left = zip(kinds, program.outputs[count:], program.passed[count:], strict=True)
    for kind, layout, position in left:
        if position is not None and position >= start:
            number = taken[position - start]
            use = uses[number]
            uses[number] = replace(
                use,
                by_input=use.by_input or kind.by_input,
                by_weight=use.by_weight or kind.by_weight,
            )
        else:
            number = len(uses)
            block = _block(kind.aval, layout, within)
            uses.append(Uses(block, op, kind.by_input, kind.by_weight))
            layouts.append(layout)
        numbers.append(number)
    return tuple(numbers)


def _first(stages: Stages, within: Within) -> tuple[LocalProgram | None, Placed]:
    """What makes x, and x."""
    if stages.first is None:
        return None, stages.microbatch
    program, x = _traced(stages.first, stages.first_params, stages.microbatch)
    inputs = (*stages.first_params.layouts, *stages.microbatch.layouts)
    local = within.local(program, inputs, [None] * len(program.outputs))
    return local, Placed(x, local.outputs)


def _first_backward(stages: Stages, within: Within, x: Placed) -> LocalProgram | None:
    if stages.first is None:
        return None
    first, trained = stages.first, stages.first_params.trained

    def backward(params: Any, microbatch: Any, gradient: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(params)

        def run(values: Sequence[Any]) -> Any:
            return first(_replaced(leaves, tree, trained, values), microbatch)

        return jax.vjp(run, [leaves[k] for k in trained])[1](gradient)[0]

    program, _ = _traced(backward, stages.first_params, stages.microbatch, x)
    inputs = (*stages.first_params.layouts, *stages.microbatch.layouts, *x.layouts)
    return within.local(program, inputs, [None] * len(program.outputs), leave_pending=True)


def _last(
    stages: Stages, within: Within, x: Placed, scale: float | None, *, in_parts: bool
) -> tuple[LocalProgram, Placed]:
    """What makes the result, and in training the gradients of the last parameters and of y."""
    last, trained = stages.last, stages.last_params.trained
    program, result = _traced(last, stages.last_params, x, stages.target)
    inputs = (*stages.last_params.layouts, *x.layouts, *stages.target.layouts)
    wanted: list[Layout | None] = [None] * len(program.outputs)
    if scale is not None:

        def with_gradients(params: Any, y: Any, target: Any) -> Any:
            leaves, tree = jax.tree.flatten(params)

            def run(values: Sequence[Any], y: Any) -> Any:
                return last(_replaced(leaves, tree, trained, values), y, target)

            out, pullback = jax.vjp(run, [leaves[k] for k in trained], y)
            whole, *others = jax.tree.leaves(out)
            seeds = [jnp.full_like(whole, scale), *map(jnp.zeros_like, others)]
            for_params, for_y = pullback(jax.tree.unflatten(jax.tree.structure(out), seeds))
            return out, for_y, for_params

        program, _ = _traced(with_gradients, stages.last_params, x, stages.target)
        results = [None] * len(jax.tree.leaves(result))
        wanted = [*results, *x.layouts, *[None] * len(trained)]
    local = within.local(program, inputs, wanted, leave_pending=in_parts or scale is not None)
    return local, Placed(result, local.outputs[: len(jax.tree.leaves(result))])


def _replaced(leaves: Sequence[Any], tree: Any, where: Sequence[int], values: Sequence[Any]) -> Any:
    leaves = list(leaves)
    for k, value in zip(where, values, strict=True):
        leaves[k] = value
    return jax.tree.unflatten(tree, leaves)


def _traced(fn: Callable[..., Any], *args: Placed) -> tuple[Program, Any]:
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*(arg.tree for arg in args))
    return without_calls(program_of(jaxpr)), out


def _block(aval: Any, layout: Layout, within: Within) -> jax.ShapeDtypeStruct:
    return block_struct(aval, layout, within.sizes)
