"""A multi-layer perceptron, optionally with dropout and with one weight used twice.

B batch, I input dim, O output dim.
"""

from dataclasses import dataclass
from itertools import pairwise

import jax
from flax import nnx


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Sizes and options of an `MLP`."""

    dims: tuple[int, ...]  # input, hidden ..., output: one linear layer less than dims
    dropout: float = 0.0  # rate, after each hidden activation
    tied: bool = False  # the last layer uses the first one's kernel; biases stay apart

    def __post_init__(self) -> None:
        if len(self.dims) < 2:
            raise ValueError(
                f"MLPConfig(dims={self.dims}): one linear layer needs an input and an output dim, "
                "as in dims=(8, 8)"
            )
        if self.tied and (len(self.dims) < 3 or self.dims[:2] != self.dims[-2:]):
            raise ValueError(
                f"MLPConfig(dims={self.dims}, tied=True): the first kernel {self.dims[:2]} and the "
                f"last {self.dims[-2:]} must be two layers of equal shape, as in dims=(8, 8, 3, 8, "
                "8)"
            )


class MLP(nnx.Module):
    """Maps `(B, I)` to `(B, O)`: linear layers with GELU, and dropout, between them.

    Example:
      >>> import jax.numpy as jnp
      >>> model = MLP(MLPConfig(dims=(4, 8, 2)), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((3, 4))).shape
      (3, 2)
    """

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.layers = nnx.List(
            nnx.Linear(fan_in, fan_out, rngs=rngs) for fan_in, fan_out in pairwise(config.dims)
        )
        if config.tied:
            # The same Variable, not a copy: the state holds it once, gradients of both uses add.
            self.layers[-1].kernel = self.layers[0].kernel
        # Without dropout the model holds no random state.
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = self.dropout(jax.nn.gelu(layer(x)))
        return self.layers[-1](x)
