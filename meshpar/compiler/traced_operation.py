"""One of Paddle's operations traced for given shapes and attributes: the flows of its program."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.compiler.flows import Flows, flows_of
from meshpar.compiler.operations.registry import LocalCall, Operation, infer_reference, named
from meshpar.compiler.program import program_of

__all__ = ["Nested", "TracedOperation", "flat", "mapped", "runs_on_blocks", "traced_operation"]

Shape = tuple[int, ...]
Nested = (
    Any  # a tensor's entry, or a list of them: an argument of Paddle's may be a list of tensors
)
_KINDS: dict[str, Any] = {"f": np.float32, "i": np.int32, "b": np.bool_}


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """An operation for given shapes and attributes.

    Args:
      name: its name, and as JSON the `shapes` and `attrs` that it was traced for.
      flows: the ways in which it runs on blocks.
      averages: whether it divides by the number of the elements that it is given.
      call: the operation as a function.
      present: the flat positions of the inputs that are there.
      avals: shapes and dtypes of those.
      outputs: the shape of each result; `None` for one that is not there.
    """

    name: tuple[str, str, str]
    flows: Flows = field(compare=False)
    averages: bool = field(compare=False)
    call: _Call = field(compare=False)
    present: tuple[int, ...] = field(compare=False)
    avals: tuple[jax.ShapeDtypeStruct, ...] = field(compare=False)
    outputs: tuple[Shape | None, ...] = field(compare=False)

    @property
    def operation(self) -> Operation:
        """The operation."""
        return self.call.operation

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the inputs that are there."""
        return tuple(tuple(aval.shape) for aval in self.avals)

    @property
    def made(self) -> tuple[Shape, ...]:
        """The shapes of the results that are there."""
        return tuple(shape for shape in self.outputs if shape is not None)


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation with its attributes, as a function of the tensors that are there.

    Args:
      operation: the operation.
      arguments: for each argument the number of its tensor, or a list of such; `None` if absent.
      templates: the shapes of the results, if the operation takes them.
      attrs: its attributes.
    """

    operation: Operation
    arguments: list[Nested]
    templates: list[list[Shape]]
    attrs: dict[str, Any]

    def __call__(self, *xs: jax.Array) -> list[jax.Array | None]:
        picked = mapped(lambda i: None if i is None else xs[i], self.arguments)
        out = self.operation.form(*picked, *self.templates, **self.attrs)
        leaves = flat(out if isinstance(out, (list, tuple)) else [out])
        # A result that is an argument is an operation too: it may be had in any placement.
        return [jnp.copy(x) if any(x is y for y in xs) else x for x in leaves]

    def traced(self, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, tuple[Shape | None, ...]]:
        """The jaxpr of the results that are there, and the shapes of all."""
        found: list[Shape | None] = []

        def present(*xs: jax.Array) -> list[jax.Array]:
            out = self(*xs)
            found.extend(None if x is None else tuple(x.shape) for x in out)
            return [x for x in out if x is not None]

        with jax.numpy_rank_promotion("allow"):
            jaxpr = jax.make_jaxpr(present)(*avals)
        return jaxpr, tuple(found)


@lru_cache(maxsize=4096)
def traced_operation(name: str, shapes: str, attrs: str) -> TracedOperation:
    """An operation traced for shapes and attributes, both as JSON.

    Raises:
      NotImplementedError: there is no such operation.
      ValueError: the operation does not take these shapes and attributes.
    """
    operation = infer_reference(name)
    arguments: list[Nested] = []
    present: list[int] = []
    avals: list[jax.ShapeDtypeStruct] = []
    count = itertools.count()
    trees = [_shapes(entry) for entry in json.loads(shapes)]
    templates = trees[-1:] if operation.templates else []
    for position, argument in enumerate(trees[: len(trees) - len(templates)]):
        dtype = _KINDS[operation.kind(position)]

        def place(shape: Shape, position: int = position, dtype: Any = dtype) -> int | None:
            number = next(count)
            if position in operation.optional and shape in ((), (0,)):
                return None
            present.append(number)
            avals.append(jax.ShapeDtypeStruct(shape, dtype))
            return len(avals) - 1

        arguments.append(mapped(place, argument))
    call = _Call(operation, arguments, templates, named(json.loads(attrs)))
    try:
        jaxpr, outputs = call.traced(avals)
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"infer_forward({name!r}): the operation does not take inputs of shapes {shapes} with "
            f"attributes {attrs}: {error}"
        ) from error
    averages = operation.mean is not None and operation.mean(call.attrs)
    flows = flows_of(program_of(jaxpr))
    key = (name, shapes, attrs)
    return TracedOperation(key, flows, averages, call, tuple(present), tuple(avals), outputs)


def _shapes(entry: list[Any]) -> Nested:
    """A shape as a tuple, or a list of such for an argument of several tensors."""
    many = bool(entry) and isinstance(entry[0], list)
    return [tuple(shape) for shape in entry] if many else tuple(entry)


@lru_cache(maxsize=65536)
def runs_on_blocks(
    traced: TracedOperation, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]
) -> bool:
    """Whether an operation takes blocks of some shapes, and makes blocks of others of them.

    A rule may hold for an operation that one device cannot be asked for: of 4 groups of channels
    half of the channels are no 4 groups.
    """
    attrs, local = traced.call.attrs, traced.operation.local
    if local is not None:
        starts = tuple((0,) * len(shape) for shape in inputs)
        number = {position: i for i, position in enumerate(traced.present)}
        wholes, blocks, begins = (
            tuple(shapes[number[p]] if p in number else () for p in range(max(number) + 1))
            for shapes in (traced.shapes, inputs, starts)
        )
        attrs = local(attrs, LocalCall(wholes, blocks, outputs, begins))
    templates = [list(outputs)] if traced.call.templates else []
    call = _Call(traced.operation, traced.call.arguments, templates, attrs)
    avals = [
        jax.ShapeDtypeStruct(shape, aval.dtype)
        for shape, aval in zip(inputs, traced.avals, strict=True)
    ]
    try:
        _, made = call.traced(avals)
    except (TypeError, ValueError, IndexError, ZeroDivisionError):
        return False
    return tuple(shape for shape in made if shape is not None) == outputs


def mapped(fn: Callable[[Any], Any], tree: Nested) -> Nested:
    """`fn` on the leaves of nested lists."""
    return [mapped(fn, x) for x in tree] if isinstance(tree, list) else fn(tree)


def flat(tree: Nested) -> list[Any]:
    """The leaves of nested lists and tuples."""
    return [y for x in tree for y in flat(x)] if isinstance(tree, (list, tuple)) else [tree]
