"""A call of `mp.pipeline` as a function that JAX can differentiate, and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import jax
import numpy as np

from meshpar._jax import is_tracer
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout
from meshpar.schedules.actions import Costs
from meshpar.schedules.auto import auto
from meshpar.schedules.executors.arguments import (
    NAMES,
    Functions,
    PipelineError,
    sizes_of,
    stages_of,
    table_for,
)
from meshpar.schedules.executors.choice import Executor, best_schedule, choose
from meshpar.schedules.executors.local_actions import Stages
from meshpar.schedules.executors.mpmd import PipelineByRank, is_one_process
from meshpar.schedules.executors.program import PipelineProgram
from meshpar.schedules.executors.same_function import function_key
from meshpar.schedules.executors.stage import is_differentiable
from meshpar.schedules.executors.step import Arrays, Gradients, PipelineStep
from meshpar.schedules.schedule import Schedule

__all__ = ["Asked", "PipelineCall", "call_for"]

Trees = dict[str, Any]
Runner = Callable[[Arrays], tuple[list[Any], Gradients]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user asks of `mp.pipeline` besides the arrays; see there."""

    functions: Functions
    schedule: Schedule | str
    mesh: ProcessMesh
    axis: str
    recompute: bool
    executor: Literal["program", "mpmd", "auto"]
    costs: Costs | None


def call_for(
    asked: Asked, trees: Trees, layouts: Mapping[str, list[Layout]], *, once: bool
) -> PipelineCall:
    """The call for arguments of these shapes and layouts.

    Args:
      asked: what is asked for.
      trees: the arguments by name.
      layouts: of their leaves.
      once: whether a new one is made, which nothing holds afterwards; for traced code, whose
        functions may close over tracers.
    """
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), trees)
    new = _New(asked, structs, layouts)
    return new.make() if once else _kept(new)


@dataclass(frozen=True, slots=True, eq=False)
class _New:
    """A call to be made; equal to others for which the same is made."""

    asked: Asked
    trees: Trees
    layouts: Mapping[str, list[Layout]]

    def make(self) -> PipelineCall:
        asked = self.asked
        sizes = sizes_of(self.trees, asked.mesh, asked.axis)
        if asked.schedule != "auto":
            table_for(asked.schedule, sizes)  # refuses what does not fit
        stages = stages_of(
            asked.functions, self.trees, self.layouts, asked.axis, recompute=asked.recompute
        )
        ends = self.layouts["first_params"], self.layouts["last_params"]
        return PipelineCall(asked, stages, sizes, ends)

    @property
    def _key(self) -> Hashable:
        asked, f = self.asked, self.asked.functions
        leaves, tree = jax.tree.flatten(self.trees)
        return (
            tuple(map(function_key, (f.stage, f.first, f.last, f.loss))),
            (asked.schedule, asked.mesh, asked.axis, asked.recompute, asked.executor, asked.costs),
            (tree, *((x.shape, x.dtype) for x in leaves)),
            tuple((name, *self.layouts[name]) for name in NAMES),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _New) and self._key == other._key


@lru_cache(maxsize=32)
def _kept(new: _New) -> PipelineCall:
    return new.make()


@dataclass(frozen=True, slots=True)
class _Ready:
    """A step, and what runs it."""

    step: PipelineStep
    run: Runner


