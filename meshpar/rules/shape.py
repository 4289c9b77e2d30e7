"""Rules of operations that move dims: transpose, broadcast, squeeze, reshape, stack, tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.rules.registry import rule_for
from meshpar.rules.rule import (
    EVERY_KIND,
    Aval,
    Dim,
    Emission,
    Params,
    Pass,
    Rule,
    einsum,
    letters,
)

Shape = tuple[int, ...]
_ANY_PENDING = (Pass(EVERY_KIND, (0,)),)


@rule_for("transpose")
def transpose(x: Aval, *, permutation: tuple[int, ...], **_: Any) -> Rule:
    """`ij->ji`."""
    names = letters(x.ndim)
    return einsum(([names], [[names[d] for d in permutation]]), (x,), passes=_ANY_PENDING)


@rule_for("squeeze")
def squeeze(x: Aval, *, dimensions: tuple[int, ...], **_: Any) -> Rule:
    """`i1->i`."""
    names = letters(x.ndim)
    kept = [n for d, n in enumerate(names) if d not in dimensions]
    return einsum(([names], [kept]), (x,), reduce=None, passes=_ANY_PENDING)


@rule_for("broadcast_in_dim")
def broadcast_in_dim(
    x: Aval, *dynamic: Aval, shape: Shape, broadcast_dimensions: tuple[int, ...], **_: Any
) -> Rule:
    """`i->ij`: dims that are made are free to be cut, each device makes its part."""
    names = letters(len(shape))
    operand: list[Dim] = [
        (names[d],) if size == shape[d] else ()
        for size, d in zip(x.shape, broadcast_dimensions, strict=True)
    ]

    def local(params: Params, ins: Sequence[Shape], outs: Sequence[Shape]) -> Params:
        return {**params, "shape": outs[0], "sharding": None}

    return Rule(
        operands=(tuple(operand),),
        results=(tuple((n,) for n in names),),
        sizes=dict(zip(names, shape, strict=True)),
        passes=_ANY_PENDING,
        local=local,
    )


@rule_for("iota")
def iota(*, dimension: int, shape: Shape, dtype: Any, **_: Any) -> Rule:
    """`->ij`: each device counts from where its block begins."""
    names = letters(len(shape))

    def emit(at: Emission) -> jax.Array:
        local = tuple(at.local_size(n) for n in names)
        if not at.is_cut(names[dimension]):
            return at.bind(shape=local, sharding=None)[0]
        # Counted as integers: a sum of two rounded numbers would be rounded again.
        counted = lax.broadcasted_iota(jnp.int32, local, dimension) + at.start(names[dimension])
        return counted.astype(dtype)

    return Rule(
        operands=(),
        results=(tuple((n,) for n in names),),
        sizes=dict(zip(names, shape, strict=True)),
        emit=emit,
    )


@rule_for("reshape")
def reshape(x: Aval, *, new_sizes: Shape, dimensions: Any = None, **_: Any) -> Rule:
    """Row-major reshape, as factors: (2, 4, 32) -> (8, 32) is `abc->(a b)c`.

    Walking both shapes from the major side, the greatest common divisor of what is left of the two
    dims at hand is a factor of both. Where nothing divides, dims are blocked up to the next place
    where both shapes have a boundary.
    """
    names, operand, result, blocked = _common_factors(tuple(x.shape), tuple(new_sizes))

    def local(params: Params, ins: Sequence[Shape], outs: Sequence[Shape]) -> Params:
        return {**params, "new_sizes": outs[0], "sharding": None}

    merged = {name for dim in (*operand, *result) if len(dim) > 1 for name in dim}
    return Rule(
        operands=(operand,),
        results=(result,),
        sizes=names,
        blocked=frozenset(names if dimensions is not None or 0 in new_sizes else blocked),
        even=frozenset(merged),
        passes=_ANY_PENDING,
        local=local,
    )


def _common_factors(
    old: Shape, new: Shape
) -> tuple[dict[str, int], tuple[Dim, ...], tuple[Dim, ...], set[str]]:
    """Factor sizes, the factors of the old and of the new dims, and which are blocked."""
    sizes: dict[str, int] = {}
    blocked: set[str] = set()
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in old], [[] for _ in new])

    def add(size: int, *places: tuple[int, int], block: bool = False) -> None:
        name = f"f{len(sizes)}"
        sizes[name] = size
        for side, dim in places:
            dims[side][dim].append(name)
        if block:
            blocked.add(name)

    i = j = 0  # the dims at hand
    a, b = (old or (1,))[0], (new or (1,))[0]  # what is left of them
    while i < len(old) and j < len(new):
        if a == b == 0:
            add(0, (0, i), (1, j), block=True)
            a = b = 1
        common = math.gcd(a, b)
        if common > 1:
            add(common, (0, i), (1, j))
            a, b = a // common, b // common
        elif a != 1 and b != 1:
            # Nothing divides: whole up to the next common boundary.
            add(a, (0, i), block=True)
            add(b, (1, j), block=True)
            left, right = a, b
            while left != right and (i + 1 < len(old) or j + 1 < len(new)):
                if (left < right and i + 1 < len(old)) or j + 1 == len(new):
                    i += 1
                    add(old[i], (0, i), block=True)
                    left *= old[i]
                else:
                    j += 1
                    add(new[j], (1, j), block=True)
                    right *= new[j]
            a = b = 1
        if a == 1:
            i += 1
            a = old[i] if i < len(old) else 1
        if b == 1:
            j += 1
            b = new[j] if j < len(new) else 1
    return sizes, _frozen(dims[0]), _frozen(dims[1]), blocked


def _frozen(dims: list[list[str]]) -> tuple[Dim, ...]:
    return tuple(tuple(dim) for dim in dims)


@rule_for("tile")
def tile(x: Aval, *, reps: Shape, **_: Any) -> Rule:
    """`i->(r i)`: each device repeats its operand as often as its part of the result has it."""
    names = letters(x.ndim)
    times = {f"{n}times": r for n, r in zip(names, reps, strict=True)}

    def local(params: Params, ins: Sequence[Shape], outs: Sequence[Shape]) -> Params:
        return {
            **params,
            "reps": tuple(o // max(i, 1) for i, o in zip(ins[0], outs[0], strict=True)),
        }

    moved = {n for n, r in zip(names, reps, strict=True) if r > 1}
    return Rule(
        operands=(tuple((n,) for n in names),),
        results=(tuple((f"{n}times", n) if n in moved else (n,) for n in names),),
        sizes={**dict(zip(names, x.shape, strict=True)), **times},
        even=frozenset({*moved, *(f"{n}times" for n in moved)}),
        passes=_ANY_PENDING,
        local=local,
    )


@rule_for("stack")
def stack(*xs: Aval, axis: int, **_: Any) -> Rule:
    """`i,i->ni`, with the new dim whole."""
    names = letters(xs[0].ndim)
    rule = einsum(([names] * len(xs), [[*names[:axis], "n", *names[axis:]]]), xs)
    pending = (Pass(EVERY_KIND, tuple(range(len(xs)))),)
    return replace(
        rule, sizes={**rule.sizes, "n": len(xs)}, blocked=frozenset({"n"}), passes=pending
    )


@rule_for("unstack")
def unstack(x: Aval, *, axis: int, **_: Any) -> Rule:
    """`ni->i,i`, with the dim that goes whole."""
    names = letters(x.ndim)
    kept = [n for d, n in enumerate(names) if d != axis]
    count = x.shape[axis]
    return einsum(
        ([names], [kept] * count), (x,), reduce=None, blocked=[names[axis]], passes=_ANY_PENDING
    )


@rule_for("empty2", "empty", "platform_index")
def made(*, shape: Shape = (), **_: Any) -> Rule:
    """`->`: scalars that are made of nothing."""
    names = letters(len(shape))
    return Rule(
        (),
        (tuple((n,) for n in names),),
        dict(zip(names, shape, strict=True)),
        blocked=frozenset(names),
    )
