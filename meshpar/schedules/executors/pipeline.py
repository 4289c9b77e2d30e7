"""`mp.pipeline`: a model in equal stages, run under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from meshpar._jax import is_tracer, value_behind
from meshpar.compiler.arguments import mesh_for
from meshpar.errors import MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.schedules.actions import Costs
from meshpar.schedules.executors.arguments import NAMES, Functions, layouts_of
from meshpar.schedules.executors.call import Asked, call_for
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
    executor: Literal["program", "mpmd", "auto"] = "program",
    costs: Costs | None = None,
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
      executor: `"program"`: one program scans the table's ticks; its size does not depend on M, and
        ranks wait for each other in every tick. `"mpmd"`: the host runs each action as a program of
        its rank, which waits for the values it takes only; for calls outside `jax.jit`, in one
        process. `"auto"`: the one that takes less time by the simulator's two clocks and `costs`;
        the same costs give the same choice, and inside `jax.jit` it is `"program"`.
      costs: seconds of a stage's actions and of a hop, for both kinds of `"auto"`. Without them
        `schedule="auto"` takes F = I = W, and `executor="auto"` estimates by a model of the device.

    Returns:
      With `loss_fn` the mean of the microbatches' losses. `jax.grad` and `jax.value_and_grad` of it
      run forward and backward passes in the table's order; without them forward passes are run.
      Without `loss_fn` what `last_fn` returns, of shape `(M, ...)`; it cannot be differentiated.
      Combined actions of a table run one after the other. Call it inside `jax.jit`, or outside with
      any executor: then what is compiled serves all calls with the same functions (or new ones of
      the same code that close over the same objects), shapes and placements.

    Raises:
      PipelineError: stages, microbatches or a schedule that do not fit each other; `"mpmd"` inside
        `jax.jit`.
      PlacementError: placements that do not fit.
      MeshError: no mesh, or it has no such axis.
      NotImplementedError: a gradient of `targets`, of `extras`, of `microbatches` under `first_fn`
        or of anything without `loss_fn`; a plan that would send a stage's blocks around a ring; or
        `"mpmd"` over several processes.

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
    if executor not in ("program", "mpmd", "auto"):
        raise ValueError(f"pipeline(executor={executor!r}): it is 'program', 'mpmd' or 'auto'")
    values = (stacked_params, first_params, last_params, microbatches, targets, extras)
    trees = dict(zip(NAMES, values, strict=True))
    # Outside jax.jit arrays are known, also those that jax.grad follows.
    known = jax.tree.map(value_behind, trees)
    try:
        mesh = mesh_for(jax.tree.leaves(known), mesh, "pipeline")
        mesh.axis_index(axis)
        asked = Asked(
            Functions(stage_fn, first_fn, last_fn, loss_fn),
            schedule,
            mesh,
            axis,
            recompute=recompute,
            executor=executor,
            costs=costs,
        )
        layouts = layouts_of(known, in_placements or {}, mesh, axis)
        traced = any(map(is_tracer, jax.tree.leaves(known)))
        call = call_for(asked, known, layouts, once=traced)
    except MeshparError as error:
        raise error if str(error).startswith("pipeline") else error.within("pipeline") from None
    return call(trees)
