"""`Operation`: one of Paddle's operations as a JAX function, and the table of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

__all__ = ["OPERATIONS", "LocalCall", "Operation", "infer_reference", "operation"]

Shape = tuple[int, ...]
Attrs = dict[str, Any]  # attributes are of any type, as Paddle's are


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One device's call, as far as attributes depend on it.

    Args:
      wholes: the global shape of each input.
      inputs: the shape of each block that it is given.
      outputs: the shape of each block that it makes.
      starts: for each input the global index at which its block begins.
    """

    wholes: tuple[Shape, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    starts: tuple[Shape, ...]


Local = Callable[[Attrs, LocalCall], Attrs]
Bound = Callable[[Sequence[Shape], Attrs], int]


@dataclass(frozen=True, slots=True)
class Operation:
    """One of Paddle's operations.

    Args:
      form: `(*tensors, **attributes) -> tensors`; a list of tensors is one argument, an optional
        one that is absent is `None`. What is absent of the results is `None` as well.
      kinds: the dtype of each argument, a letter each, the last for all that follow: `f` float,
        `i` index, `b` boolean.
      optional: the positions of arguments that may be absent.
      bound: indices are below it.
      local: the attributes of one device's call, where they are not those of the whole.
      located: whether the operation runs right on blocks once it knows where they begin.
      mean: whether it divides by the number of elements that it is given, which may depend on the
        attributes: then what is pending is an average of the devices' results.
      shape_only: whether it reads no values of its first argument, which may stay pending.
      templates: whether the last argument only gives the shapes of the results.
    """

    form: Callable[..., Any]
    kinds: str = "f"
    optional: frozenset[int] = frozenset()
    bound: Bound | None = None
    local: Local | None = None
    located: bool = False
    mean: Callable[[Attrs], bool] | None = None
    shape_only: bool = False
    templates: bool = False

    def kind(self, position: int) -> str:
        """The kind of one argument."""
        return self.kinds[min(position, len(self.kinds) - 1)]


OPERATIONS: dict[str, Operation] = {}

# One attribute under its names in the registry and in programs.
_SAME = {
    "keepdim": "keep_dim",
    "keepdims": "keep_dim",
    "transpose_x": "trans_x",
    "transpose_y": "trans_y",
}


def operation(names: str, **fields: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated form under Paddle's names, separated by blanks.

    Args:
      names: as in Paddle's registry of rules.
      **fields: the other fields of `Operation`.
    """

    def decorate(form: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            assert name not in OPERATIONS, f"operation {name!r} is registered twice"
            OPERATIONS[name] = Operation(form, **fields)
        return form

    return decorate


def infer_reference(name: str) -> Operation:
    """The JAX form of one of Paddle's operations, which is what `infer_forward` traces.

    Args:
      name: as Paddle's registry of rules has it; a leading `pd_op.` is left out of account, and
        `_grad` at the end asks for the gradient: its arguments are those of the operation and the
        gradients of its results, its results the gradients of its float arguments.

    Raises:
      NotImplementedError: there is no such operation here.

    Example:
      >>> import jax.numpy as jnp
      >>> infer_reference("matmul").form(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
      (2, 4)
    """
    name = name.removeprefix("pd_op.")
    found = OPERATIONS.get(name)
    if found is None and name.removesuffix("_grad") in OPERATIONS:
        return gradient_of(OPERATIONS[name.removesuffix("_grad")])
    if found is None:
        raise NotImplementedError(
            f"infer_reference({name!r}): no such operation; there are {len(OPERATIONS)}: "
            f"{', '.join(sorted(OPERATIONS))}"
        )
    return found


@cache
def gradient_of(operation: Operation) -> Operation:
    """The operation that computes an operation's gradient, differentiated by JAX."""

    def form(*args: Any, **attrs: Any) -> list[Any]:
        count = len(inspect.signature(operation.form).parameters) - _attributes(operation.form)
        tensors, grads = args[:count], args[count:]
        moving = [i for i in range(count) if operation.kind(i) == "f" and tensors[i] is not None]

        def of_floats(*floats: Any) -> list[Any]:
            replaced = dict(zip(moving, floats, strict=True))
            out = operation.form(*(replaced.get(i, x) for i, x in enumerate(tensors)), **attrs)
            listed = out if isinstance(out, (list, tuple)) else [out]
            return [x for x in listed if x is not None][: len(grads)]

        _, pull = jax.vjp(of_floats, *(tensors[i] for i in moving))
        return [leaf for grad in pull(list(grads)) for leaf in jax.tree.leaves(grad)]

    kinds = operation.kinds
    count = len(inspect.signature(operation.form).parameters) - _attributes(operation.form)
    padded = kinds + kinds[-1] * (count - len(kinds))
    return Operation(
        form, padded[:count] + "f", operation.optional, operation.bound, located=operation.located
    )


def _attributes(form: Callable[..., Any]) -> int:
    """The number of parameters that are attributes: annotated otherwise than tensors are."""
    parameters = inspect.signature(form).parameters.values()
    return sum("Array" not in str(parameter.annotation) for parameter in parameters)


def named(attrs: Mapping[str, Any]) -> Attrs:
    """Attributes under the names that the forms have, lists as tuples."""
    return {
        _SAME.get(key, key): tuple(value) if isinstance(value, list) else value
        for key, value in attrs.items()
    }
