"""The operations that the rules are tested on: one table per family, for any shapes."""

# ruff: noqa: E731 - tables of functions are what this file is

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.harness import Case
from tests.rules.values import booleans, eighths, integers, positive, with_nans
from tests.rules.window_cases import convolution, windows

Shape = tuple[int, ...]


def cases(
    shape: Shape, table: Callable[..., Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]]
) -> list[Case]:
    """A table's cases for one shape."""
    return [Case(f"{name}{shape}", fn, args) for name, fn, args in table(*shape)]


Row = tuple[str, Callable[..., Any], tuple[Any, ...]]


def elementwise(n: int, m: int) -> Iterator[Row]:
    """One of each kind of elementwise rule; the rest differ by name only."""
    x, y, p = eighths(n, m), eighths(n, m, seed=1), positive(n, m)
    b, i = booleans(n, m), integers(n, m)
    for name in (
        *("sin", "neg", "abs", "square", "sqrt", "rsqrt", "log", "log1p", "sign", "is_finite"),
        *("cbrt", "ceil", "erf", "exp", "exp2", "expm1", "floor", "logistic", "round", "tanh"),
        *("erfc", "erf_inv", "lgamma", "digamma", "tan", "asin", "acosh", "atanh"),
    ):
        yield name, getattr(lax, name), (x,)
    for name in ("add", "sub", "mul", "max", "min", "atan2"):
        yield name, getattr(lax, name), (x, y)
    yield "div", lax.div, (x, 2.0 ** integers(n, m, high=3).astype(np.float32))
    yield "pow", lax.pow, (p, y)
    yield "add scalar", lambda a, s: lax.add_p.bind(a, jnp.broadcast_to(s, a.shape)), (x, y)
    yield "and", lax.bitwise_and, (b, booleans(n, m, seed=1))
    yield "not", lax.bitwise_not, (b,)
    yield "select", lax.select_n, (b, x, y)
    yield "clamp", lambda lo, a, hi: lax.clamp(lo, a, hi), (y - 1, x, y + 1)
    yield (
        "clamp scalars",
        lambda lo, a, hi: lax.clamp_p.bind(lo, a, hi),
        (np.float32(-1), x, np.float32(1)),
    )
    yield "f32->bf16", lambda a: lax.convert_element_type(a, jnp.bfloat16), (x,)
    yield "bf16->f32", lambda a: lax.convert_element_type(a, jnp.float32), (x.astype(jnp.bfloat16),)
    yield "i32->f32", lambda a: lax.convert_element_type(a, jnp.float32), (i,)
    yield "bitcast", lambda a: lax.bitcast_convert_type(a, jnp.int32), (x,)
    yield "bitcast wide", lambda a: lax.bitcast_convert_type(a, jnp.uint8), (x,)
    yield "bitcast half", lambda a: lax.bitcast_convert_type(a, jnp.int4), (i.astype(np.int8),)
    small = (i * 2.0**-13).astype(jnp.float8_e4m3b11fnuz)  # the other type rounds some to 0
    yield "f8->f8", lambda a: lax.convert_element_type(a, jnp.float8_e4m3fn), (small,)
    large = np.full((n, m), 200, np.float16)  # products of what adds up to it overflow
    yield "mul f16", lax.mul, (large, large)
    yield "div f16", lax.div, (large, np.float16(1) / large)
    yield "complex", lax.complex, (x, y)
    yield "real", lax.real, (x + 1j * y,)
    yield "integer_pow", lambda a: lax.integer_pow(a, 3), (x,)
    yield "reduce_precision", lambda a: lax.reduce_precision(a, 8, 3), (x,)
    yield "barrier", lambda a, c: lax.optimization_barrier((a, c)), (x, y.T)


