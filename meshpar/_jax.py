"""The one module that touches JAX names outside its documented public API."""

import jax
from jax._src import xla_bridge as _xla_bridge

__all__ = ["backend_is_up", "is_tracer"]


def backend_is_up() -> bool:
    """Whether JAX has started its backend, after which the number of host devices is fixed."""
    return _xla_bridge.backends_are_initialized()


def is_tracer(x: object) -> bool:
    """Whether `x` stands for a value of a program that is being traced."""
    return isinstance(x, jax.core.Tracer)
