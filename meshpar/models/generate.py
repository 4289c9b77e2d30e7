"""Sampling from a language model through a window of fixed size.

B batch, P prompt length, W window length, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.decoder import Decoder
from meshpar.models.gpt2 import GPT2


def generate(
    model: Decoder | GPT2,
    prompt: jax.Array,
    steps: int,
    key: jax.Array,
    temperature: float = 1.0,
) -> jax.Array:
    """Continues the prompt by `steps` tokens.

    Each token costs a forward pass over the last `min(P + steps, max_seq_len)` tokens: no cache to
    keep right, one program, and any number of steps. The program is compiled once per model
    structure, batch size and `P + steps`; temperature and key are inputs of it.

    Args:
      model: used with dropout off, and left as it is.
      prompt: integer tokens of shape `(B, P)`, P at least 1.
      steps: how many tokens to add.
      key: a `jax.random.key`; equal keys give equal samples.
      temperature: divides the logits; 0 takes the most likely token.

    Returns:
      Shape `(B, P + steps)`, in the dtype of `prompt`; the prompt comes first.

    Raises:
      ValueError: an empty prompt, or a negative `steps` or `temperature`.
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1 or steps < 0 or temperature < 0:
        raise ValueError(
            f"generate(prompt, steps, temperature): shape {prompt.shape}, {steps}, {temperature}: "
            "the prompt must be (batch, length) with length >= 1, and steps and temperature must "
            "not be negative; prompt[None] adds the batch dim to one prompt"
        )
    graphdef, state = nnx.split(model)
    buffer = jnp.pad(prompt, ((0, 0), (0, steps)))  # [B,P+steps]
    window = min(buffer.shape[1], model.config.max_seq_len)
    return _fill(graphdef, state, buffer, prompt.shape[1], key, temperature, window)


@partial(jax.jit, static_argnames=("graphdef", "window"))
def _fill(
    graphdef: nnx.GraphDef[Decoder | GPT2],
    state: nnx.State,
    buffer: jax.Array,
    start: int | jax.Array,
    key: jax.Array,
    temperature: float | jax.Array,
    window: int,
) -> jax.Array:
    """Replaces `buffer[:, start:]` by samples, from left to right."""

    def forward(tokens: jax.Array) -> jax.Array:
        # Merged and copied inside the loop, since nnx.scan refuses Variables of an outer trace
        # level; on a copy, eval() leaves the caller's model as it is.
        model = nnx.merge(graphdef, state, copy=True)
        model.eval()
        return model(tokens)

    def put_token(position: jax.Array, buffer: jax.Array) -> jax.Array:
        # The window ends with the last known token once it is full. Before that its tail holds
        # unknown tokens, which a causal model does not let into the logits that are read.
        first = jnp.maximum(position - window, 0)
        tokens = jax.lax.dynamic_slice_in_dim(buffer, first, window, axis=1)  # [B,W]
        logits = jax.lax.dynamic_index_in_dim(
            forward(tokens), position - 1 - first, axis=1, keepdims=False
        ).astype(jnp.float32)  # [B,V]
        greedy = logits.argmax(axis=-1)
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
        sampled = jax.random.categorical(jax.random.fold_in(key, position), scaled, axis=-1)
        token = jnp.where(temperature > 0, sampled, greedy).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice_in_dim(buffer, token[:, None], position, axis=1)

    return jax.lax.fori_loop(start, buffer.shape[1], put_token, buffer)