def contraction(n: int, m: int) -> Iterator[Row]:
    """Products with and without batch dims."""
    k = m + 1

    def dot(contract: Any, batch: Any = ((), ()), **more: Any) -> Callable[..., Any]:
        return lambda a, b: lax.dot_general(a, b, (contract, batch), **more)

    yield "mk,kn", dot(((1,), (0,))), (eighths(n, k), eighths(k, m, seed=1))
    yield "bmk,bkn", dot(((2,), (1,)), ((0,), (0,))), (eighths(n, 2, k), eighths(n, k, m, seed=1))
    yield "kmb,bk", dot(((0,), (1,)), ((2,), (0,))), (eighths(k, m, n), eighths(n, k, seed=1))
    yield "mij,ijn", dot(((1, 2), (0, 1))), (eighths(2, n, m), eighths(n, m, 3, seed=1))
    yield "outer", dot(((), ())), (eighths(n), eighths(m, seed=1))
    yield (
        "bf16 into f32",
        dot(((1,), (0,)), preferred_element_type=jnp.float32),
        (eighths(n, k, dtype=jnp.bfloat16), eighths(k, m, seed=1, dtype=jnp.bfloat16)),
    )
    yield "ints", dot(((1,), (0,))), (integers(n, k), integers(k, m, seed=1))
    yield "bools", dot(((1,), (0,))), (booleans(n, k), booleans(k, m, seed=1))
    yield (
        "bools into i32",
        dot(((1,), (0,)), preferred_element_type=jnp.int32),
        (booleans(n, k), booleans(k, m, seed=1)),
    )
    yield "bools,f32", dot(((1,), (0,))), (booleans(n, k), eighths(k, m, seed=1))
    yield "i8,f32", dot(((1,), (0,))), (integers(n, k, dtype=np.int8), eighths(k, m, seed=1))
    yield (
        "i32 into f32",
        dot(((1,), (0,)), preferred_element_type=jnp.float32),
        (integers(n, k), integers(k, m, seed=1)),
    )
    yield (
        "i8 into i32",
        dot(((1,), (0,)), preferred_element_type=jnp.int32),
        (integers(n, k, dtype=np.int8), integers(k, m, seed=1, dtype=np.int8)),
    )


def reduction(n: int, m: int) -> Iterator[Row]:
    """Reductions over the first, the last and all dims."""
    x, b, i = eighths(n, 2, m), booleans(n, 2, m), integers(n, 2, m, high=4)
    powers = (2.0 ** (integers(n, 2, m, high=3) - 1)).astype(np.float32)
    for axes in ((0,), (2,), (0, 1, 2)):
        for name, fn, arg in (
            ("sum", lax.reduce_sum_p, x),
            ("max", lax.reduce_max_p, x),
            ("min", lax.reduce_min_p, x),
            ("prod", lax.reduce_prod_p, powers),
            ("or", lax.reduce_or_p, b),
            ("and", lax.reduce_and_p, b),
            ("max of ints", lax.reduce_max_p, i),
            ("max of complex", lax.reduce_max_p, x + 1j * x[::-1]),
            ("or of ints", lax.reduce_or_p, i),
            ("and of ints", lax.reduce_and_p, i),
        ):
            kwargs: dict[str, Any] = {"axes": axes}
            if not name.startswith(("or", "and")):
                kwargs["out_sharding"] = None
            yield f"{name} {axes}", lambda a, fn=fn, kw=kwargs: fn.bind(a, **kw), (arg,)
    yield "max of bools", lambda a: lax.reduce_max_p.bind(a, axes=(0,), out_sharding=None), (b,)
    for dim in (0, 2):
        for name, values in (
            ("ties", i),
            ("distinct", x),
            ("bools", b),
            ("zeros", x * 0),
            ("nans", with_nans(x)),
        ):
            if values.shape[dim]:
                yield (
                    f"argmax {dim} {name}",
                    lambda a, d=dim: lax.argmax(a, d, jnp.int32),
                    (values,),
                )
                yield (
                    f"argmin {dim} {name}",
                    lambda a, d=dim: lax.argmin(a, d, jnp.int32),
                    (values,),
                )


