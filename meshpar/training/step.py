"""What a `DistModel` computes: a training step, an evaluation and a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.training.adapters import Adapter
from meshpar.training.pipeline_options import Pipeline
from meshpar.training.pipelined import pipelined
from meshpar.training.state import Arrays, Slots

__all__ = ["Partitioner", "Recipe", "State", "body", "forward_of", "mean_of", "updated"]

Partitioner = Literal["meshpar", "xla"]
Tree = Any  # a pytree of arrays, whose type is the user's


class State(NamedTuple):
    """The state of training as storage arrays, in the order of the slots."""

    params: Arrays
    rest: Arrays
    opt: Arrays


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a step is made of, but for the batch."""

    adapter: Adapter
    loss: Callable[..., jax.Array] | None
    tx: optax.GradientTransformation | None
    params: Slots
    rest: Slots
    opt: Slots | None
    grads: Slots | None  # where gradients shall lie before the update; None leaves it to XLA
    num_labels: int  # how many of the arguments, from the last, are labels
    partitioner: Partitioner = "meshpar"
    pipeline: Pipeline | None = None


def body(recipe: Recipe, mode: str, batch: Slots) -> Callable[..., Tree]:
    """What a mode computes, from logical values: `(params, rest, opt, args) -> result`.

    Args:
      recipe: what it is made of.
      mode: "train", "eval" or "predict".
      batch: where the arguments lie.

    The result is (params, rest, opt, loss) in mode "train", the loss in mode "eval", and the
    outputs in mode "predict".
    """

    def train(params: Tree, rest: Tree, opt: Tree, args: Sequence[Any]) -> Tree:
        return _train(recipe, batch, params, rest, opt, args)

    def evaluate(params: Tree, rest: Tree, opt: Tree, args: Sequence[Any]) -> jax.Array:
        return mean_of(forward(forward_of(recipe, mode), params, rest, args))

    def predict(params: Tree, rest: Tree, opt: Tree, args: Sequence[Any]) -> Tree:
        return forward(forward_of(recipe, mode), params, rest, args)

    def forward(of: Callable[..., Any], params: Tree, rest: Tree, args: Sequence[Any]) -> Any:
        if recipe.pipeline is None:
            return of(params, rest, args)[0]
        given = (recipe.params, params), rest, (batch, args)
        return pipelined(recipe.pipeline, of, *given, train=False)[0]

    return {"train": train, "eval": evaluate, "predict": predict}[mode]


def forward_of(recipe: Recipe, mode: str) -> Callable[..., tuple[Any, Tree]]:
    """The forward pass of a mode: `(params, rest, args) -> (result, rest)`."""
    if mode == "predict":
        return partial(recipe.adapter.apply, train=False)
    return partial(_loss, recipe, train=mode == "train")


def _train(
    recipe: Recipe, batch: Slots, params: Tree, rest: Tree, opt: Tree, args: Sequence[Any]
) -> Tree:
    forward = forward_of(recipe, "train")

    def objective(params: Tree) -> tuple[jax.Array, Tree]:
        loss, after = forward(params, rest, args)
        return mean_of(loss), after

    if recipe.pipeline is None:
        (loss, rest), grads = jax.value_and_grad(objective, has_aux=True)(params)
    else:
        given = (recipe.params, params), rest, (batch, args)
        loss, rest, grads = pipelined(recipe.pipeline, forward, *given, train=True)
        loss = mean_of(loss)
    params, opt = updated(recipe, params, opt, grads, loss)
    return params, rest, opt, loss


def updated(
    recipe: Recipe, params: Tree, opt: Tree, grads: Tree, loss: jax.Array
) -> tuple[Tree, Tree]:
    """Parameters and optimizer state after an update."""
    assert recipe.tx is not None, "train() checks the optimizer"
    if recipe.grads is not None:
        grads = recipe.grads.annotated(grads)
    # Optimizers that look at the loss take it by name; the others ignore it.
    update = optax.with_extra_args_support(recipe.tx).update
    updates, state = update(grads, opt["opt"], params, value=loss, grad=grads)
    return optax.apply_updates(params, updates), {"opt": state}


def _loss(
    recipe: Recipe, params: Tree, rest: Tree, args: Sequence[Any], *, train: bool
) -> tuple[Any, Tree]:
    """The loss, a scalar or `(sum, count)`, and the rest."""
    split = len(args) - recipe.num_labels
    inputs, labels = args[:split], args[split:]
    outputs, rest = recipe.adapter.apply(params, rest, inputs, train=train)
    if recipe.loss is None:
        value = outputs
    elif recipe.adapter.whole_batch:
        value = recipe.loss(outputs, *inputs)
    else:
        several = isinstance(outputs, (tuple, list))
        value = recipe.loss(*(outputs if several else (outputs,)), *labels)
    if isinstance(value, tuple) and [getattr(x, "shape", None) for x in value] == [(), ()]:
        total, count = value
        return (jnp.asarray(total), jax.lax.stop_gradient(jnp.asarray(count, total.dtype))), rest
    shape = getattr(value, "shape", None)
    if shape != ():
        got = f"of shape {shape}" if shape is not None else f"a {type(value).__name__}"
        raise ValueError(
            f"{'the model' if recipe.loss is None else 'loss'} returns {got}, and the loss must be "
            "a scalar array, such as a mean, or (sum, count)"
            + ("; give loss= to make one of the outputs" if recipe.loss is None else "")
        )
    return jnp.asarray(value), rest


def mean_of(loss: Any) -> jax.Array:
    """A loss as one number."""
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss
