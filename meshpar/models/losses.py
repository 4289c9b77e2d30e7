"""Cross-entropy over a vocabulary that may be sharded.

B batch, T position, V vocabulary.
"""

import jax
import jax.numpy as jnp


def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, ignore_index: int | None = None
) -> jax.Array:
    """Mean over the kept tokens of `logsumexp(logits) - logits[label]`, in nats.

    The label's logit is chosen by comparing an iota over V with the label, and a sum: on logits
    sharded over V each device reduces its own part, and three all-reduces of `(B, T)` numbers (max,
    sum of exponentials, label's logit) are all that moves. An index (`take_along_axis`) would need
    the whole row on each device or masked out-of-range indices, and its gradient is a scatter; the
    gradient of compare-and-sum is element-wise. The comparison fuses into the reduction: no one-hot
    array is stored.

    Args:
      logits: shape `(..., V)`, any float dtype; the computation is float32.
      labels: integers of shape `(...)` in `[0, V)`, or equal to `ignore_index`.
      ignore_index: tokens with this label count neither in the sum nor in the divisor.

    Returns:
      A float32 scalar; 0 with zero gradients if no token is kept.

    Raises:
      ValueError: the shapes do not fit.

    Example:
      >>> cross_entropy(jnp.zeros((2, 4)), jnp.array([1, -1]), ignore_index=-1)  # ln 4
      Array(1.3862944, dtype=float32)
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"cross_entropy(logits, labels): labels of shape {labels.shape} must have the shape of "
            f"logits {logits.shape} without its last dim, {logits.shape[:-1]}"
        )
    logits = logits.astype(jnp.float32)
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    chosen = jnp.where(classes == labels[..., None], logits, 0.0).sum(axis=-1)  # [B,T]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen  # [B,T]
    if ignore_index is None:
        return nats.mean()
    kept = labels != ignore_index
    # At least 1 in the divisor: 0/0 would turn a batch without a kept token into NaN.
    return jnp.where(kept, nats, 0.0).sum() / jnp.maximum(kept.sum(), 1).astype(jnp.float32)
