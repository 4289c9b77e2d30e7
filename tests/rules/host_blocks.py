"""Blocks of values, made and read on the host, without the package's own storage.

Contributions of a pending reduction are unequal, and padding holds garbage.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from meshpar.placements.blocks import block_of, local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.types import ReduceType

Sizes = Mapping[str, int]

SUM, AVG, MAX = ReduceType.kRedSum, ReduceType.kRedAvg, ReduceType.kRedMax
MIN, PROD = ReduceType.kRedMin, ReduceType.kRedProd
ANY, ALL = ReduceType.kRedAny, ReduceType.kRedAll


def coordinates(sizes: Sizes) -> list[dict[str, int]]:
    """The coordinate of each device, in the order of the mesh."""
    ranges = (range(n) for n in sizes.values())
    return [dict(zip(sizes, c, strict=True)) for c in itertools.product(*ranges)]


def garbage(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """What padding holds: values that no result may depend on."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return rng.choice(np.array([limits.min, limits.max], dtype), shape)
    with np.errstate(over="ignore"):
        return rng.choice(np.array([np.nan, 1e30, -1e30]), shape).astype(dtype)


@np.errstate(over="ignore")
def contributions(
    value: np.ndarray, kind: ReduceType, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Unequal terms, exactly reducing to the value where it holds eighths of small numbers.

    Some are as far off as they can be: terms of integers that wrap around, neutral elements.
    """
    whole = jnp.issubdtype(value.dtype, jnp.integer)
    if kind in (SUM, AVG):
        limits = jnp.iinfo(value.dtype) if whole else None
        terms = [
            rng.integers(limits.min, limits.max, value.shape, value.dtype, endpoint=True)
            if limits and rng.random() < 0.5
            else rng.integers(-4, 5, value.shape).astype(value.dtype)
            for _ in range(count - 1)
        ]
        total = value * np.asarray(count, value.dtype) if kind is AVG else value
        return [*terms, (total - sum(terms)).astype(value.dtype)]
    if kind is PROD:
        factors = [1, -1] if whole else [1, 2, 0.5]
        terms = [rng.choice(factors, value.shape).astype(value.dtype) for _ in range(count - 1)]
        if whole:
            return [*terms, value * math.prod(terms)]
        return [*terms, (value / math.prod(terms)).astype(value.dtype)]
    owner = rng.integers(0, count, value.shape)
    if value.dtype == np.bool_:
        other = np.full(value.shape, kind in (ALL, MIN))
    else:
        step = rng.integers(1, 5, value.shape).astype(value.dtype)
        if whole:
            limits, wide = jnp.iinfo(value.dtype), value.astype(np.int64)
            room = wide - limits.min if kind is MAX else limits.max - wide
            step = np.minimum(step, room).astype(value.dtype)
        other = value - step if kind is MAX else value + step
        neutral = _neutral(kind, value.dtype)  # as the value itself may be, over a second axis
        nothing = (rng.random(value.shape) < 0.3) | (value == neutral)
        other = np.where(nothing, neutral, other)
    return [np.where(owner == i, value, other) for i in range(count)]


def _neutral(kind: ReduceType, dtype: np.dtype) -> np.ndarray:
    """What a device may have that has nothing of a maximum or a minimum."""
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return np.asarray(limits.min if kind is MAX else limits.max, dtype)
    return np.asarray(-np.inf if kind is MAX else np.inf, dtype)


def blocks_of(value: np.ndarray, layout: Layout, sizes: Sizes, seed: int) -> np.ndarray:
    """The block of each device, stacked; pending reductions split, padding filled with garbage."""
    rng = np.random.default_rng(seed)
    terms: dict[tuple[int, ...], np.ndarray] = {(): value}
    pending = [axis for axis in sizes if axis in layout.partial_axes]
    for axis in pending:
        kind = layout.kind_of(axis)
        terms = {
            (*at, i): term
            for at, one in terms.items()
            for i, term in enumerate(contributions(one, kind, sizes[axis], rng))
        }
    extra = value.ndim - layout.ndim  # the words of a key
    shape = value.shape[: layout.ndim]
    local = (*local_shape(shape, layout, sizes), *value.shape[layout.ndim :])
    out = []
    for at in coordinates(sizes):
        box = (*block_of(shape, layout, sizes, at), *(slice(None),) * extra)
        part = terms[tuple(at[axis] for axis in pending)][box]
        block = garbage(local, value.dtype, rng)
        block[tuple(slice(0, n) for n in part.shape)] = part
        out.append(block)
    return np.stack(out)


_REDUCE: dict[ReduceType, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    SUM: lambda terms: sum(terms[1:], terms[0]),
    AVG: lambda terms: sum(terms[1:], terms[0]) / np.asarray(len(terms), terms[0].dtype),
    MAX: lambda terms: np.maximum.reduce(terms),
    MIN: lambda terms: np.minimum.reduce(terms),
    PROD: lambda terms: np.multiply.reduce(terms, dtype=terms[0].dtype),
    ANY: lambda terms: np.logical_or.reduce(terms),
    ALL: lambda terms: np.logical_and.reduce(terms),
}


def fault(
    blocks: np.ndarray, expected: np.ndarray, layout: Layout, sizes: Sizes, tolerance: float
) -> str:
    """What is wrong with the blocks of a result, or an empty string."""
    extra = expected.ndim - layout.ndim
    shape = expected.shape[: layout.ndim]
    local = (*local_shape(shape, layout, sizes), *expected.shape[layout.ndim :])
    if blocks.shape[1:] != local:
        return f"local shape {blocks.shape[1:]}, not {local}"
    if blocks.dtype != expected.dtype:
        return f"dtype {blocks.dtype}, not {expected.dtype}"
    pending = [axis for axis in sizes if axis in layout.partial_axes]
    everywhere = coordinates(sizes)
    held = {tuple(at.values()): block for at, block in zip(everywhere, blocks, strict=True)}
    for axis in reversed(pending):
        position, kind = list(sizes).index(axis), layout.kind_of(axis)
        for at in list(held):
            if at[position] == 0:
                group = [(*at[:position], i, *at[position + 1 :]) for i in range(sizes[axis])]
                with np.errstate(all="ignore"):
                    whole = _REDUCE[kind]([held[one] for one in group])
                held.update(dict.fromkeys(group, whole))
    for at in everywhere:
        box = (*block_of(shape, layout, sizes, at), *(slice(None),) * extra)
        want = expected[box]
        got = held[tuple(at.values())][tuple(slice(0, n) for n in want.shape)]
        if not _close(got, want, tolerance):
            got_text, want_text = (np.array2string(y, threshold=12) for y in (got, want))
            return f"at {at}: {got_text}, not {want_text}"
    return ""


def _close(got: np.ndarray, want: np.ndarray, tolerance: float) -> bool:
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return np.array_equal(got, want)
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    scale = np.abs(want[np.isfinite(want)]).max(initial=1.0)
    return np.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
