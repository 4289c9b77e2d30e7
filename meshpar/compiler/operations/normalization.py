"""Normalisations and losses: statistics over some dims, each row by itself."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.compiler.operations.registry import operation

Array = jax.Array


def _standard(x: Array, dims: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    """Mean 0 and variance 1 over some dims; the mean and the variance, with dims of size 1."""
    mean = jnp.mean(x, axis=dims, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=dims, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + epsilon), mean, variance


def _affine(x: Array, scale: Array | None, bias: Array | None, dim: int) -> Array:
    """One scale and bias per row of a dim."""
    for position, one in enumerate((scale, bias)):
        if one is not None:
            shape = [1] * x.ndim
            shape[dim] = one.shape[0]
            wide = jnp.broadcast_to(one.reshape(shape), x.shape)
            x = x + wide if position else x * wide
    return x


@operation("layer_norm", optional=frozenset({1, 2}))
def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    epsilon: float = 1e-5,
    begin_norm_axis: int = 1,
) -> tuple[Array, Array, Array]:
    """Normalised over the dims from `begin_norm_axis` on; the statistics."""
    begin = begin_norm_axis % x.ndim
    out, mean, variance = _standard(x, tuple(range(begin, x.ndim)), epsilon)
    if scale is not None:
        out = out * jnp.broadcast_to(scale.reshape(x.shape[begin:]), x.shape)
    if bias is not None:
        out = out + jnp.broadcast_to(bias.reshape(x.shape[begin:]), x.shape)
    return out, mean.reshape(x.shape[:begin]), variance.reshape(x.shape[:begin])


@operation("fused_rms_norm")
def fused_rms_norm(x: Array, scale: Array, epsilon: float = 1e-6) -> tuple[Array, Array]:
    """Divided by the root of the mean square of the last dim; one over that root."""
    inverse = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return x * inverse * jnp.broadcast_to(scale, x.shape), jnp.squeeze(inverse, -1)


@operation("group_norm", optional=frozenset({1, 2}))
def group_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, groups: int = 1
) -> tuple[Array, Array, Array]:
    """Normalised over the spatial dims and the channels of a group; the statistics."""
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    out, mean, variance = _standard(grouped, tuple(range(2, grouped.ndim)), 1e-5)
    stats = (x.shape[0], groups)
    out = _affine(out.reshape(x.shape), scale, bias, 1)
    return out, mean.reshape(stats), variance.reshape(stats)


@operation("instance_norm", optional=frozenset({1, 2}))
def instance_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, epsilon: float = 1e-5
) -> tuple[Array, Array, Array]:
    """Normalised over the spatial dims; the statistics."""
    out, mean, variance = _standard(x, tuple(range(2, x.ndim)), epsilon)
    return _affine(out, scale, bias, 1), mean.reshape(x.shape[:2]), variance.reshape(x.shape[:2])


@operation("batch_norm", optional=frozenset({3, 4}))
def batch_norm(
    x: Array,
    mean: Array,
    variance: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    momentum: float = 0.9,
) -> tuple[Array | None, ...]:
    """Normalised over batch and spatial dims; running and own statistics."""
    dims = (0, *range(2, x.ndim))
    out, own_mean, own_variance = _standard(x, dims, 1e-5)
    own_mean, own_variance = own_mean.reshape(-1), own_variance.reshape(-1)
    running = [
        momentum * old + (1 - momentum) * new
        for old, new in ((mean, own_mean), (variance, own_variance))
    ]
    return _affine(out, scale, bias, 1), *running, own_mean, lax.rsqrt(own_variance + 1e-5), None


def _classes(shapes: object, attrs: object) -> int:
    """Labels are below the smallest number of classes that anyone asks for."""
    return 4


@operation("cross_entropy_with_softmax softmax_with_cross_entropy", kinds="fi", bound=_classes)
def cross_entropy_with_softmax(
    logits: Array,
    label: Array,
    soft_label: bool = False,
    use_softmax: bool = True,
    numeric_stable_mode: bool = True,
    ignore_index: int = -100,
    axis: int = -1,
) -> tuple[Array, Array]:
    """Softmax, or what is given as such, and the loss of each row, with a dim of size 1."""
    axis = axis % logits.ndim
    log = jax.nn.log_softmax(logits, axis=axis) if use_softmax else jnp.log(logits)
    softmax = jax.nn.softmax(logits, axis=axis) if use_softmax else jnp.copy(logits)
    if soft_label:
        return softmax, -jnp.sum(log * label.astype(log.dtype), axis=axis, keepdims=True)
    if label.ndim < logits.ndim:
        label = jnp.expand_dims(label, axis)
    return softmax, -_picked(log, label, axis, ignore_index)


def _picked(log: Array, label: Array, axis: int, ignore_index: int) -> Array:
    """The element of each row that the label names, by comparing it with every class."""
    classes = lax.broadcasted_iota(jnp.int32, log.shape, axis)
    here = classes == jnp.broadcast_to(label, log.shape)
    loss = jnp.sum(jnp.where(here, log, 0), axis=axis, keepdims=True)
    return jnp.where(label == ignore_index, 0, loss)


@operation("c_softmax_with_cross_entropy", kinds="fi", bound=_classes)
def c_softmax_with_cross_entropy(
    logits: Array, label: Array, ignore_index: int = -100, rank: int = 0, nranks: int = 1
) -> tuple[Array, Array]:
    """`cross_entropy_with_softmax` over the last dim."""
    return cross_entropy_with_softmax(logits, label, ignore_index=ignore_index)


@operation("c_softmax_with_multi_label_cross_entropy", kinds="fif", bound=_classes)
def c_softmax_with_multi_label_cross_entropy(
    logits: Array,
    label: Array,
    smooth_weight: Array,
    ignore_index: int = -100,
    sum_multi_label_loss: bool = True,
    rank: int = 0,
    nranks: int = 1,
) -> tuple[Array, Array]:
    """Softmax, and the weighted losses of several labels per row, or their sum."""
    log = jax.nn.log_softmax(logits, axis=-1)
    classes = lax.broadcasted_iota(jnp.int32, (*label.shape, logits.shape[-1]), label.ndim)
    here = classes == jnp.broadcast_to(label[..., None], classes.shape)
    wide = jnp.broadcast_to(log[..., None, :], classes.shape)
    loss = -jnp.sum(jnp.where(here, wide, 0), axis=-1) * smooth_weight
    loss = jnp.where(label == ignore_index, 0, loss)
    total = jnp.sum(loss, axis=-1, keepdims=True) if sum_multi_label_loss else loss
    return jax.nn.softmax(logits, axis=-1), total


def _repeated(x: Array, groups: int) -> Array:
    """Each head `groups` times."""
    batch, seq, heads, features = x.shape
    wide = jnp.broadcast_to(x[:, :, :, None], (batch, seq, heads, groups, features))
    return wide.reshape(batch, seq, heads * groups, features)


@operation("flash_attention", optional=frozenset({3, 4}))
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    seed: Array | None = None,
    mask: Array | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    return_softmax: bool = False,
    is_test: bool = False,
) -> tuple[Array | None, ...]:
    """Attention of `[batch, seq, heads, head_dim]`; its weights, and their log-sum-exp."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (_repeated(x, groups) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + jnp.broadcast_to(mask, scores.shape)
    if causal:
        rows = lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        columns = lax.broadcasted_iota(jnp.int32, scores.shape, 3)
        scores = jnp.where(rows >= columns, scores, -1e30)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    softmax = weights / total
    out = jnp.einsum("bhqk,bkhd->bqhd", softmax, v)
    return out, softmax, jnp.squeeze(jnp.log(total) + top, -1), None


