"""Operations that move, join, cut and repeat dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.compiler.operations.elementwise import ranked
from meshpar.compiler.operations.registry import Attrs, LocalCall, operation

Array = jax.Array
Shape = tuple[int, ...]


def _made(name: str) -> Any:
    """An attribute that is the shape of the result: locally that of the block."""

    def local(attrs: Attrs, call: LocalCall) -> Attrs:
        return {**attrs, name: call.outputs[0]}

    return local


def full_shape(shape: Sequence[int], old: Shape) -> Shape:
    """A shape in which 0 copies the old dim and one -1 stands for what is left."""
    sizes = [old[d] if size == 0 and d < len(old) else size for d, size in enumerate(shape)]
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(old) // max(known, 1)
    return tuple(sizes)


@operation("reshape reshape2", local=_made("shape"))
def reshape(x: Array, shape: Sequence[int] = ()) -> Array:
    """The same elements in another shape."""
    return x.reshape(full_shape(shape, x.shape))


@operation("flatten")
def flatten(x: Array, start_axis: int = 0, stop_axis: int = -1) -> Array:
    """Neighbouring dims merged into one."""
    if x.ndim == 0:
        return x.reshape(1)
    start, stop = start_axis % x.ndim, stop_axis % x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[stop + 1 :])


@operation("squeeze")
def squeeze(x: Array, axis: Sequence[int] = ()) -> Array:
    """Dims of size 1 left out: those named, or all of them."""
    named = {a % x.ndim for a in axis} if axis else set(range(x.ndim))
    return jnp.squeeze(x, tuple(d for d in named if x.shape[d] == 1))


@operation("unsqueeze unsqueeze2")
def unsqueeze(x: Array, axis: Sequence[int] = ()) -> Array:
    """Dims of size 1 put in, one after the other."""
    for at in axis:
        x = jnp.expand_dims(x, at)
    return x


@operation("transpose transpose2")
def transpose(x: Array, perm: Sequence[int] = ()) -> Array:
    """Dims in another order."""
    return jnp.transpose(x, perm)


@operation("expand", local=_made("shape"))
def expand(x: Array, shape: Sequence[int] = ()) -> Array:
    """Dims of size 1, and new dims in front, repeated; -1 keeps a dim."""
    old = (1,) * (len(shape) - x.ndim) + x.shape
    wanted = tuple(o if n == -1 else n for o, n in zip(old, shape, strict=True))
    return jnp.broadcast_to(x.reshape(old), wanted)


@operation("expand_as expand_as_v2", local=_made("target_shape"), optional=frozenset({1}))
def expand_as(x: Array, y: Array | None = None, target_shape: Sequence[int] = ()) -> Array:
    """`x` repeated to the shape, and to where, `y` is."""
    shape = tuple(target_shape) if y is None else y.shape
    wide = jnp.broadcast_to(x.reshape((1,) * (len(shape) - x.ndim) + x.shape), shape)
    return wide if y is None else jnp.where(y == y, wide, wide)


@operation("tile")
def tile(x: Array, repeat_times: Sequence[int] = ()) -> Array:
    """Dims laid out several times; a dim that is laid out once is left alone."""
    times = (1,) * (x.ndim - len(repeat_times)) + tuple(repeat_times)
    x = x.reshape((1,) * (len(times) - x.ndim) + x.shape)
    for d, count in enumerate(times):
        if count != 1:
            x = jnp.concatenate([x] * count, axis=d)
    return x


@operation("concat")
def concat(xs: list[Array], axis: int = 0) -> Array:
    """Tensors one after the other along a dim."""
    return jnp.concatenate(xs, axis=axis)


@operation("stack")
def stack(xs: list[Array], axis: int = 0) -> Array:
    """Tensors side by side along a new dim."""
    return jnp.stack(xs, axis=axis)


@operation("split")
def split(x: Array, sections: Sequence[int] = (), axis: int = 0) -> list[Array]:
    """Pieces of given sizes along a dim; a size of -1 is what the others leave."""
    known = sum(size for size in sections if size != -1)
    sizes = [x.shape[axis] - known if size == -1 else size for size in sections]
    edges = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return jnp.split(x, edges, axis=axis)


@operation("split_with_num")
def split_with_num(x: Array, num: int = 1, axis: int = 0) -> list[Array]:
    """Equal pieces along a dim."""
    return jnp.split(x, num, axis=axis)


@operation("unbind")
def unbind(x: Array, axis: int = 0) -> list[Array]:
    """The rows of a dim, without it."""
    return [jnp.squeeze(row, axis) for row in jnp.split(x, x.shape[axis], axis=axis)]


def _cut(x: Array, axes: Sequence[int], edges: Sequence[slice]) -> Array:
    at = [slice(None)] * x.ndim
    for axis, edge in zip(axes, edges, strict=True):
        start, stop, step = edge.indices(x.shape[axis])
        whole = (start, stop, step) == (0, x.shape[axis], 1)
        at[axis % x.ndim] = slice(None) if whole else edge
    return x[tuple(at)]


@operation("slice")
def slice_(
    x: Array,
    axes: Sequence[int] = (),
    starts: Sequence[int] = (),
    ends: Sequence[int] = (),
    infer_flags: Sequence[int] = (),
    decrease_axis: Sequence[int] = (),
) -> Array:
    """Ranges of some dims; dims in `decrease_axis` are left out, being one row."""
    out = _cut(x, axes, [slice(a, b) for a, b in zip(starts, ends, strict=True)])
    return jnp.squeeze(out, tuple(a % x.ndim for a in decrease_axis))


@operation("strided_slice")
def strided_slice(
    x: Array,
    axes: Sequence[int] = (),
    starts: Sequence[int] = (),
    ends: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Array:
    """Every so many rows of some dims.

    Where whole groups of rows give one each, it is written so that groups may lie apart.
    """
    for axis, *edge in zip(axes, starts, ends, strides, strict=True):
        axis = axis % x.ndim
        start, stop, step = slice(*edge).indices(x.shape[axis])
        if step > 1 and start < step and stop == x.shape[axis] and not stop % step:
            groups = x.reshape(*x.shape[:axis], stop // step, step, *x.shape[axis + 1 :])
            x = jax.lax.index_in_dim(groups, start, axis + 1, keepdims=False)
        else:
            x = _cut(x, (axis,), (slice(start, stop, step),))
    return x


@operation("pad")
def pad(x: Array, paddings: Sequence[int] = (), pad_value: float = 0.0) -> Array:
    """A constant around each dim: (before, after) for the first, then for the second, ..."""
    pairs = [(paddings[2 * d], paddings[2 * d + 1]) for d in range(x.ndim)]
    return jnp.pad(x, pairs, constant_values=pad_value)


@operation("roll")
def roll(x: Array, shifts: Sequence[int] = (), axis: Sequence[int] = ()) -> Array:
    """Rows moved on, the last ones coming first; over all elements in a row without dims."""
    if not axis:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(axis))


@operation("tril_triu")
def tril_triu(x: Array, diagonal: int = 0, lower: bool = True) -> Array:
    """A triangle of each matrix, zeros elsewhere."""
    return jnp.tril(x, diagonal) if lower else jnp.triu(x, diagonal)


@operation("triu")
def triu(x: Array, diagonal: int = 0) -> Array:
    """The upper triangle."""
    return jnp.triu(x, diagonal)


@operation("tril")
def tril(x: Array, diagonal: int = 0) -> Array:
    """The lower triangle."""
    return jnp.tril(x, diagonal)


@operation("replicated", templates=True)
def replicated(ins: list[Array], outs: list[Shape]) -> list[Array]:
    """Any function at all: every result depends on every element of every argument."""
    mixed = jnp.zeros(())
    for x in ins:
        mixed = mixed + jnp.sin(jnp.sum(jnp.sin(x)))
    return [jnp.broadcast_to(mixed, shape) for shape in outs]


@operation("default_data_parallel default_", templates=True)
def default_data_parallel(ins: list[Array], outs: list[Shape]) -> list[Array]:
    """Any function of batches: a row of a result depends on that row of every argument.

    Where the numbers of rows differ, rows are groups of a common divisor of them.
    """
    batch = math.gcd(*(shape[0] for shape in (*(x.shape for x in ins), *outs) if shape))
    mixed = jnp.zeros(batch)
    for x in ins:
        rows = jnp.sum(jnp.sin(x).reshape(batch, -1), axis=1) if x.ndim else jnp.sin(x)
        mixed = mixed + jnp.sin(jnp.broadcast_to(rows, (batch,)))
    wide = [jnp.broadcast_to(mixed[:, None], (batch, math.prod(s) // batch)) for s in outs]
    return [
        rows.reshape(shape) if shape else jnp.sin(jnp.sum(mixed))
        for rows, shape in zip(wide, outs, strict=True)
    ]


@operation("one_hot", kinds="i", bound=lambda shapes, attrs: attrs["num_classes"])
def one_hot(x: Array, num_classes: int = 1) -> Array:
    """A new last dim with a 1 where the index is."""
    classes = jnp.arange(num_classes).reshape((1,) * x.ndim + (-1,))
    same, every = ranked(x[..., None], classes)
    return jnp.where(same == every, 1.0, 0.0)