class PipelineCall:
    """`mp.pipeline` for one kind of arguments.

    Args:
      asked: what is asked for.
      stages: the model on one microbatch.
      sizes: ranks, microbatches, stages on a rank.
      ends: the layouts in which the parameters of the first and of the last function lie.
    """

    def __init__(
        self,
        asked: Asked,
        stages: Stages,
        sizes: tuple[int, int, int],
        ends: tuple[list[Layout], list[Layout]],
    ) -> None:
        self._asked, self._stages, self._sizes, self._ends = asked, stages, sizes, ends
        self._has_loss = asked.functions.loss is not None
        self._has_first = asked.functions.first is not None
        self.ready = cache(self._ready)
        self._call = jax.custom_vjp(self._value)
        self._call.defvjp(self._forward, self._backward, symbolic_zeros=True)

    def __call__(self, trees: Trees) -> Any:
        """The result, which `jax.grad` differentiates."""
        return self._call(trees)

    # --- the rule of differentiation --------------------------------------------------------------

    def _value(self, trees: Trees) -> Any:
        return self._run(trees, train=False)[0]

    def _forward(self, primals: Trees) -> tuple[Any, Any]:
        trees = jax.tree.map(lambda p: p.value, primals)
        wanted = {name: _perturbed(primals[name]) for name in NAMES}
        self._check_wanted(wanted)
        value, made = self._run(trees, train=True, keep_given=any(wanted["microbatches"]))
        return value, {name: _spread(trees[name], made.get(name, [])) for name in NAMES}

    def _backward(self, gradients: Trees, cotangent: Any) -> tuple[Trees]:
        return (_scaled(gradients, cotangent),)

    def _check_wanted(self, wanted: Mapping[str, list[bool]]) -> None:
        without = ["microbatches"] if self._has_first else []
        refused = [name for name in ("targets", "extras", *without) if any(wanted[name])]
        if refused or not self._has_loss:
            raise NotImplementedError(
                f"pipeline: the gradient of {', '.join(refused) or 'outputs'} is not there; with "
                "loss_fn there are those of all parameters, and of microbatches without first_fn. "
                "jax.lax.stop_gradient(x) says that x has none"
            )

    # --- runs -------------------------------------------------------------------------------------

    def _run(
        self, trees: Trees, *, train: bool, keep_given: bool = False
    ) -> tuple[Any, dict[str, list[Any]]]:
        """The value, and the gradients as leaves."""
        traced = any(map(is_tracer, jax.tree.leaves(trees)))
        ready = self.ready(train, keep_given, traced)
        order = _Order(ready.step.schedule)
        own, first, last, *batch = (jax.tree.leaves(trees[name]) for name in NAMES)
        arrays = Arrays([order.by_rank(x) for x in own], first, last, *batch)
        results, gradients = ready.run(arrays)
        out = jax.tree.unflatten(jax.tree.structure(ready.step.actions.result.tree), results)
        made = {
            "stacked_params": [order.by_stage(x) for x in gradients.own],
            "first_params": gradients.first,
            "last_params": gradients.last,
            "microbatches": gradients.microbatches,
        }
        return (out.mean() if self._has_loss else out), made

    def _ready(self, train: bool, keep_given: bool, traced: bool) -> _Ready:
        """What runs the call, compiled once where arrays are concrete."""
        asked = self._asked
        if traced and asked.executor == "mpmd":
            raise PipelineError(
                "pipeline(executor='mpmd'): it cannot be part of a compiled program.",
                because="the host runs each action by itself, and sees arrays, not tracers",
                instead="jax.value_and_grad(loss)(params) without jax.jit around it; or "
                "executor='auto', which is 'program' inside jax.jit",
            )
        executors: tuple[Executor, ...] = ("program",)
        if not traced and asked.executor != "program":
            executors = ("mpmd",) if asked.executor == "mpmd" else _possible(asked.mesh)
        schedule, executor = self._planned(executors)
        step = PipelineStep(
            self._stages,
            schedule,
            asked.mesh,
            asked.axis,
            train=train,
            keep_given=keep_given,
            scale=1 / schedule.M,
            stored=self._ends,
        )
        if executor is None:
            executor = choose(schedule, asked.costs or step.estimated()) if train else "program"
        if executor == "mpmd":
            return _Ready(step, PipelineByRank(step))
        program = PipelineProgram(step)
        return _Ready(step, program if traced else program.compiled())

    def _planned(self, executors: tuple[Executor, ...]) -> tuple[Schedule, Executor | None]:
        """The schedule, and its executor where that is known without the step."""
        asked, sizes = self._asked, self._sizes
        if asked.schedule == "auto" and asked.costs is not None:
            return best_schedule(*sizes, asked.costs, executors)
        schedule = auto(*sizes) if asked.schedule == "auto" else table_for(asked.schedule, sizes)
        return schedule, executors[0] if len(executors) == 1 else None


def _possible(mesh: ProcessMesh) -> tuple[Executor, ...]:
    return ("program", "mpmd") if is_one_process(mesh) else ("program",)


class _Order:
    """The order of the stages: by stage as users stack them, by rank as they are run."""

    def __init__(self, schedule: Schedule) -> None:
        self._P, self._V = schedule.P, schedule.V
        self._order = np.array(schedule.stages).reshape(-1)
        self._inverse = np.argsort(self._order)
        self._same = bool((self._order == np.arange(self._order.size)).all())

    def by_rank(self, x: jax.Array) -> jax.Array:
        """(stages, ...) to (ranks, chunks, ...)."""
        x = x if self._same else x[self._order]
        return x.reshape(self._P, self._V, *x.shape[1:])

    def by_stage(self, x: jax.Array) -> jax.Array:
        """Back."""
        x = x.reshape(self._order.size, *x.shape[2:])
        return x if self._same else x[self._inverse]


@jax.jit
def _scaled(gradients: Trees, cotangent: Any) -> Trees:
    return jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)


def _perturbed(tree: Any) -> list[bool]:
    """Which leaves a gradient is asked of."""
    return [leaf.perturbed and is_differentiable(leaf.value) for leaf in jax.tree.leaves(tree)]


def _spread(tree: Any, gradients: list[Any]) -> Any:
    """Gradients in the place of the leaves that have any, `None` elsewhere."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(gradients)
    placed = [next(rest, None) if is_differentiable(leaf) else None for leaf in leaves]
    return jax.tree.unflatten(structure, placed)
