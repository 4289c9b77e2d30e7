"""The operations with windows that the rules are tested on: pooling and convolutions."""

# ruff: noqa: E731 - tables of functions are what this file is

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from tests.rules.values import eighths, integers

Row = tuple[str, Callable[..., Any], tuple[Any, ...]]


def windows(n: int, m: int) -> Iterator[Row]:
    """Pooling and its gradients, over a dim of n + 3 rows."""
    h = n + 3
    x = eighths(h, 2, m)
    settings: dict[str, tuple[Any, ...]] = {
        "2 valid": ((2, 1, 1), (1, 1, 1), ((0, 0), (0, 0), (0, 0))),
        "2/2": ((2, 1, 1), (2, 1, 1), ((0, 0), (0, 0), (0, 0))),
        "3 same": ((3, 1, 1), (1, 1, 1), ((1, 1), (0, 0), (0, 0))),
        "3/2 padded": ((3, 1, 2), (2, 1, 1), ((2, 1), (0, 0), (0, 1))),
        "1/2": ((1, 1, 1), (2, 1, 1), ((0, 0), (0, 0), (0, 0))),
    }
    for name, (window, stride, pads) in settings.items():
        for fn, start in ((lax.add, 0.0), (lax.max, -np.inf), (lax.min, np.inf)):
            yield (
                f"{fn.__name__} {name}",
                lambda a, f=fn, s=start, w=window, t=stride, p=pads: lax.reduce_window(
                    a, np.float32(s), f, w, t, p
                ),
                (x,),
            )
        gradient = lambda w=window, t=stride, p=pads: (
            lambda g, a: jax.vjp(
                lambda b: lax.reduce_window(b, -np.float32(np.inf), lax.max, w, t, p), a
            )[1](g)[0]
        )
        shape = jax.eval_shape(
            lambda a, w=window, t=stride, p=pads: lax.reduce_window(
                a, -np.float32(np.inf), lax.max, w, t, p
            ),
            x,
        ).shape
        yield (
            f"pooling gradient {name}",
            _only("select_and_scatter_add", gradient(), eighths(*shape, seed=1), x),
            (eighths(*shape, seed=1), x),
        )
    dilated = lambda a: lax.reduce_window(
        a,
        np.float32(0),
        lax.add,
        (2, 1, 1),
        (1, 1, 1),
        ((1, 2), (0, 0), (0, 0)),
        (2, 1, 1),
        (3, 1, 1),
    )
    yield "add dilated", dilated, (x,)
    product = lambda a: lax.reduce_window(
        a, np.float32(0), lambda a, b: a + b + a * b, (2, 1, 1), (1, 1, 1), ((1, 0), (0, 0), (0, 0))
    )
    yield "any function", product, (x,)
    tangent = lambda a, t: jax.jvp(
        lambda b: lax.reduce_window(
            b, -np.float32(np.inf), lax.max, (2, 1, 1), (1, 1, 1), ((1, 0), (0, 0), (0, 0))
        ),
        (a,),
        (t,),
    )[1]
    yield (
        "pooling tangent",
        _only("select_and_gather_add", tangent, x, eighths(h, 2, m, seed=1)),
        (eighths(h, 2, m, seed=1), x),
    )
    yield "reduce", lambda a: lax.reduce(a, np.float32(0), lambda a, b: a * b + b, (0,)), (x,)
    yield "reduce_xor", lambda a: lax.reduce_xor(a, (0,)), (integers(h, m),)


def _only(name: str, fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The one equation of that name in a function, as a function of that equation's operands."""
    (eqn,) = [e for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns if e.primitive.name == name]
    return lambda *operands: eqn.primitive.bind(*operands, **eqn.params)


def convolution(n: int, m: int) -> Iterator[Row]:
    """Convolutions and their gradients, over a dim of n + 4 rows."""
    h = n + 4
    x, w = eighths(2, h, 4, 2), eighths(3, 3, 2, 4, seed=1) / 8
    settings: dict[str, dict[str, Any]] = {
        "same": {"padding": "SAME"},
        "valid": {"padding": "VALID"},
        "strided": {"padding": "SAME", "window_strides": (2, 1)},
        "odd padding": {"padding": ((3, 0), (0, 1)), "window_strides": (3, 2)},
        "dilated rows": {"padding": ((1, 2), (1, 1)), "lhs_dilation": (2, 1)},
        "dilated both": {
            "padding": ((1, 2), (2, 2)),
            "lhs_dilation": (3, 1),
            "rhs_dilation": (2, 2),
            "window_strides": (2, 1),
        },
    }
    for name, options in settings.items():
        options = {
            "window_strides": (1, 1),
            "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
            **options,
        }
        conv = lambda a, b, o=options: lax.conv_general_dilated(a, b, **o)
        yield from _with_gradients(f"conv {name}", conv, x, w)
    for groups in (2, 4):
        x, w = eighths(2, h, 4), eighths(3, 4 // groups, 8, seed=1) / 8
        conv = lambda a, b, g=groups: lax.conv_general_dilated(
            a, b, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=g
        )
        yield from _with_gradients(f"conv groups {groups}", conv, x, w)


def _with_gradients(
    name: str, conv: Callable[..., Any], x: np.ndarray, w: np.ndarray
) -> Iterator[Row]:
    """A convolution, and the convolutions that its gradients are."""
    yield name, conv, (x, w)
    out = eighths(*jax.eval_shape(conv, x, w).shape, seed=2)
    rows = jax.linear_transpose(lambda a: conv(a, w), x)
    weights = jax.linear_transpose(lambda b: conv(x, b), w)
    for what, transposed in (("rows", rows), ("weights", weights)):
        jaxpr = jax.make_jaxpr(transposed)(out)
        (eqn,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
        args = tuple(eighths(*v.aval.shape, seed=3 + i) for i, v in enumerate(eqn.invars))
        yield (
            f"{name}, gradient of {what}",
            lambda a, b, e=eqn: e.primitive.bind(a, b, **e.params),
            args,
        )