def _turned(x: Array, sin: Array, cos: Array, neox: bool) -> Array:
    if neox:
        first, second = jnp.split(x, 2, axis=-1)
        other = jnp.concatenate([-second, first], axis=-1)
    else:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        first, second = jnp.split(pairs, 2, axis=-1)
        other = jnp.concatenate([-second, first], axis=-1).reshape(x.shape)
    return x * cos + other * sin


@operation(
    "fused_rotary_position_embedding",
    kinds="fffffi",
    optional=frozenset({1, 2, 3, 4, 5}),
    bound=lambda shapes, attrs: shapes[0][0 if attrs.get("time_major") else 1],
)
def fused_rotary_position_embedding(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    sin: Array | None = None,
    cos: Array | None = None,
    position_ids: Array | None = None,
    use_neox_rotary_style: bool = True,
    time_major: bool = False,
    rotary_emb_base: float = 10000.0,
) -> tuple[Array | None, ...]:
    """Pairs of features turned by an angle that grows with the position."""
    if sin is None or cos is None:
        shape = (1, q.shape[0 if time_major else 1], 1, q.shape[3])
        place = lax.broadcasted_iota(jnp.float32, shape, 1)
        feature = lax.broadcasted_iota(jnp.float32, shape, 3)
        angle = place * rotary_emb_base ** (-2 * jnp.floor(feature / 2) / q.shape[-1])
        sin, cos = jnp.sin(angle), jnp.cos(angle)
    elif position_ids is not None:
        tables = [x.reshape(-1, x.shape[-1]) for x in (sin, cos)]
        sin, cos = (jnp.take(x, position_ids, axis=0, mode="clip")[:, :, None] for x in tables)
    if time_major:
        sin, cos = jnp.swapaxes(sin, 0, 1), jnp.swapaxes(cos, 0, 1)
    return tuple(
        None
        if x is None
        else _turned(
            x, jnp.broadcast_to(sin, x.shape), jnp.broadcast_to(cos, x.shape), use_neox_rotary_style
        )
        for x in (q, k, v)
    )
