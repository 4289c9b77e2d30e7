"""One face for the three forms of a model: flax nnx, flax linen, and a pure function.

An adapter splits a model into its parameters (what gradients are taken of) and the rest (running
statistics, random state), two pytrees, and runs it as a pure function of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import linen, nnx

from meshpar.training.paths import named_leaves

__all__ = ["Adapter", "adapt"]

Tree = Any  # a pytree of arrays, whose type is the user's


class Adapter(Protocol):
    """A model as a pure function.

    Attributes:
      params: the parameters as the user holds them; a pytree.
      rest: all other state; a pytree.
      whole_batch: the loss takes (outputs, batch), not (*outputs, *labels).
      name: the model's name in messages.
      inputs: the signature of a call with the inputs alone.
    """

    params: Tree
    rest: Tree
    whole_batch: bool
    name: str
    inputs: inspect.Signature

    def apply(
        self, params: Tree, rest: Tree, inputs: Sequence[Any], *, train: bool
    ) -> tuple[Any, Tree]:
        """The outputs, and the rest after the call."""
        ...

    def merge(self, params: Tree, rest: Tree) -> Any:
        """A model of the user's form that holds these values."""
        ...

    def write_back(self, params: Tree, rest: Tree) -> None:
        """Puts these values into the user's model.

        Raises:
          TypeError: the model is immutable.
        """
        ...


def adapt(model: Any) -> Adapter:
    """The adapter of a model.

    Args:
      model: an `nnx.Module`; `(linen.Module, variables)` or `(linen.Module, variables, rngs)`;
        `(apply, params)` with a function `apply(params, batch)`.

    Raises:
      TypeError: something else.
      ValueError: it has no parameters.
    """
    adapter: Adapter
    match model:
        case nnx.Module():
            adapter = NnxAdapter(model)
        case (linen.Module() as module, Mapping() as variables):
            adapter = LinenAdapter(module, variables, {"dropout": jax.random.key(0)})
        case (linen.Module() as module, Mapping() as variables, Mapping() as rngs):
            adapter = LinenAdapter(module, variables, rngs)
        case (apply, params) if callable(apply) and not isinstance(apply, (linen.Module, type)):
            adapter = FunctionAdapter(apply, params)
        case _:
            raise TypeError(
                f"to_static(model): model is a {type(model).__name__}; it takes an nnx.Module, "
                "(linen module, variables), or (apply, params) with a function apply(params, batch)"
            )
    leaves = named_leaves(adapter.params)
    if not leaves:
        raise ValueError(
            f"to_static(model): {adapter.name} has no parameters, so there is nothing to place or "
            "to train; parameters are nnx.Param variables, variables['params'] of a linen module, "
            "and the leaves of params in (apply, params)"
        )
    for name, leaf in (*leaves, *named_leaves(adapter.rest)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"to_static(model): {name!r} of {adapter.name} is a shape without a value; "
                "mp.create_sharded(build, mesh) makes the values where they belong"
            )
    return adapter


class NnxAdapter:
    """Parameters are the `nnx.Param` variables; everything else but intermediates is the rest."""

    whole_batch = False

    def __init__(self, model: nnx.Module) -> None:
        self.name = type(model).__name__
        self.inputs = inspect.signature(model.__call__)
        self._model = model
        # Modules of the copy are new objects and its variables the user's: train() and eval() set
        # attributes of modules only, and nothing here assigns to a variable.
        copy = nnx.merge(*nnx.split(model))
        nnx.pop(copy, nnx.Intermediate)
        copy.eval()
        self._eval = nnx.graphdef(copy)
        copy.train()
        self._train, self.params, self.rest = nnx.split(copy, nnx.Param, ...)

    def apply(
        self, params: Tree, rest: Tree, inputs: Sequence[Any], *, train: bool
    ) -> tuple[Any, Tree]:
        # Copies of the variables: theirs are of the trace around jax.grad, and could not change.
        model = nnx.merge(self._train if train else self._eval, params, rest, copy=True)
        outputs = model(*inputs)
        _, _, _, after = nnx.split(model, nnx.Param, nnx.Intermediate, ...)
        before, now = jax.tree.structure(rest), jax.tree.structure(after)
        if before != now:
            names = {name for name, _ in named_leaves(after)}
            changed = names ^ {name for name, _ in named_leaves(rest)}
            raise ValueError(
                f"{self.name}: the forward pass creates or removes the state "
                f"{', '.join(sorted(changed))}; create it in __init__, or as nnx.Intermediate"
            )
        return outputs, after

    def merge(self, params: Tree, rest: Tree) -> nnx.Module:
        return nnx.merge(self._train, params, rest)

    def write_back(self, params: Tree, rest: Tree) -> None:
        nnx.update(self._model, params, rest)


