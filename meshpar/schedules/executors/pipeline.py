"""`mp.pipeline`: a model in equal stages, run under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from meshpar.compiler.arguments import mesh_for
from meshpar.errors import MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.schedules.executors.arguments import (
    NAMES,
    Functions,
    layouts_of,
    schedule_for,
    stages_of,
)
from meshpar.schedules.executors.program import PipelineProgram
from meshpar.schedules.executors.stage import is_differentiable
from meshpar.schedules.executors.step import Arrays, PipelineStep
from meshpar.schedules.schedule import Schedule

__all__ = ["pipeline"]


def pipeline(
    stage_fn: Callable[..., Any],
    stacked_params: Any,
    microbatches: Any,
    schedule: Schedule | str = "1F1B",
    mesh: ProcessMesh | None = None,
    *,
    axis: str = "pp",
    first_fn: Callable[[Any, Any], Any] | None = None,
    first_params: Any = None,
    last_fn: Callable[[Any, Any], Any] | None = None,
    last_params: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    targets: Any = None,
    extras: Any = None,
    in_placements: Mapping[str, Any] | None = None,
    recompute: bool = False,
    executor: Literal["program"] = "program",
) -> Any:
    """Runs a model in equal stages along a mesh axis, and trains it under a schedule.

    Equal to the loop over microbatches, on every schedule:

        for m in range(M):
            x = first_fn(first_params, microbatches[m])
            for s in range(S):
                x = stage_fn(stacked_params[s], x, extras[m])
            losses[m] = loss_fn(last_fn(last_params, x), targets[m])
        return mean(losses)

    Args:
      stage_fn: `(params, x) -> y`, or `(params, x, extra) -> y` where there are `extras`; y has the
        shapes and dtypes of x, floats.
      stacked_params: a pytree of arrays of shape `(S, ...)`, in forward order, S = P * V: P ranks
        with V stages each. With V > 1 stages move to their ranks and their gradients back, once a
        call.
      microbatches: a pytree of arrays of shape `(M, ...)`.
      schedule: a `Schedule`, a name of `schedules.NAMES`, or `"auto"`, the one of least bubble.
      mesh: the mesh; without it that of the arguments, else the default one.
      axis: the mesh axis along which the ranks lie. Over the other axes every action is partitioned
        like a function under `mp.jit`.
      first_fn: `(first_params, microbatch) -> x`, on the rank of the first stage, such as an
        embedding; run again in the backward pass. Without it a microbatch is x.
      first_params: its parameters, any pytree.
      last_fn: `(last_params, y) -> out`, on the rank of the last stage, such as a head. Without it
        out is y.
      last_params: its parameters. Give the same arrays twice for tied ones: `jax.grad` adds up.
      loss_fn: `(out, target) -> scalar`. With the backward pass of `last_fn` it runs right behind
        the last stage's forward pass, so out is never kept.
      targets: a pytree of arrays of shape `(M, ...)`.
      extras: a pytree of arrays of shape `(M, ...)` that every stage takes, such as masks,
        positions or random keys; they have no gradient.
      in_placements: argument name -> placements for all its leaves, or a pytree prefix of such
        lists. Without it an array is taken as it lies, which inside `jax.jit` is not known: then it
        is replicated, `stacked_params` cut over `axis`. `first_params` and `last_params` may be cut
        over `axis` too: they are gathered before the first tick, once a call.
      recompute: keep a stage's input only and run the stage again in the backward pass.
      executor: `"program"`: one program scans the table's ticks; its size does not depend on M.

    Returns:
      With `loss_fn` the mean of the microbatches' losses. `jax.grad` and `jax.value_and_grad` of it
      run forward and backward passes in the table's order; without them forward passes are run.
      Without `loss_fn` what `last_fn` returns, of shape `(M, ...)`; it cannot be differentiated.
      Combined actions of a table run one after the other. Call it inside `jax.jit`.

    Raises:
      PipelineError: stages, microbatches or a schedule that do not fit each other.
      PlacementError: placements that do not fit.
      MeshError: no mesh, or it has no such axis.
      NotImplementedError: a gradient of `targets`, of `extras`, of `microbatches` under `first_fn`
        or of anything without `loss_fn`; or a plan that would send a stage's blocks around a ring.

    Example:
      >>> import jax, jax.numpy as jnp, meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["pp"])
      >>> def loss(params, x, t):
      ...     return mp.pipeline(
      ...         lambda w, x: jnp.tanh(x @ w), params, x, "1F1B", mesh,
      ...         loss_fn=lambda y, t: ((y - t) ** 2).mean(), targets=t,
      ...     )
      >>> params, x = jnp.zeros((1, 4, 4)), jnp.ones((3, 2, 4))
      >>> value, gradient = jax.jit(jax.value_and_grad(loss))(params, x, x)
      >>> float(value), gradient.shape
      (1.0, (1, 4, 4))

    Paddle's counterpart is `fleet.meta_parallel.PipelineParallel`, which has no functional form.
    """
    if executor != "program":
        raise NotImplementedError(f"pipeline(executor={executor!r}): it is 'program'")
    values = (stacked_params, first_params, last_params, microbatches, targets, extras)
    trees = dict(zip(NAMES, values, strict=True))
    try:
        mesh = mesh_for(jax.tree.leaves(values), mesh, "pipeline")
        mesh.axis_index(axis)
        table = schedule_for(schedule, trees, mesh, axis)
        layouts = layouts_of(trees, in_placements or {}, mesh, axis)
        functions = Functions(stage_fn, first_fn, last_fn, loss_fn)
        stages = stages_of(functions, trees, layouts, axis, recompute=recompute)
    except MeshparError as error:
        raise error if str(error).startswith("pipeline") else error.within("pipeline") from None
    ends = layouts["first_params"], layouts["last_params"]

    def program(*, train: bool, keep_given: bool = False) -> PipelineProgram:
        step = PipelineStep(
            stages,
            table,
            mesh,
            axis,
            train=train,
            keep_given=keep_given,
            scale=1 / table.M,
            stored=ends,
        )
        return PipelineProgram(step)

    has_loss, has_first = loss_fn is not None, first_fn is not None
    return _differentiable(program, table, has_loss=has_loss, has_first=has_first)(trees)


def _differentiable(
    program: Callable[..., PipelineProgram], table: Schedule, *, has_loss: bool, has_first: bool
) -> Callable[[dict[str, Any]], Any]:
    """The call as a function whose gradient is computed along with its value."""
    order = np.array(table.stages).reshape(-1)
    inverse = np.argsort(order)
    in_order = bool((order == np.arange(order.size)).all())

    def by_rank(x: jax.Array) -> jax.Array:
        x = x if in_order else x[order]
        return x.reshape(table.P, table.V, *x.shape[1:])

    def by_stage(x: jax.Array) -> jax.Array:
        x = x.reshape(order.size, *x.shape[2:])
        return x if in_order else x[inverse]

    def run(program: PipelineProgram, trees: dict[str, Any]) -> Any:
        own, first, last, *batch = (jax.tree.leaves(trees[name]) for name in NAMES)
        results, gradients = program(Arrays([by_rank(x) for x in own], first, last, *batch))
        tree = jax.tree.structure(program.step.actions.result.tree)
        out = jax.tree.unflatten(tree, results)
        return (out.mean() if has_loss else out), gradients

    @jax.custom_vjp
    def call(trees: dict[str, Any]) -> Any:
        return run(program(train=False), trees)[0]

    def forward(primals: dict[str, Any]) -> tuple[Any, Any]:
        trees = jax.tree.map(lambda p: p.value, primals)
        wanted = {name: _perturbed(primals[name]) for name in NAMES}
        _check_wanted(wanted, has_loss=has_loss, has_first=has_first)
        step = program(train=True, keep_given=any(wanted["microbatches"]))
        value, gradients = run(step, trees)
        made = {
            "stacked_params": [by_stage(x) for x in gradients.own],
            "first_params": gradients.first,
            "last_params": gradients.last,
            "microbatches": gradients.microbatches,
        }
        return value, {name: _spread(trees[name], made.get(name, [])) for name in NAMES}

    def backward(gradients: dict[str, Any], cotangent: Any) -> tuple[dict[str, Any]]:
        return (jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients),)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _perturbed(tree: Any) -> list[bool]:
    """Which leaves a gradient is asked of."""
    return [leaf.perturbed and is_differentiable(leaf.value) for leaf in jax.tree.leaves(tree)]


def _check_wanted(wanted: Mapping[str, list[bool]], *, has_loss: bool, has_first: bool) -> None:
    without = [] if not has_first else ["microbatches"]
    refused = [name for name in ("targets", "extras", *without) if any(wanted[name])]
    if refused or not has_loss:
        raise NotImplementedError(
            f"pipeline: the gradient of {', '.join(refused) or 'outputs'} is not there; with "
            "loss_fn there are those of all parameters, and of microbatches without first_fn. "
            "jax.lax.stop_gradient(x) says that x has none"
        )


def _spread(tree: Any, gradients: list[Any]) -> Any:
    """Gradients in the place of the leaves that have any, `None` elsewhere."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(gradients)
    placed = [next(rest, None) if is_differentiable(leaf) else None for leaf in leaves]
    return jax.tree.unflatten(structure, placed)
