"""Optimizer steps, in place in Paddle and results here, and the check before them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.compiler.operations.elementwise import filled_like
from meshpar.compiler.operations.registry import operation

Array = jax.Array


def _scalar(x: Array, like: Array) -> Array:
    return jnp.broadcast_to(x.reshape((1,) * like.ndim), like.shape)


@operation("sgd_")
def sgd(param: Array, rate: Array, grad: Array) -> tuple[Array, None]:
    """One step down the gradient."""
    return param - _scalar(rate, param) * grad, None


def _adam(
    param: Array, grad: Array, rate: Array, first: Array, second: Array, pow1: Array, pow2: Array
) -> tuple[Array | None, ...]:
    first = 0.9 * first + 0.1 * grad
    second = 0.999 * second + 0.001 * grad * grad
    step = _scalar(rate * jnp.sqrt(1 - pow2) / (1 - pow1), param)
    new = param - step * first / (jnp.sqrt(second) + 1e-8)
    return new, first, second, None, pow1 * 0.9 + 0.0, pow2 * 0.999 + 0.0, None


@operation("adam_")
def adam(
    param: Array, grad: Array, rate: Array, first: Array, second: Array, pow1: Array, pow2: Array
) -> tuple[Array | None, ...]:
    """Adam: parameter, moments and the powers of beta."""
    return _adam(param, grad, rate, first, second, pow1, pow2)


@operation("adamw_")
def adamw(
    param: Array, grad: Array, rate: Array, first: Array, second: Array, pow1: Array, pow2: Array
) -> tuple[Array | None, ...]:
    """Adam with decoupled weight decay."""
    decayed = param * (1 - 0.01 * _scalar(rate, param))
    return _adam(decayed, grad, rate, first, second, pow1, pow2)


@operation("check_finite_and_unscale_")
def check_finite_and_unscale(xs: list[Array], scale: Array) -> tuple[list[Array], Array]:
    """Gradients divided by the loss scale, and whether one is not finite, as 0 or 1."""
    bad = [jnp.max(jnp.where(jnp.isfinite(x), filled_like(x, 0), filled_like(x, 1))) for x in xs]
    found = bad[0]
    for one in bad[1:]:
        found = jnp.maximum(found, one)
    return [x / _scalar(scale, x) for x in xs], found.reshape(1)
