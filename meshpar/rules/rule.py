"""`Rule`: how the dims of one operation relate, without meshes, costs or devices.

A rule names *factors*. Each dim of an operand or a result is a factor, or several (major to minor,
as a reshape merges them), or none (a dim of size 1 that is broadcast). Cutting the operation along
a factor means cutting every dim that has it:

- a factor of operands and results passes through;
- a factor of operands only is reduced, and leaves the result pending that reduction;
- a *blocked* factor must be whole on each device (the sorted dim of `sort`).

Besides, a rule says which pending reductions pass through the operation (`Pass`), and what is
different for the local blocks: parameters that name sizes, or a program of its own (`Emit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.placements.reductions import takes
from meshpar.placements.types import ReduceType

__all__ = [
    "Aval",
    "Dim",
    "Emission",
    "Emit",
    "LocalParams",
    "Pass",
    "Rule",
    "addition",
    "einsum",
    "letters",
    "multilinear",
]


class Aval(Protocol):
    """Shape and dtype of a value, as `jax.core.ShapedArray` has them."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...  # a numpy dtype, or JAX's dtype of typed keys


Dim = tuple[str, ...]
"""The factors of one dim, major to minor."""
Dims = tuple[Dim, ...]
Shape = tuple[int, ...]
Params = dict[str, Any]  # what JAX calls an equation's parameters

SUM_LIKE = frozenset({ReduceType.kRedSum, ReduceType.kRedAvg})
MONOTONE = frozenset({ReduceType.kRedMax, ReduceType.kRedMin})
EVERY_KIND = frozenset(ReduceType)

LocalParams = Callable[[Params, Sequence[Shape], Sequence[Shape]], Params]
"""(parameters, local operand shapes, local result shapes) -> parameters on the local blocks."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Reductions that may stay pending through the operation.

    Args:
      kinds: the reductions.
      operands: if these operands are all pending one of them, the others not, so are the results.
    """

    kinds: frozenset[ReduceType]
    operands: tuple[int, ...]


