"""Gradients inside a region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar._jax import varying_axes
from meshpar.collectives.inside.members import varying
from meshpar.collectives.region import current_region

__all__ = ["grad", "local", "value_and_grad"]


def local(tree: Any) -> Any:
    """Marks replicated values as each rank's own, for plain `jax.grad` inside a region.

    The gradient with respect to a value that is the same on all ranks is the sum of what the ranks
    contribute; that with respect to `local(value)` is this rank's contribution.

    Args:
      tree: a pytree of arrays; values that differ between ranks stay as they are.

    Returns:
      The same values. Outside a region they are returned unchanged.

    Example:
      >>> import jax, meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> def own_gradient(w, d):
      ...     return jax.grad(lambda w: (w * d).sum())(mp.local(w))[None]
      >>> per_rank = mp.spmd(own_gradient, mesh, [[mp.Replicate()], [mp.Shard(0)]], [mp.Shard(0)])
      >>> per_rank(np.float32(1), np.array([3.0]))
      Array([3.], dtype=float32)
    """
    region = current_region()
    if region is None:
        return tree
    return jax.tree.map(lambda x: varying(jax.numpy.asarray(x), region.axes), tree)


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad` whose gradients inside a region are those of the loss as it is meant.

    A loss that is the same on all ranks, say after `mp.all_reduce`, is one loss: its gradient with
    respect to a replicated value is the whole one, summed over what the ranks contribute. A loss
    that each rank has for itself has a gradient for each rank, that of its own loss alone. A loss
    that differs along some axes of the mesh is summed along the others.

    Args:
      fn: returns a scalar, and with `has_aux` something else beside it.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fn` returns a pair.

    Returns:
      A function like `fn` that gives the value (and aux) and the gradients. Outside a region it is
      `jax.value_and_grad`.

    Example:
      >>> import meshpar as mp, numpy as np
      >>> mesh = mp.ProcessMesh([0], ["x"])
      >>> def step(w, d):
      ...     return mp.value_and_grad(lambda w: mp.all_reduce((w * w * d).sum()))(w)
      >>> trained = mp.spmd(step, mesh, [[mp.Replicate()], [mp.Shard(0)]])
      >>> [float(x) for x in trained(np.float32(3), np.array([2.0]))]
      [18.0, 12.0]
    """

    @functools.wraps(fn)
    def with_gradient(*args: Any, **kwargs: Any) -> Any:
        axes: tuple[str, ...] = ()
        if current_region() is not None:
            axes = _own_axes(fn, has_aux, args, kwargs)
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        own = list(args)
        for i in numbers:
            own[i] = jax.tree.map(lambda x: varying(jax.numpy.asarray(x), axes), args[i])
        return jax.value_and_grad(fn, argnums, has_aux)(*own, **kwargs)

    return with_gradient


def grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.grad` whose gradients inside a region are those of the loss as it is meant.

    See `value_and_grad`, which also gives the arguments.

    Example:
      >>> float(grad(lambda x: x**2)(3.0))
      6.0
    """
    both = value_and_grad(fn, argnums, has_aux)

    @functools.wraps(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def _own_axes(
    fn: Callable[..., Any], has_aux: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """The axes along which each rank has a loss of its own."""
    found: list[frozenset[str]] = []

    def probe() -> None:
        out = fn(*args, **kwargs)
        found.append(varying_axes(out[0] if has_aux else out))

    jax.eval_shape(probe)
    return tuple(sorted(found[0]))
