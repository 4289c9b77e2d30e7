"""The layers of which the language models are made, with the sizes and dtypes of their config."""

from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Norm = TypeVar("Norm", nnx.LayerNorm, nnx.RMSNorm)


class PartsConfig(Protocol):
    """What a config says about these layers."""

    @property
    def num_layers(self) -> int: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def init_std(self) -> float: ...
    @property
    def dtype(self) -> str: ...
    @property
    def param_dtype(self) -> str: ...


def embedding(config: PartsConfig, num_embeddings: int, rngs: nnx.Rngs) -> nnx.Embed:
    """A vector of the model's dim for each of `num_embeddings` numbers."""
    return nnx.Embed(
        num_embeddings,
        config.model_dim,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        embedding_init=nnx.initializers.normal(config.init_std),
        rngs=rngs,
    )


def linear(
    config: PartsConfig,
    in_dim: int,
    out_dim: int,
    rngs: nnx.Rngs,
    *,
    bias: bool = True,
    residual: bool = False,
) -> nnx.Linear:
    """A matrix; `residual` ones start smaller, so that 2 L sums keep unit scale."""
    std = config.init_std * ((2 * config.num_layers) ** -0.5 if residual else 1.0)
    return nnx.Linear(
        in_dim,
        out_dim,
        use_bias=bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


def norm(kind: type[Norm], config: PartsConfig, rngs: nnx.Rngs) -> Norm:
    """A norm over the model's dim."""
    return kind(
        config.model_dim,
        epsilon=config.norm_eps,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Dropout; at rate 0 it holds no random state."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


def check_heads(config: str, model_dim: int, num_heads: int) -> None:
    """Raises a `ValueError` unless the heads share the model's dim evenly."""
    if model_dim % num_heads:
        raise ValueError(
            f"{config}(model_dim={model_dim}, num_heads={num_heads}): the heads share the model "
            f"dim evenly; {model_dim} % {num_heads} = {model_dim % num_heads}, and num_heads=1 "
            "always works"
        )


def check_tokens(model: str, tokens: jax.Array, longest: int) -> None:
    """Raises a `ValueError` unless the tokens are a batch of sequences that are not too long."""
    if tokens.ndim != 2 or tokens.shape[1] > longest:
        raise ValueError(
            f"{model}(tokens): shape {tokens.shape} is not (batch, length) with length <= "
            f"max_seq_len = {longest}; tokens[:, -{longest}:] keeps the last ones"
        )