class Emission(Protocol):
    """What a rule's own program may ask about where it runs."""

    def bind(self, *operands: jax.Array, **changed: Any) -> list[jax.Array]:
        """The operation on local blocks, with some parameters changed."""
        ...

    def is_cut(self, factor: str) -> bool:
        """Whether the factor is cut over some mesh axis."""
        ...

    def start(self, factor: str) -> jax.Array:
        """The global index at which this device's block of the factor begins, int32."""
        ...

    def valid(self, factor: str) -> jax.Array:
        """The number of rows of this device's block that are not padding, int32."""
        ...

    def local_size(self, factor: str) -> int:
        """The size of a block of the factor, padding included."""
        ...

    def size(self, factor: str) -> int:
        """The global size of the factor."""
        ...

    def all_reduce(self, x: jax.Array, factor: str, kind: ReduceType) -> jax.Array:
        """`x` reduced over the devices along the factor."""
        ...

    def all_gather(self, x: jax.Array, factor: str) -> jax.Array:
        """The `x` of all devices along the factor, stacked on a new leading dim."""
        ...

    def ranges(self, factor: str, size: int) -> tuple[tuple[int, int], ...]:
        """The rows (start, stop) of each device along it, of a dim of `size` cut like it."""
        ...

    def position(self, factor: str) -> jax.Array:
        """The place of this device among those along the factor, in the order of `ranges`."""
        ...

    def permute(self, x: jax.Array, factor: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """The `x` of the device that sends to this one; zeros where none of the pairs does."""
        ...

    @property
    def params(self) -> Params:
        """The operation's own parameters."""
        ...


Emit = Callable[..., "jax.Array | Sequence[jax.Array]"]
"""(emission, *local operands) -> local results, for operations that need to know where they are."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the dims of one operation relate; see the module's docstring.

    Args:
      operands: the dims of each operand.
      results: the dims of each result.
      sizes: the size of each factor.
      reduce: the reduction of each factor that is in no result.
      blocked: factors that must be whole.
      even: factors that can be cut only without padding.
      passes: pending reductions that pass through.
      contributes: reduced factor -> the operands that must be pending too when it is cut, because
        the operation adds them to what it reduces (the operand of scatter-add).
      local: how parameters that name sizes change for the local blocks.
      emit: the local program, where it is not the operation itself on the local blocks.
      exchanged: factors along which the local program itself sends rows between devices when they
        are cut. Their dims need not all have the factor's size.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, ReduceType] = field(default_factory=dict)
    blocked: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    passes: tuple[Pass, ...] = ()
    contributes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    local: LocalParams | None = None
    emit: Emit | None = None
    exchanged: frozenset[str] = frozenset()

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors along which the operation can be cut."""
        return tuple(f for f in self.sizes if f not in self.blocked and self.sizes[f] > 1)

    def notation(self) -> str:
        """The rule as an equation, such as `bmk,bkn->bmn`.

        Example:
          >>> import numpy as np
          >>> x = jax.core.ShapedArray((4, 8), np.float32)
          >>> einsum("ij->i", [x]).notation()
          'ij->i'
        """

        def text(dims: Dims) -> str:
            parts = ("".join(dim) if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)
            return "".join(part if part != "()" else "1" for part in parts)

        return f"{','.join(map(text, self.operands))}->{','.join(map(text, self.results))}"


def addition(dtype: Any) -> ReduceType | None:
    """The reduction that puts values together of which all but one are missing.

    `None` for what cannot be reduced, as PRNG keys.
    """
    kind = ReduceType.kRedAny if dtype == np.bool_ else ReduceType.kRedSum
    return kind if takes(kind, dtype) else None


def multilinear(*operands: Aval, result: Any = None) -> tuple[Pass, ...]:
    """The sums that may be pending through an operation that is linear in each operand.

    Integers wrap around at every step of a sum; only integers that are no wider wrap alike. Of
    floats with a short range (float16) a term's product overflows soon, where that of the sum does
    not. Sums and products of booleans are `or` and `and`.

    Args:
      operands: shape and dtype of each.
      result: the dtype of the result, where the operation's parameters name it.
    """
    return _linear_passes(tuple(operand.dtype for operand in operands), result)


@cache
def _linear_passes(dtypes: tuple[Any, ...], result: Any) -> tuple[Pass, ...]:
    out = jnp.dtype(jnp.result_type(*dtypes) if result is None else result)
    passes = list[Pass]()
    for i, dtype in enumerate(dtypes):
        kinds = SUM_LIKE
        if dtype == np.bool_:
            passing, kinds = out == np.bool_, frozenset({ReduceType.kRedAny})
        elif jnp.issubdtype(dtype, jnp.integer):
            whole = jnp.issubdtype(out, jnp.integer)
            passing = whole and jnp.iinfo(out).bits <= jnp.iinfo(dtype).bits
        else:
            passing = jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
        if passing:
            passes.append(Pass(kinds, (i,)))
    return tuple(passes)


def letters(count: int, start: int = 0) -> list[str]:
    """`count` distinct factor names: a, b, ..., z, a1, b1, ..."""
    names = (f"{chr(97 + i % 26)}{i // 26 or ''}" for i in range(start, start + count))
    return list(names)


def einsum(
    equation: str | tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
    avals: Sequence[Aval],
    *,
    reduce: ReduceType | None = ReduceType.kRedSum,
    blocked: Iterable[str] = (),
    even: Iterable[str] = (),
    passes: Sequence[Pass] = (),
    local: LocalParams | None = None,
    emit: Emit | None = None,
) -> Rule:
    """A rule in einsum notation: one letter per dim, equal letters are cut alike.

    Args:
      equation: `"mk,kn->mn"`, or (operands, results) with one list of letters each. A letter whose
        dim has size 1 in one operand and more in another is broadcast there, and not cut.
      avals: shapes and dtypes of the operands.
      reduce: the reduction of letters that are in no result.
      blocked: letters that must be whole on each device.
      even: letters that can be cut only without padding.
      passes: pending reductions that pass through.
      local: how parameters change for the local blocks.
      emit: the local program, where it is not the operation itself.
    """
    if isinstance(equation, str):
        lhs, rhs = equation.split("->")
        operands, results = lhs.split(","), rhs.split(",")
    else:
        operands, results = equation
    sizes: dict[str, int] = {}
    for names, aval in zip(operands, avals, strict=True):
        for name, size in zip(names, aval.shape, strict=True):
            # size 1 gives way to every other one, 0 included
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]

    def dims(names: Sequence[str], shape: Shape | None) -> Dims:
        return tuple(
            () if shape is not None and shape[i] == 1 and sizes[name] != 1 else (name,)
            for i, name in enumerate(names)
        )

    kept = {name for names in results for name in names}
    return Rule(
        operands=tuple(dims(n, tuple(a.shape)) for n, a in zip(operands, avals, strict=True)),
        results=tuple(dims(names, None) for names in results),
        sizes=sizes,
        reduce={} if reduce is None else {f: reduce for f in sizes if f not in kept},
        blocked=frozenset(blocked),
        even=frozenset(even),
        passes=tuple(passes),
        local=local,
        emit=emit,
    )