class LinenAdapter:
    """Parameters are `variables["params"]`; the rest is the other collections and random keys.

    Each training step folds its number into the keys. `train`, `training`, `deterministic` and
    `use_running_average` are passed where the module's `__call__` has them.
    """

    whole_batch = False

    def __init__(
        self, module: linen.Module, variables: Mapping[str, Any], rngs: Mapping[str, jax.Array]
    ) -> None:
        self.name = type(module).__name__
        self._module = module
        self.params = variables.get("params", {})
        collections = {name: v for name, v in variables.items() if name != "params"}
        self.rest = {
            "collections": collections,
            "rngs": dict(rngs),
            "steps": jnp.zeros((), jnp.uint32),
        }
        signature = inspect.signature(module.__call__)
        takes = signature.parameters
        self._switches = {name: on for name, on in _LINEN_SWITCHES.items() if name in takes}
        self.inputs = signature.replace(
            parameters=[p for name, p in takes.items() if name not in self._switches]
        )

    def apply(
        self, params: Tree, rest: Tree, inputs: Sequence[Any], *, train: bool
    ) -> tuple[Any, Tree]:
        variables = {"params": params, **rest["collections"]}
        switches: dict[str, Any] = {name: on == train for name, on in self._switches.items()}
        if not train:
            return self._module.apply(variables, *inputs, **switches), rest
        rngs = {name: jax.random.fold_in(key, rest["steps"]) for name, key in rest["rngs"].items()}
        outputs, changed = self._module.apply(
            variables, *inputs, **switches, rngs=rngs, mutable=list(rest["collections"])
        )
        collections = {**rest["collections"], **changed}
        return outputs, {**rest, "collections": collections, "steps": rest["steps"] + 1}

    def merge(self, params: Tree, rest: Tree) -> tuple[linen.Module, dict[str, Any]]:
        return self._module, {"params": params, **rest["collections"]}

    def write_back(self, params: Tree, rest: Tree) -> None:
        raise TypeError(
            "sync(): a linen module's variables are the caller's own dict; dm.model[1] holds the "
            "current ones"
        )


# Switch of a linen module -> its value in training.
_LINEN_SWITCHES = {
    "train": True,
    "training": True,
    "deterministic": False,
    "use_running_average": False,
}


class FunctionAdapter:
    """`apply(params, batch)`; it has no other state, and the loss takes (outputs, batch)."""

    whole_batch = True

    def __init__(self, apply: Callable[[Any, Any], Any], params: Tree) -> None:
        self.name = getattr(apply, "__name__", type(apply).__name__)
        self.params, self.rest = params, {}
        self._apply = apply
        batch = inspect.Parameter("batch", inspect.Parameter.POSITIONAL_ONLY)
        self.inputs = inspect.Signature([batch])

    def apply(
        self, params: Tree, rest: Tree, inputs: Sequence[Any], *, train: bool
    ) -> tuple[Any, Tree]:
        return self._apply(params, *inputs), rest

    def merge(self, params: Tree, rest: Tree) -> tuple[Callable[[Any, Any], Any], Tree]:
        return self._apply, params

    def write_back(self, params: Tree, rest: Tree) -> None:
        raise TypeError(
            "sync(): the params of (apply, params) are the caller's own pytree; dm.model[1] holds "
            "the current ones"
        )
