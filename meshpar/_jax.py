"""The one module that touches JAX names outside its documented public API.

`jax.extend` and `jax.interpreters` are where JAX lets others define primitives; they are gathered
here with what is truly private, so that a new JAX version is met in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import jax
import jax.extend.core as jex_core
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import xla_bridge as _xla_bridge
from jax.interpreters import ad, batching, mlir

__all__ = ["backend_is_up", "is_key_array", "is_tracer", "linear_primitive", "refuse_as_argument"]

# A primitive's rules pass tracers, avals and MLIR values whose types JAX does not export.
Rule = Callable[..., Any]


def backend_is_up() -> bool:
    """Whether JAX has started its backend, after which the number of host devices is fixed."""
    return _xla_bridge.backends_are_initialized()


def is_tracer(x: object) -> TypeGuard[jax.Array]:
    """Whether `x` stands for a value of a program that is being traced."""
    return isinstance(x, _core.Tracer)


def is_key_array(x: object) -> bool:
    """Whether `x` is an array of typed PRNG keys."""
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # pyright: ignore[reportAttributeAccessIssue]


def linear_primitive(
    name: str, *, program: Rule, transposed: Callable[[dict[str, Any]], dict[str, Any]], batch: Rule
) -> jex_core.Primitive:
    """A primitive that leaves its one operand's value, shape and dtype as they are.

    Args:
      name: the name shown in jaxprs.
      program: `(x, **params) -> x`, what it lowers to.
      transposed: the parameters of the same primitive on the cotangent.
      batch: `(x, dim, **params) -> x`, applied to an operand with one more dim at `dim`.
    """
    primitive = jex_core.Primitive(name)
    primitive.def_abstract_eval(lambda aval, **params: aval)
    primitive.def_impl(lambda x, **params: jax.jit(lambda y: primitive.bind(y, **params))(x))
    mlir.register_lowering(primitive, mlir.lower_fun(program, multiple_results=False))
    ad.deflinear2(primitive, lambda ct, x, **params: [primitive.bind(ct, **transposed(params))])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        batch(args[0], dims[0], **params),
        dims[0],
    )
    return primitive


def refuse_as_argument(cls: type, refuse: Callable[[Any], NoReturn]) -> None:
    """Makes JAX call `refuse` where an instance of `cls` is an argument of one of its functions."""
    _core.pytype_aval_mappings[cls] = refuse
    _dtypes.register_canonicalize_value_handler(cls, refuse)