def shape(n: int, m: int) -> Iterator[Row]:
    """Operations that move dims or rows."""
    x, y = eighths(n, m), eighths(n, m, seed=1)
    b, z = booleans(n, m), eighths(n, 1, m)
    yield "transpose", lambda a: lax.transpose(a, (1, 0)), (x,)
    yield "squeeze", lambda a: lax.squeeze(a, (1,)), (z,)
    yield "broadcast", lambda a: lax.broadcast_in_dim(a, (n, 3, m), (0, 2)), (x,)
    yield "broadcast 1", lambda a: lax.broadcast_in_dim(a, (n, 4, m), (0, 1, 2)), (z,)
    for dim in (0, 1):
        yield f"iota {dim}", lambda d=dim: lax.broadcasted_iota(jnp.int32, (n, m), d), ()
    yield "long iota", lambda: lax.broadcasted_iota(jnp.bfloat16, (1001, m), 0), ()
    yield "reshape merge", lambda a: lax.reshape(a, (n * 4, m)), (eighths(n, 4, m),)
    yield "reshape split", lambda a: lax.reshape(a, (n, 2, 2, m)), (eighths(n * 4, m),)
    yield "reshape flat", lambda a: lax.reshape(a, (n * m,)), (x,)
    yield "reshape mix", lambda a: lax.reshape(a, (m, n, 2)), (eighths(n, 2, m),)
    yield "split", lambda a: lax.split(a, (1, n), 0), (eighths(n + 1, m),)
    yield "slice", lambda a: lax.slice(a, (1, 0), (n + 1, m)), (eighths(n + 2, m),)
    yield "slice half", lambda a: lax.slice(a, (n, 0), (2 * n, m)), (eighths(2 * n, m),)
    yield "slice row", lambda a: lax.slice(a, (n, 0), (n + 1, m)), (eighths(n + 1, m),)
    yield "slice row of bools", lambda a: lax.slice(a, (n, 0), (n + 1, m)), (booleans(n + 1, m),)
    yield (
        "slice step",
        lambda a: lax.slice(a, (1, 0), (2 * n + 1, m), (2, 1)),
        (eighths(2 * n + 1, m),),
    )
    yield "rev 0", lambda a: lax.rev(a, (0,)), (x,)
    yield "rev 01", lambda a: lax.rev(a, (0, 1)), (b,)
    yield "concatenate", lambda a, c: lax.concatenate([a, c], 0), (x, eighths(n + 1, m, seed=1))
    yield "concatenate 3", lambda a, c, d: lax.concatenate([a, c, d], 1), (x, y, eighths(n, 1))
    yield "tile", lambda a: lax.tile(a, (2, 1)), (x,)
    yield "tile both", lambda a: lax.tile(a, (4, 2)), (x,)
    yield "stack", lambda a, c: jnp.stack([a, c], 1), (x, y)
    yield "split thirds", lambda a: lax.split(a, (n, n, n + 1), 0), (eighths(3 * n + 1, m),)
    pads = {
        "pad": ((1, 2, 0), (0, 0, 0)),
        "pad inner": ((0, 1, 1), (0, 0, 0)),
        "pad less": ((2, -1, 0), (0, 0, 0)),
        "pad both": ((1, 0, 0), (3, 0, 1)),
    }
    for name, config in pads.items():
        yield name, lambda a, v, c=config: lax.pad(a, v, c), (x, np.float32(0.5))
    yield (
        "pad crop",
        lambda a, v: lax.pad(a, v, ((-1, 0, 0), (0, -1, 0))),
        (eighths(n + 1, m + 1), np.float32(0)),
    )


def scans(n: int, m: int) -> Iterator[Row]:
    """Running reductions, forward and backward."""
    x = eighths(n, m)
    for reverse in (False, True):
        for name in ("cumsum", "cummax", "cummin", "cumlogsumexp"):
            fn = getattr(lax, name)
            for dim in (0, 1):
                yield f"{name} {dim} {reverse}", lambda a, f=fn, r=reverse, d=dim: f(a, d, r), (x,)
        spiral = x + 1j * eighths(n, m, seed=1)
        yield (
            f"cumlogsumexp complex {reverse}",
            lambda a, r=reverse: lax.cumlogsumexp(a, 0, r),
            (spiral,),
        )
        powers = (2.0 ** (integers(n, m, high=3) - 1)).astype(np.float32)
        yield f"cumprod {reverse}", lambda a, r=reverse: lax.cumprod(a, 0, r), (powers,)
        yield f"cumsum ints {reverse}", lambda a, r=reverse: lax.cumsum(a, 0, r), (integers(n, m),)


def _gather(dn: Any, sizes: Shape, mode: Any, **more: Any) -> Callable[..., Any]:
    return lambda a, i: lax.gather(a, i, dn, sizes, mode=mode, **more)


def _scatter(fn: Any, dn: Any, mode: Any = "drop") -> Callable[..., Any]:
    return lambda a, i, u: fn(a, i, u, dn, mode=mode)


