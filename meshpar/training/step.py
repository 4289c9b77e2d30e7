"""The three programs of a `DistModel`: a training step, an evaluation and a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from meshpar.training.adapters import Adapter
from meshpar.training.state import Arrays, Slots

__all__ = ["Recipe", "State", "program"]

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


def program(recipe: Recipe, mode: str, batch: Slots) -> Wrapped:
    """The jitted program of a mode: `(state, batch arrays) -> result`.

    The result is (state, loss) in mode "train", whose state is donated, the loss in mode "eval",
    and the outputs in mode "predict".
    """
    whole = NamedSharding(batch.mesh.jax_mesh, PartitionSpec())

    def train(state: State, arrays: Arrays) -> tuple[State, jax.Array]:
        return _train(recipe, state, batch.unpack(arrays))

    def evaluate(state: State, arrays: Arrays) -> jax.Array:
        params, rest = recipe.params.unpack(state.params), recipe.rest.unpack(state.rest)
        return _loss(recipe, params, rest, batch.unpack(arrays), train=False)[0]

    def predict(state: State, arrays: Arrays) -> Tree:
        params, rest = recipe.params.unpack(state.params), recipe.rest.unpack(state.rest)
        return recipe.adapter.apply(params, rest, batch.unpack(arrays), train=False)[0]

    if mode == "train":
        assert recipe.opt is not None, "train() checks the optimizer"
        state = (recipe.params.shardings, recipe.rest.shardings, recipe.opt.shardings)
        return jax.jit(train, donate_argnums=0, out_shardings=(State._make(state), whole))
    return jax.jit(evaluate, out_shardings=whole) if mode == "eval" else jax.jit(predict)


def _train(recipe: Recipe, state: State, args: Sequence[Any]) -> tuple[State, jax.Array]:
    assert recipe.tx is not None and recipe.opt is not None, "train() checks the optimizer"
    params, rest = recipe.params.unpack(state.params), recipe.rest.unpack(state.rest)

    def objective(params: Tree) -> tuple[jax.Array, Tree]:
        return _loss(recipe, params, rest, args, train=True)

    (loss, rest), grads = jax.value_and_grad(objective, has_aux=True)(params)
    if recipe.grads is not None:
        grads = recipe.grads.constrain(grads)
    opt = recipe.opt.unpack(state.opt)["opt"]
    # Optimizers that look at the loss take it by name; the others ignore it.
    update = optax.with_extra_args_support(recipe.tx).update
    updates, opt = update(grads, opt, params, value=loss, grad=grads)
    params = optax.apply_updates(params, updates)
    packed = State(
        recipe.params.pack(params), recipe.rest.pack(rest), recipe.opt.pack({"opt": opt})
    )
    return packed, loss


def _loss(
    recipe: Recipe, params: Tree, rest: Tree, args: Sequence[Any], *, train: bool
) -> tuple[jax.Array, Tree]:
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
    shape = getattr(value, "shape", None)
    if shape != ():
        got = f"of shape {shape}" if shape is not None else f"a {type(value).__name__}"
        raise ValueError(
            f"{'the model' if recipe.loss is None else 'loss'} returns {got}, and the loss must be "
            "a scalar array, such as a mean"
            + ("; give loss= to make one of the outputs" if recipe.loss is None else "")
        )
    return jnp.asarray(value), rest
