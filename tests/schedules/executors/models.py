"""Small stages, and the loop over microbatches that a pipeline must equal."""

import jax
import jax.numpy as jnp


def normal(seed, *shape):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape)


def mlp(params, x, extras=None):
    h = x @ params["up"]
    h = jax.nn.gelu(h + jnp.broadcast_to(params["bias"], h.shape))
    return x + h @ params["down"]


def mlp_params(*lead, width=8, hidden=16):
    return {
        "up": normal(0, *lead, width, hidden),
        "bias": normal(1, *lead, hidden),
        "down": normal(2, *lead, hidden, width),
    }


def attention(params, x, extras=None):
    """Normalized causal attention with two heads: 6 matmuls."""
    batch, length, width = x.shape
    norm = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["scale"]
    q, k, v = ((norm @ params[n]).reshape(batch, length, 2, width // 2) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ params["o"]


def attention_params(width=8):
    return {"scale": 1 + normal(3, 1, 1, width)} | {
        n: normal(4 + i, width, width) for i, n in enumerate("qkvo")
    }


def mean_of_losses(
    stage, params, microbatches, *, loss, targets, first=None, last=None, extras=None
):
    """The mean loss of the loop; `first` and `last` are `(function, parameters)`."""

    def one(batch):
        microbatch, target, extra = batch
        x = microbatch if first is None else first[0](first[1], microbatch)
        more = () if extras is None else (extra,)
        x = jax.lax.scan(lambda x, layer: (stage(layer, x, *more), None), x, params)[0]
        return loss(x if last is None else last[0](last[1], x), target)

    return jax.lax.map(one, (microbatches, targets, extras)).mean()