def indexing(n: int, m: int) -> Iterator[Row]:
    """Gathers and scatters, whose indices reach out of range on both sides."""
    rows = max(n, 1)
    table, wild = eighths(rows, m), integers(3, 2, 1, high=rows + 3) - 1
    rowwise = lax.GatherDimensionNumbers((2,), (0,), (0,))
    for mode in ("clip", "fill"):
        yield f"rows {mode}", _gather(rowwise, (1, m), mode), (table, wild)
    yield "rows fill 0", _gather(rowwise, (1, m), "fill", fill_value=0), (table, wild)
    yield "rows of ints", _gather(rowwise, (1, m), "fill"), (integers(rows, m), wild)
    long = eighths(300, 2)  # whose rows no 8 bits count
    for dtype in (np.uint8, np.int8):
        near = np.array([[[5], [100]], [[253], [199]]], np.uint8).astype(dtype)
        for mode in ("clip", "fill", "promise_in_bounds"):
            yield f"{dtype.__name__} rows {mode}", _gather(rowwise, (1, 2), mode), (long, near)
    yield "rows beyond a promise", _gather(rowwise, (1, m), "promise_in_bounds"), (table, wild)
    safe = integers(3, 2, 1, high=rows)
    yield "rows promised", _gather(rowwise, (1, m), "promise_in_bounds"), (table, safe)
    pairs = np.concatenate([wild, integers(3, 2, 1, high=m + 1, seed=1)], -1)
    single = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    yield "elements", _gather(single, (1, 1), "fill"), (table, pairs)
    windows = lax.GatherDimensionNumbers((1, 2), (), (0,))
    yield "windows", _gather(windows, (1, m), "clip"), (table, wild[:, 0])
    batched = lax.GatherDimensionNumbers((1,), (1,), (1,), (0,), (0,))
    yield (
        "batched",
        _gather(batched, (1, 1, m), "fill"),
        (eighths(rows, 3, m), integers(rows, 1, high=4)),
    )

    into, add = lax.ScatterDimensionNumbers((2,), (0,), (0,)), eighths(3, 2, m, seed=2)
    for name in ("scatter_add", "scatter_max", "scatter_min", "scatter_mul"):
        yield name, _scatter(getattr(lax, name), into), (table, wild, add)
        yield f"{name} clip", _scatter(getattr(lax, name), into, "clip"), (table, wild, add)
    distinct = np.random.default_rng(0).permutation(rows + 2)[:rows, None].astype(np.int32) - 1
    one = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    yield "scatter", _scatter(lax.scatter, one), (table, distinct, eighths(rows, m, seed=2))
    two = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
    yield (
        "scatter_add elements",
        _scatter(lax.scatter_add, two),
        (table, pairs, eighths(3, 2, seed=3)),
    )
    spans = lax.ScatterDimensionNumbers((1, 2), (), (0,))
    if rows > 1:
        yield (
            "scatter_add windows",
            _scatter(lax.scatter_add, spans),
            (table, wild[:, 0], eighths(3, 2, m)),
        )
    grouped = lax.ScatterDimensionNumbers((1,), (1,), (1,), (0,), (0,))
    yield (
        "scatter_add batched",
        _scatter(lax.scatter_add, grouped),
        (eighths(rows, 3, m), integers(rows, 1, high=4), eighths(rows, m, seed=1)),
    )
    far = (np.uint32(2**32 - 5), np.uint32(0))
    yield (
        "dynamic_slice far",
        lambda a, i, j: lax.dynamic_slice_p.bind(a, i, j, slice_sizes=(1, m)),
        (eighths(rows + 2, m), *far),
    )
    yield (
        "dynamic_update_slice far",
        lax.dynamic_update_slice_p.bind,
        (eighths(rows + 2, m), eighths(rows, m, seed=1), *far),
    )
    at = (np.int32(1), np.int32(0))
    for start in (0, 1, n, -1):
        at = (np.int32(start), np.int32(0))
        yield (
            f"dynamic_slice {start}",
            lambda a, i, j: lax.dynamic_slice_p.bind(a, i, j, slice_sizes=(rows, m)),
            (eighths(rows + 2, m), *at),
        )
        yield (
            f"dynamic_slice row {start}",
            lambda a, i, j: lax.dynamic_slice_p.bind(a, i, j, slice_sizes=(1, m)),
            (eighths(rows + 2, m), *at),
        )
        yield (
            f"dynamic_update_slice {start}",
            lax.dynamic_update_slice_p.bind,
            (eighths(rows + 2, m), eighths(rows, m, seed=1), *at),
        )


def ordering(n: int, m: int) -> Iterator[Row]:
    """Sorts and the largest values, with ties and infinities."""
    x, i = eighths(n, m), integers(n, m, high=3)
    holes = np.where(booleans(n, m), x, -np.inf).astype(np.float32)
    yield "sort", lambda a: lax.sort(a, dimension=1), (x,)
    yield "sort pairs", lambda a, c: tuple(lax.sort((a, c), dimension=0, num_keys=1)), (i, x)
    for dim in (0, 1):
        for name, values in (
            ("distinct", x),
            ("ties", i),
            ("holes", holes),
            ("nans", with_nans(x)),
            ("lowest", x * 0 - np.inf),
            ("negative nans", -with_nans(x)),
        ):
            for k in (1, values.shape[dim]):
                if k <= values.shape[dim]:
                    yield (
                        f"top_k {k} {dim} {name}",
                        lambda a, k=k, d=dim: tuple(lax.top_k(a, k, axis=d)),
                        (values,),
                    )
    if m > 1:
        yield "approx_max_k", lambda a: tuple(lax.approx_max_k(a, 1)), (x,)


