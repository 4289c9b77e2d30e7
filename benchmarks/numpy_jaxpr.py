"""Runs a jaxpr by numpy: nothing is compiled, so thousands of small programs take seconds.

Primitives that are not written out here are run by JAX itself.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_ERF = np.vectorize(math.erf, otypes=[np.float64])
_ERFC = np.vectorize(math.erfc, otypes=[np.float64])


def run(closed, args):
    """The results of a closed jaxpr on numpy arrays."""
    with np.errstate(all="ignore"):
        return _run(closed.jaxpr, closed.consts, [np.asarray(x) for x in args])


def _run(jaxpr, consts, args):
    env = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        if hasattr(atom, "val"):
            return np.asarray(atom.val, atom.aval.dtype)
        return env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        outs = _equation(eqn, ins)
        for var, out in zip(eqn.outvars, outs, strict=True):
            env[var] = np.asarray(out, var.aval.dtype)
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn, ins):
    name = eqn.primitive.name
    if name in _SIMPLE:
        return [_SIMPLE[name](*ins)]
    if name in _WITH_PARAMS:
        return _WITH_PARAMS[name](eqn.params, *ins)
    inner = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
    if inner is not None and name not in ("scan", "while", "cond"):
        body = getattr(inner, "jaxpr", inner)
        return _run(body, getattr(inner, "consts", ()), ins)
    out = eqn.primitive.bind(*map(jnp.asarray, ins), **eqn.params)
    return [np.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]


def _max(x, y):
    return np.maximum(x, y)


_SIMPLE = {
    "abs": np.abs, "acos": np.arccos, "acosh": np.arccosh, "add": np.add, "add_any": np.add,
    "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atan2": np.arctan2,
    "atanh": np.arctanh, "ceil": np.ceil, "copy": np.copy, "copy_p": np.copy, "cos": np.cos,
    "cosh": np.cosh, "eq": np.equal, "erf": _ERF, "erfc": _ERFC, "exp": np.exp,
    "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "lt": np.less, "max": _max, "min": np.minimum,
    "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "pow": np.power, "real": np.real,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sign": np.sign, "sin": np.sin, "sinh": np.sinh,
    "sqrt": np.sqrt, "square": np.square, "stop_gradient": np.copy, "sub": np.subtract,
    "tan": np.tan, "tanh": np.tanh, "clamp": lambda lo, x, hi: np.clip(x, lo, hi),
}  # fmt: skip


def _boolean(logical, bitwise):
    return lambda p, *xs: [(logical if xs[0].dtype == bool else bitwise)(*xs)]


def _reduce(fn):
    return lambda p, x: [fn(x, axis=p["axes"])]


def _arg(fn):
    return lambda p, x: [fn(x, axis=p["axes"][0])]


def _running(fn):
    def run_it(p, x):
        axis = p["axis"]
        flipped = np.flip(x, axis) if p["reverse"] else x
        out = fn(flipped, axis=axis)
        return [np.flip(out, axis) if p["reverse"] else out]

    return run_it


def _broadcast(p, x):
    shape = [1] * len(p["shape"])
    for size, dim in zip(x.shape, p["broadcast_dimensions"], strict=True):
        shape[dim] = size
    return [np.broadcast_to(x.reshape(shape), p["shape"])]


def _iota(p):
    shape = [1] * len(p["shape"])
    shape[p["dimension"]] = p["shape"][p["dimension"]]
    return [np.broadcast_to(np.arange(p["shape"][p["dimension"]]).reshape(shape), p["shape"])]


def _select(p, which, *cases):
    return (
        [np.choose(which.astype(int), np.broadcast_arrays(*cases))]
        if len(cases) > 2
        else [np.where(which, cases[1], cases[0])]
    )


def _dot(p, lhs, rhs):
    (lk, rk), (lb, rb) = p["dimension_numbers"]
    names = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(names) for _ in range(lhs.ndim)]
    right = [next(names) for _ in range(rhs.ndim)]
    for i, j in zip((*lb, *lk), (*rb, *rk), strict=True):
        right[j] = left[i]
    out = [left[i] for i in lb]
    out += [n for i, n in enumerate(left) if i not in {*lb, *lk}]
    out += [n for i, n in enumerate(right) if i not in {*rb, *rk}]
    return [np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", lhs, rhs)]


def _slice(p, x):
    steps = p["strides"] or (1,) * x.ndim
    edges = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    return [x[tuple(slice(*edge) for edge in edges)]]


def _split(p, x):
    edges = np.cumsum(p["sizes"])[:-1]
    return np.split(x, edges, axis=p["axis"])


def _pad(p, x, value):
    if any(lo < 0 or hi < 0 or inner for lo, hi, inner in p["padding_config"]):
        return [np.asarray(jax.lax.pad(jnp.asarray(x), jnp.asarray(value), p["padding_config"]))]
    pairs = [(lo, hi) for lo, hi, _ in p["padding_config"]]
    return [np.pad(x, pairs, constant_values=value)]


def _sort(p, *xs):
    if p["num_keys"] != 1:
        return [np.asarray(x) for x in jax.lax.sort(tuple(map(jnp.asarray, xs)), **_sorted(p))]
    order = np.argsort(xs[0], axis=p["dimension"], kind="stable")
    return [np.take_along_axis(x, order, axis=p["dimension"]) for x in xs]


def _sorted(p):
    return {k: p[k] for k in ("dimension", "is_stable", "num_keys")}


def _top_k(p, x):
    order = np.argsort(-x, axis=-1, kind="stable")[..., : p["k"]]
    return [np.take_along_axis(x, order, axis=-1), order]


def _gather(p, x, indices):
    dn, sizes = p["dimension_numbers"], p["slice_sizes"]
    batch_shape = indices.shape[:-1]
    window = [
        d for d in range(x.ndim) if d not in (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    ]
    out = np.empty((*batch_shape, *(sizes[d] for d in window)), x.dtype)
    mode = str(p["mode"])
    for at in np.ndindex(*batch_shape):
        start = [0] * x.ndim
        for column, dim in enumerate(dn.start_index_map):
            start[dim] = int(indices[(*at, column)])
        for dim, of in zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True):
            start[dim] = at[of]
        last = [n - s for n, s in zip(x.shape, sizes, strict=True)]
        inside = all(0 <= s <= e for s, e in zip(start, last, strict=True))
        if not inside and "FILL" in mode:
            out[at] = np.nan if p["fill_value"] is None else p["fill_value"]
            continue
        start = [min(max(s, 0), e) for s, e in zip(start, last, strict=True)]
        block = x[tuple(slice(s, s + n) for s, n in zip(start, sizes, strict=True))]
        out[at] = block.reshape([sizes[d] for d in window])
    batch = iter(range(len(batch_shape)))
    offset = iter(range(len(batch_shape), out.ndim))
    order = [next(offset) if d in dn.offset_dims else next(batch) for d in range(out.ndim)]
    return [out.transpose(order)]


def _scatter(combine):
    def run_it(p, x, indices, updates):
        dn = p["dimension_numbers"]
        out = x.copy()
        dropped = {*dn.inserted_window_dims, *dn.operand_batching_dims}
        window = [d for d in range(x.ndim) if d not in dropped]
        batch_dims = [d for d in range(updates.ndim) if d not in dn.update_window_dims]
        news = updates.transpose([*batch_dims, *dn.update_window_dims])
        sizes = [1] * x.ndim
        for dim, of in zip(window, dn.update_window_dims, strict=True):
            sizes[dim] = updates.shape[of]
        for at in np.ndindex(*indices.shape[:-1]):
            start = [0] * x.ndim
            for column, dim in enumerate(dn.scatter_dims_to_operand_dims):
                start[dim] = int(indices[(*at, column)])
            pairs = zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True)
            for dim, of in pairs:
                start[dim] = at[of]
            ends = [s + n for s, n in zip(start, sizes, strict=True)]
            if any(s < 0 or e > n for s, e, n in zip(start, ends, x.shape, strict=True)):
                continue
            box = tuple(slice(s, e) for s, e in zip(start, ends, strict=True))
            out[box] = combine(out[box], news[at].reshape(sizes))
        return [out]

    return run_it


_WITH_PARAMS = {
    "and": _boolean(np.logical_and, np.bitwise_and),
    "or": _boolean(np.logical_or, np.bitwise_or),
    "xor": _boolean(np.logical_xor, np.bitwise_xor),
    "not": _boolean(np.logical_not, np.bitwise_not),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda p, *xs: [np.concatenate(xs, axis=p["dimension"])],
    "convert_element_type": lambda p, x: [x.astype(p["new_dtype"])],
    "cummax": _running(np.maximum.accumulate),
    "cummin": _running(np.minimum.accumulate),
    "cumsum": _running(np.cumsum),
    "div": lambda p, x, y: [x / y if np.issubdtype(x.dtype, np.inexact) else np.trunc(x / y)],
    "dot_general": _dot,
    "gather": _gather,
    "integer_pow": lambda p, x: [x ** float(p["y"])],
    "iota": _iota,
    "pad": _pad,
    "reduce_and": _reduce(np.all),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_or": _reduce(np.any),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "rem": lambda p, x, y: [np.fmod(x, y)],
    "reshape": lambda p, x: [x.reshape(p["new_sizes"])],
    "rev": lambda p, x: [np.flip(x, p["dimensions"])],
    "scatter": _scatter(lambda old, new: new),
    "scatter-add": _scatter(np.add),
    "scatter-mul": _scatter(np.multiply),
    "select_n": _select,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": lambda p, x: [np.squeeze(x, p["dimensions"])],
    "stack": lambda p, *xs: [np.stack(xs, axis=p["axis"])],
    "top_k": _top_k,
    "transpose": lambda p, x: [x.transpose(p["permutation"])],
}
