"""The two ways from what a mode computes to a jitted program of storage arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from meshpar.compiler.lower import plan_function, shard_mapped
from meshpar.compiler.plan import Plan
from meshpar.placements.layout import Layout
from meshpar.placements.values import wrap
from meshpar.training.by_rank import StepByRank, runs_by_rank
from meshpar.training.state import Arrays, Slots
from meshpar.training.step import Recipe, State, body

__all__ = ["Built", "build"]

Tree = Any  # a pytree of arrays, whose type is the user's


@dataclass(frozen=True, slots=True)
class Built:
    """A program of a mode, not yet lowered.

    Args:
      program: `(state, batch arrays) -> result`; in mode "train" the result is (state, loss) and
        the state is donated.
      finish: turns what the program returns (but for the state) into what the caller gets.
      plan: what the program does, where meshpar partitions it.
    """

    program: Wrapped
    finish: Callable[[Any], Any]
    plan: Plan | None


def build(recipe: Recipe, mode: str, batch: Slots) -> Built | StepByRank:
    """The program of a mode for a kind of batch, or the programs of its ranks."""
    if mode == "train":
        assert recipe.opt is not None, "train() checks the optimizer"
    model = runs_by_rank(recipe, mode, batch)
    if model is not None:
        return StepByRank(recipe, mode, batch, model)
    return (_by_xla if recipe.partitioner == "xla" else _by_meshpar)(recipe, mode, batch)


def _by_xla(recipe: Recipe, mode: str, batch: Slots) -> Built:
    """By sharding constraints: XLA's partitioner decides what lies where in between."""
    whole = NamedSharding(batch.mesh.jax_mesh, PartitionSpec())
    compute, opt = body(recipe, mode, batch), recipe.opt

    def run(state: State, arrays: Arrays) -> Any:
        out = compute(
            recipe.params.unpack(state.params),
            recipe.rest.unpack(state.rest),
            opt.unpack(state.opt) if mode == "train" and opt is not None else None,
            batch.unpack(arrays),
        )
        if mode != "train" or opt is None:
            return out
        params, rest, opt_state, loss = out
        packed = State(recipe.params.pack(params), recipe.rest.pack(rest), opt.pack(opt_state))
        return packed, loss

    if mode == "train" and opt is not None:
        state = (recipe.params.shardings, recipe.rest.shardings, opt.shardings)
        program = jax.jit(run, donate_argnums=0, out_shardings=(State._make(state), whole))
    else:
        program = jax.jit(run, out_shardings=whole if mode == "eval" else None)
    return Built(program, lambda result: result, None)


def _by_meshpar(recipe: Recipe, mode: str, batch: Slots) -> Built:
    """By meshpar's plan: a local program with explicit collectives."""
    train = mode == "train"
    opt = recipe.opt if train else None
    state = [recipe.params, recipe.rest, *([] if opt is None else [opt])]
    groups, mesh, compute = [*state, batch], batch.mesh, body(recipe, mode, batch)

    def of_leaves(*leaves: jax.Array) -> Any:
        params, rest, *others = [
            jax.tree.unflatten(group.treedef, part) for group, part in _parts(leaves, groups)
        ]
        out = compute(params, rest, others[0] if opt is not None else None, others[-1])
        if not train:
            return out
        *kept, loss = out
        return [g.values(tree) for g, tree in zip(state, kept, strict=True)], loss

    def wanted(shapes: Any, ndims: list[int]) -> Sequence[Layout | None]:
        if mode == "predict":
            return [None] * len(ndims)
        kept = [layout for group in state for layout in group.layouts] if train else []
        return [*kept, Layout(())]

    names = [slot.name for group in groups for slot in group.leaves]
    structs = [struct for group in groups for struct in group.structs]
    layouts = [layout for group in groups for layout in group.layouts]
    donated = tuple(range(sum(len(group.leaves) for group in state))) if train else ()
    plan, results, tree = plan_function(of_leaves, structs, layouts, wanted, names, mesh, donated)
    local = shard_mapped(plan.planned, mesh)

    def run(given: State, arrays: Arrays) -> Any:
        stored = (*given.params, *given.rest, *(given.opt if opt is not None else ()), *arrays)
        out = local(*stored)
        if not train:
            return out
        parts = [tuple(part) for _, part in _parts(out[:-1], state)]
        return State(*parts), out[-1]

    def finish(result: Any) -> Any:
        if train:
            return result
        values = [
            wrap(x, tuple(struct.shape), layout, mesh)
            for x, struct, layout in zip(result, results, plan.planned.outputs, strict=True)
        ]
        return jax.tree.unflatten(tree, values)

    return Built(jax.jit(run, donate_argnums=0 if train else ()), finish, plan)


def _parts(leaves: Sequence[Any], groups: Sequence[Slots]) -> list[tuple[Slots, list[Any]]]:
    it = iter(leaves)
    return [(group, list(itertools.islice(it, len(group.leaves)))) for group in groups]
