"""Elementwise operations. Random ones are stood in for: which values are drawn moves no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.compiler.operations.registry import (
    OPERATIONS,
    Attrs,
    LocalCall,
    Operation,
    operation,
)

Array = jax.Array


def ranked(*xs: Array) -> tuple[Array, ...]:
    """All with as many dims as the largest, by dims of size 1 in front."""
    ndim = max(x.ndim for x in xs)
    return tuple(jnp.expand_dims(x, tuple(range(ndim - x.ndim))) for x in xs)


def filled_like(x: Array, value: Any, dtype: Any = None) -> Array:
    """A constant that lies where `x` lies."""
    full = jnp.full(x.shape, value, x.dtype if dtype is None else dtype)
    return jnp.where(x == x, full, full)


def _drawn(x: Array) -> Array:
    """A stand-in for a random draw that depends on the element."""
    return jnp.floor(jnp.abs(jnp.sin(x * 12.9898)) * 4)


_UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": jnp.abs,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "assign": jnp.copy,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "bernoulli": _drawn,
    "ceil": jnp.ceil,
    "celu": jax.nn.celu,
    "conj": jnp.conj,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "digamma": jax.scipy.special.digamma,
    "elementwise_unary": lambda x: jnp.sin(x) + x,
    "elu": jax.nn.elu,
    "erf": jax.scipy.special.erf,
    "erfinv": jax.scipy.special.erfinv,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "fill": lambda x: filled_like(x, 1),
    "floor": jnp.floor,
    "hardshrink": lambda x: jnp.where(jnp.abs(x) > 0.5, x, 0),
    "hardsigmoid": jax.nn.hard_sigmoid,
    "hardswish": jax.nn.hard_swish,
    "hardtanh": jax.nn.hard_tanh,
    "leaky_relu": jax.nn.leaky_relu,
    "lgamma": jax.scipy.special.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "logit": jax.scipy.special.logit,
    "logsigmoid": jax.nn.log_sigmoid,
    "mish": jax.nn.mish,
    "poisson": _drawn,
    "reciprocal": jnp.reciprocal,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "round": jnp.round,
    "rsqrt": jax.lax.rsqrt,
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "softplus": jax.nn.softplus,
    "softshrink": lambda x: jnp.where(jnp.abs(x) > 0.5, x - jnp.sign(x) * 0.5, 0),
    "softsign": jax.nn.soft_sign,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "stanh": lambda x: 1.7159 * jnp.tanh(0.67 * x),
    "swish": jax.nn.silu,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "tanh_shrink": lambda x: x - jnp.tanh(x),
    "thresholded_relu": lambda x: jnp.where(x > 1.0, x, 0),
    "trunc": jnp.trunc,
}
OPERATIONS.update({name: Operation(form) for name, form in _UNARY.items()})
OPERATIONS["bitwise_not"] = Operation(jnp.bitwise_not, kinds="i")
OPERATIONS["logical_not"] = Operation(jnp.logical_not, kinds="b")


@operation("gelu")
def gelu(x: Array, approximate: bool = False) -> Array:
    """Gaussian error linear unit."""
    return jax.nn.gelu(x, approximate=approximate)


@operation("clip")
def clip(x: Array, min: float = -1.0, max: float = 1.0) -> Array:
    """Values outside the bounds are moved to them."""
    return jnp.clip(x, min, max)


@operation("pow")
def pow_(x: Array, y: float = 2.0) -> Array:
    """A power; its exponent is not 1."""
    return x**y


@operation("scale")
def scale(x: Array, scale: float = 2.0, bias: float = 1.0, bias_after_scale: bool = True) -> Array:
    """`scale * x + bias`, or `scale * (x + bias)`; linear only where the bias is known to be 0."""
    if bias == 0:
        return x * scale
    return x * scale + bias if bias_after_scale else (x + bias) * scale


@operation("cast")
def cast(x: Array, dtype: str = "float32") -> Array:
    """Another dtype; no layout depends on which."""
    return jnp.copy(x)


@operation("full_like", shape_only=True)
def full_like(x: Array, value: float = 0.0) -> Array:
    """A constant of the shape, and where, `x` is."""
    return filled_like(x, value)


@operation("dropout")
def dropout(x: Array, p: float = 0.5) -> tuple[Array, Array]:
    """Elements zeroed and the others scaled up; the mask."""
    keep = _drawn(x) >= 2
    return jnp.where(keep, x / (1 - p), 0), keep


@operation("fused_dropout_add")
def fused_dropout_add(x: Array, y: Array) -> tuple[Array, None]:
    """Dropout of `x`, plus `y`."""
    return dropout(x)[0] + y, None


_BINARY: dict[str, tuple[Callable[[Array, Array], Array], str]] = {
    "add": (jnp.add, "f"),
    "bitwise_and": (jnp.bitwise_and, "i"),
    "bitwise_or": (jnp.bitwise_or, "i"),
    "bitwise_xor": (jnp.bitwise_xor, "i"),
    "divide": (jnp.divide, "f"),
    "elementwise_binary": (lambda x, y: jnp.sin(x) * jnp.cos(y) + x, "f"),
    "elementwise_div": (jnp.divide, "f"),
    "elementwise_mul": (jnp.multiply, "f"),
    "elementwise_pow": (lambda x, y: jnp.abs(x) ** y, "f"),
    "equal": (jnp.equal, "f"),
    "floor_divide": (lambda x, y: jnp.floor(x / y), "f"),
    "fmax": (jnp.fmax, "f"),
    "fmin": (jnp.fmin, "f"),
    "greater_than": (jnp.greater, "f"),
    "heaviside": (jnp.heaviside, "f"),
    "less_than": (jnp.less, "f"),
    "logical_and": (jnp.logical_and, "b"),
    "logical_or": (jnp.logical_or, "b"),
    "logical_xor": (jnp.logical_xor, "b"),
    "maximum": (jnp.maximum, "f"),
    "minimum": (jnp.minimum, "f"),
    "multiply": (jnp.multiply, "f"),
    "not_equal": (jnp.not_equal, "f"),
    "remainder": (jnp.remainder, "f"),
    "subtract": (jnp.subtract, "f"),
    "trunc_divide": (lambda x, y: jnp.trunc(x / y), "f"),
}
for _name, (_form, _kind) in _BINARY.items():
    OPERATIONS[_name] = Operation(lambda x, y, form=_form: form(*ranked(x, y)), kinds=_kind)


@operation("add_n")
def add_n(xs: list[Array]) -> Array:
    """The sum of a list of tensors."""
    total = xs[0]
    for x in xs[1:]:
        total = jnp.add(*ranked(total, x))
    return total


@operation("where", kinds="bff")
def where(condition: Array, x: Array, y: Array) -> Array:
    """Elements of `x` where the condition holds, else of `y`."""
    return jnp.where(*ranked(condition, x, y))


@operation("swiglu", optional=frozenset({1}))
def swiglu(x: Array, y: Array | None = None) -> Array:
    """`silu(x) * y`; without `y`, of the two halves of the last dim."""
    if y is None:
        x, y = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(x) * y


def _all_classes(attrs: Attrs, call: LocalCall) -> Attrs:
    return {**attrs, "classes": call.wholes[0][-1]}


@operation("label_smooth", optional=frozenset({1}), local=_all_classes)
def label_smooth(
    label: Array, prior: Array | None = None, epsilon: float = 0.1, classes: int | None = None
) -> Array:
    """Labels mixed with a prior distribution; with an even one over the classes if absent."""
    if prior is None:
        return (1 - epsilon) * label + epsilon / (classes or label.shape[-1])
    return (1 - epsilon) * label + epsilon * jnp.broadcast_to(*ranked_to(prior, label))


def ranked_to(x: Array, like: Array) -> tuple[Array, tuple[int, ...]]:
    """`x` with the dims of `like`, and the shape of `like`."""
    return ranked(x, like)[0], like.shape
