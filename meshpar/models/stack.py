"""A stack of equal layers, unrolled or scanned.

Unrolled layers are an `nnx.List`, and the program holds each of them. Scanned layers are *one*
module whose every array has a leading dim of size `num_layers`, and the program holds one layer in
a `lax.scan`: compile time does not grow with depth, and `remat` really saves memory on CPU, where
XLA merges the recomputation of unrolled layers again.

Both forms draw layer `i`'s values from the `i`-th split of the same keys, so that equal seeds give
equal models.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

Layer = TypeVar("Layer", bound=nnx.Module)


def make_layers(
    make: Callable[[nnx.Rngs], Layer], num_layers: int, *, scan: bool, rngs: nnx.Rngs
) -> nnx.List[Layer] | Layer:
    """Creates the layers.

    Args:
      make: builds one layer from its own `nnx.Rngs`.
      num_layers: how many.
      scan: one module of stacked arrays rather than a list of modules.
      rngs: split into one `nnx.Rngs` per layer.

    Returns:
      `nnx.List` of `num_layers` layers, or one layer with a leading dim on every array.
    """
    stacked = rngs.split(num_layers)
    if scan:
        return nnx.vmap(make, in_axes=0, out_axes=0)(stacked)
    graphdef, keys = nnx.split(stacked)
    return nnx.List(
        make(nnx.merge(graphdef, jax.tree.map(lambda key: key[i], keys)))  # noqa: B023 (not kept)
        for i in range(num_layers)
    )


def run_layers(
    layers: nnx.List[Layer] | Layer, x: jax.Array, *context: jax.Array, remat: bool
) -> jax.Array:
    """Applies the layers one after another.

    Args:
      layers: what `make_layers` returned; a layer maps an array to one of equal shape and dtype.
      x: the input of the first layer.
      *context: what every layer is given beside its input, such as a mask.
      remat: keep only each layer's input for the backward pass and compute the rest again.

    Returns:
      The output of the last layer, of the shape of `x`.
    """

    def run(layer: Layer, x: jax.Array, *context: jax.Array) -> jax.Array:
        return layer(x, *context)

    step = nnx.remat(run) if remat else run
    if isinstance(layers, nnx.List):
        for layer in layers:
            x = step(layer, x, *context)
        return x
    in_axes = (0, nnx.Carry, *(None for _ in context))
    return nnx.scan(step, in_axes=in_axes, out_axes=nnx.Carry)(layers, x, *context)