def linalg(n: int, m: int) -> Iterator[Row]:
    """Matrices in batches of n."""
    square = eighths(n, 2, 3, 3) / 16
    s = (square @ square.swapaxes(-1, -2) + 4 * np.eye(3, dtype=np.float32)).astype(np.float32)
    yield (
        "cholesky",
        lax.linalg.cholesky_p.bind
        if hasattr(lax.linalg, "cholesky_p")
        else lambda a: lax.linalg.cholesky(a, symmetrize_input=False),
        (s,),
    )
    yield "lu", lambda a: tuple(lax.linalg.lu(a)), (s,)
    yield "qr", lambda a: tuple(lax.linalg.qr(a)), (s,)
    yield "eigh", lambda a: tuple(lax.linalg.eigh(a, symmetrize_input=False)), (s,)
    yield "svd", lambda a: lax.linalg.svd(a, compute_uv=False), (s,)
    for left in (True, False):
        b = eighths(n, 2, 3, m, seed=1) if left else eighths(n, 2, m, 3, seed=1)
        yield (
            f"triangular_solve {left}",
            lambda a, c, f=left: lax.linalg.triangular_solve(a, c, left_side=f, lower=True),
            (s, b),
        )
    yield "tridiagonal", lambda a: tuple(lax.linalg.tridiagonal(a)), (s,)
    yield "fft", lambda a: lax.fft(a, "FFT", (3,)), (s.astype(np.complex64),)
    yield "rfft2", lambda a: lax.fft(a, "RFFT", (3, 3)), (s,)
    ragged = lambda a, b, g: lax.ragged_dot(a, b, g)
    if n == 4:
        yield (
            "ragged_dot",
            ragged,
            (eighths(n, m), eighths(2, m, 3, seed=1), np.asarray([1, 3], np.int32)),
        )


def random(n: int, m: int) -> Iterator[Row]:
    """Draws and keys."""
    key, keys = jax.random.key(3), jax.random.split(jax.random.key(4), max(n, 1))
    for width in (8, 16, 32):
        dtype = jnp.dtype(f"uint{width}")
        yield f"bits {width}", lambda k, d=dtype: jax.random.bits(k, (n, m), d), (key,)
    yield "bits of keys", jax.vmap(lambda k: jax.random.bits(k, (m, 2))), (keys,)
    rbg = jax.random.key(3, impl="rbg")
    yield "bits rbg", lambda k: jax.random.bits(k, (n, m)), (rbg,)
    yield "slice of keys", lambda k: lax.slice(k, (0,), (max(n - 1, 1),)), (keys,)
    yield "rev of keys", lambda k: lax.rev(k, (0,)), (keys,)
    yield "concatenate keys", lambda k, other: lax.concatenate([k, other], 0), (keys, keys)
    yield "update of keys", lambda k, new: lax.dynamic_update_slice(k, new, (0,)), (keys, keys[:1])
    yield "fold_in", jax.vmap(jax.random.fold_in), (keys, integers(max(n, 1), dtype=np.uint32))
    yield "split", jax.vmap(lambda k: jax.random.split(k, m)), (keys,)
    yield "unwrap", jax.random.key_data, (keys,)
    yield "wrap", jax.random.wrap_key_data, (np.asarray(jax.random.key_data(keys)),)
    yield "gamma", lambda k, a: jax.random.gamma(k, a), (key, positive(n, m) * 3)
    yield (
        "gammas",
        jax.vmap(lambda k, a: jax.random.gamma(k, a)),
        (keys, positive(max(n, 1), m) * 3),
    )
    yield (
        "generator",
        lambda w: tuple(lax.rng_bit_generator(w, (n, m))),
        (np.arange(4, dtype=np.uint32),),
    )
    yield "seed", jax.vmap(jax.random.key), (integers(max(n, 1)),)


FAMILIES: dict[str, Callable[..., Iterator[Row]]] = {
    "elementwise": elementwise,
    "contraction": contraction,
    "reduction": reduction,
    "shape": shape,
    "scans": scans,
    "indexing": indexing,
    "ordering": ordering,
    "windows": windows,
    "convolution": convolution,
    "linalg": linalg,
    "random": random,
}

SHAPES: Sequence[Shape] = ((4, 6), (5, 3), (1, 2), (0, 3))
