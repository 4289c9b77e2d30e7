"""Reductions, running reductions, sorts and norms over dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.compiler.operations.elementwise import filled_like
from meshpar.compiler.operations.registry import OPERATIONS, Operation, operation

Array = jax.Array


def _dims(x: Array, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Dims as positive numbers; all of them for an empty list."""
    listed = (axis,) if isinstance(axis, int) else tuple(axis)
    return tuple(a % max(x.ndim, 1) for a in listed) or tuple(range(x.ndim))


def _reduction(reduce: Callable[..., Array]) -> Callable[..., Array]:
    def form(x: Array, axis: Sequence[int] = (), keep_dim: bool = False) -> Array:
        if x.ndim == 0:
            return reduce(x[None], axis=(0,), keepdims=False)
        return reduce(x, axis=_dims(x, axis), keepdims=keep_dim)

    return form


def _norm(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    return jnp.sqrt(jnp.sum(x * x, axis=axis, keepdims=keepdims))


_REDUCTIONS: dict[str, tuple[Callable[..., Array], str]] = {
    "all": (jnp.all, "b"),
    "amax": (jnp.max, "f"),
    "amin": (jnp.min, "f"),
    "any": (jnp.any, "b"),
    "frobenius_norm": (_norm, "f"),
    "max": (jnp.max, "f"),
    "min": (jnp.min, "f"),
    "prod": (jnp.prod, "f"),
    "reduce_max": (jnp.max, "f"),
    "reduce_sum": (jnp.sum, "f"),
    "sum": (jnp.sum, "f"),
}
for _name, (_reduce, _kind) in _REDUCTIONS.items():
    OPERATIONS[_name] = Operation(_reduction(_reduce), kinds=_kind)
for _name in ("mean", "mean_all"):
    OPERATIONS[_name] = Operation(_reduction(jnp.mean), mean=lambda attrs: True)


@operation("squared_l2_norm")
def squared_l2_norm(x: Array, axis: Sequence[int] | None = None, keep_dim: bool = False) -> Array:
    """The sum of squares over some dims; without any named, of all elements, as one in a list."""
    if axis is None:
        return jnp.sum(x * x).reshape(1)
    return _reduction(jnp.sum)(x * x, axis, keep_dim)


_BASE = (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.mean)


@operation("reduce_base", mean=lambda attrs: attrs.get("reduce_type") == 4)
def reduce_base(
    x: Array, axis: Sequence[int] = (), keep_dim: bool = False, reduce_type: int = 0
) -> Array:
    """The reduction of a number: 0 sum, 1 max, 2 min, 3 prod, 4 mean."""
    return _reduction(_BASE[reduce_type])(x, axis, keep_dim)


@operation("logsumexp")
def logsumexp(
    x: Array, axis: Sequence[int] = (), keep_dim: bool = False, reduce_all: bool = False
) -> Array:
    """The logarithm of a sum of exponentials."""
    dims = _dims(x, () if reduce_all else axis)
    return jax.scipy.special.logsumexp(x, axis=dims, keepdims=keep_dim)


@operation("p_norm")
def p_norm(
    x: Array,
    porder: float = 2.0,
    axis: int = -1,
    epsilon: float = 1e-12,
    keep_dim: bool = False,
    asvector: bool = False,
) -> Array:
    """The p-norm along one dim, or of all elements."""
    dims = tuple(range(x.ndim)) if asvector else _dims(x, axis)
    total = jnp.sum(jnp.abs(x) ** porder, axis=dims, keepdims=keep_dim)
    return (total + epsilon) ** (1 / porder)


@operation("numel", shape_only=True)
def numel(x: Array) -> Array:
    """The number of elements: each device counts its own."""
    return jnp.sum(filled_like(x, 1, jnp.int32))


def _arg(extreme: Callable[..., Array]) -> Callable[..., Array]:
    def form(x: Array, axis: int = -1, keep_dim: bool = False, flatten: bool = False) -> Array:
        if flatten:
            found = extreme(x.reshape(-1))
            return found.reshape((1,) * x.ndim) if keep_dim else found
        return extreme(x, axis=axis, keepdims=keep_dim)

    return form


OPERATIONS["argmax"] = Operation(_arg(jnp.argmax))
OPERATIONS["argmin"] = Operation(_arg(jnp.argmin))


@operation("cumsum")
def cumsum(
    x: Array,
    axis: int = -1,
    flatten: bool = False,
    exclusive: bool = False,
    reverse: bool = False,
) -> Array:
    """Running sums along one dim."""
    if flatten:
        x, axis = x.reshape(-1), 0
    run = lax.cumsum(x, axis % x.ndim, reverse=reverse)
    return run - x if exclusive else run


def _running(scan: Callable[..., Array]) -> Callable[..., Any]:
    def form(x: Array, axis: int = -1, dtype: str = "int64") -> tuple[Array, Array]:
        axis = axis % x.ndim
        run = scan(x, axis)
        place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return run, lax.cummax(jnp.where(x == run, place, 0), axis)

    return form


OPERATIONS["cummax"] = Operation(_running(lax.cummax))
OPERATIONS["cummin"] = Operation(_running(lax.cummin))


@operation("argsort")
def argsort(
    x: Array, axis: int = -1, descending: bool = False, stable: bool = False
) -> tuple[Array, Array]:
    """Sorted values and where they come from."""
    axis = axis % x.ndim
    place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    key = -x if descending else x
    key, found = lax.sort((key, place), dimension=axis, num_keys=1)
    return -key if descending else key, found


@operation("topk")
def topk(
    x: Array, k: int = 1, axis: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    """The k largest values of each row, and where they are."""
    last = jnp.moveaxis(x, axis, -1)
    values, found = lax.top_k(last if largest else -last, k)
    values = values if largest else -values
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(found, -1, axis)


@operation("softmax")
def softmax(x: Array, axis: int = -1) -> Array:
    """Softmax along one dim."""
    return jax.nn.softmax(x, axis=axis)


@operation("log_softmax")
def log_softmax(x: Array, axis: int = -1) -> Array:
    """Logarithm of softmax along one dim."""
    return jax.nn.log_softmax(x, axis=axis)
