"""A replay of an answer: the operation is run on every device's own blocks, without a word between.

The blocks are cut and put together here, by numpy and from the definition of a placement alone; of
meshpar only the operation's JAX form is used, which runs on one device.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np

from benchmarks import numpy_jaxpr

RNG_SEED = 7


def flat(tree):
    """The leaves of nested lists and tuples."""
    return [y for x in tree for y in flat(x)] if isinstance(tree, (list, tuple)) else [tree]


def blocks_of(layout, shape, mesh_shape, at):
    """The (start, stop) of each dim on the device at a coordinate; axes on a dim nest."""
    box = []
    for size, axes in zip(shape, layout.dims, strict=True):
        start, stop, block = 0, size, size
        for axis in axes:
            block = -(-block // mesh_shape[axis])
            start = min(start + at[axis] * block, stop)
            stop = min(start + block, stop)
        box.append((start, stop))
    return box


def sample(kind, shape, bound, rng):
    """Random values of a kind: floats around 0, indices below a bound, booleans."""
    if kind == "i":
        return rng.integers(0, max(bound or 7, 1), shape).astype(np.int32)
    if kind == "b":
        return rng.random(shape) < 0.5
    return rng.uniform(-2, 2, shape).astype(np.float32)


def terms(x, kind, count, rng):
    """Unequal contributions that a reduction makes `x` of."""
    if kind in ("sum", "avg"):
        parts = [rng.uniform(-2, 2, x.shape).astype(x.dtype) for _ in range(count - 1)]
        whole = x * count if kind == "avg" else x
        return [*parts, (whole - sum(parts)).astype(x.dtype)]
    if kind == "prod":
        parts = [rng.uniform(0.5, 2, x.shape).astype(x.dtype) for _ in range(count - 1)]
        return [*parts, (x / np.prod(parts, axis=0)).astype(x.dtype)]
    if kind in ("max", "min"):
        sign = -1 if kind == "max" else 1
        holder = rng.integers(0, count, x.shape)
        return [
            np.where(holder == i, x, x + sign * rng.uniform(0.1, 1, x.shape)).astype(x.dtype)
            for i in range(count)
        ]
    holder = rng.integers(0, count, x.shape)
    other = kind == "all"
    return [np.where(holder == i, x, other) for i in range(count)]


_REDUCE = {
    "sum": lambda a: np.sum(a, axis=0),
    "avg": lambda a: np.mean(a, axis=0),
    "max": lambda a: np.max(a, axis=0),
    "min": lambda a: np.min(a, axis=0),
    "prod": lambda a: np.prod(a, axis=0),
    "any": lambda a: np.any(a, axis=0),
    "all": lambda a: np.all(a, axis=0),
}


class Mesh:
    """Axis sizes by name, and every coordinate."""

    def __init__(self, sizes):
        self.sizes = dict(sizes)
        self.coordinates = [
            dict(zip(self.sizes, at, strict=True))
            for at in itertools.product(*(range(n) for n in self.sizes.values()))
        ]

    def contributions(self, x, layout, rng):
        """Per tuple of coordinates along the pending axes, the contribution of those devices."""
        parts = {(): x}
        for axis, kind in layout.partial:
            parts = {
                (*key, i): part
                for key, whole in parts.items()
                for i, part in enumerate(terms(whole, kind.word, self.sizes[axis], rng))
            }
        return parts

    def block(self, parts, layout, at):
        """The block of one device."""
        part = parts[tuple(at[axis] for axis, _ in layout.partial)]
        box = blocks_of(layout, part.shape, self.sizes, at)
        return part[tuple(slice(a, b) for a, b in box)]


def whole_of(blocks, layout, shape, mesh):
    """The tensor that the devices' blocks are, or a text that says why they are none."""
    pending = [axis for axis, _ in layout.partial]
    parts = {}
    for at, block in zip(mesh.coordinates, blocks, strict=True):
        box = blocks_of(layout, shape, mesh.sizes, at)
        if tuple(b - a for a, b in box) != block.shape:
            return f"a block of shape {block.shape} where {box} is to be"
        key = tuple(at[axis] for axis in pending)
        whole, seen = parts.setdefault(key, (np.zeros(shape, block.dtype), np.zeros(shape, bool)))
        where = tuple(slice(a, b) for a, b in box)
        if seen[where].any() and not same(whole[where], block):
            return "devices that should hold the same hold different values"
        whole[where], seen[where] = block, True
    values = {key: whole for key, (whole, _) in parts.items()}
    for axis, kind in reversed(layout.partial):
        keys = sorted({key[:-1] for key in values})
        values = {
            key: _REDUCE[kind.word](np.stack([values[(*key, i)] for i in range(mesh.sizes[axis])]))
            for key in keys
        }
    return values[()]


def same(lhs, rhs):
    """Equality up to reassociation."""
    if lhs.dtype == bool or rhs.dtype == bool:
        return bool(np.array_equal(lhs != 0, rhs != 0))
    return bool(np.allclose(lhs, rhs, rtol=2e-3, atol=2e-3, equal_nan=True))


class Programs:
    """The operation as a jaxpr for given shapes and attributes; equal ones are traced once."""

    def __init__(self):
        self.known = {}

    def __call__(self, operation, listed, templates, values, attributes):
        """The jaxpr, and for each result whether it is there."""
        shapes = tuple(None if x is None else (x.shape, str(x.dtype)) for x in values)
        key = (id(operation), shapes, repr(attributes), repr(templates))
        if key not in self.known:
            there = []

            def form(*present):
                present = iter(present)
                given = iter([None if x is None else next(present) for x in values])
                args = [
                    [next(given) for _ in s] if isinstance(s, list) else next(given) for s in listed
                ]
                out = operation.form(*args, *templates, **attributes)
                leaves = flat(out if isinstance(out, (list, tuple)) else [out])
                there.extend(x is not None for x in leaves)
                return [x for x in leaves if x is not None]

            with jax.numpy_rank_promotion("allow"):
                program = jax.make_jaxpr(form)(*[x for x in values if x is not None])
            self.known[key] = program, there
        return self.known[key]


programs = Programs()


def replay(operation, shapes, attrs, inputs, outputs, mesh):
    """Runs an operation as an answer places it.

    Args:
      operation: its JAX form, `mp.infer_reference(name)`.
      shapes: the shape of each argument, nested as the arguments are.
      attrs: its attributes.
      inputs: the layout of each argument, nested alike.
      outputs: the layout of each result, `None` for one that is not there.
      mesh: a `Mesh`.

    Returns:
      "" if the results are those on one device; "skipped" if a device has an empty block; else why.
    """
    rng = np.random.default_rng(RNG_SEED)
    templates = shapes[-1:] if operation.templates else []
    listed = shapes[: len(shapes) - len(templates)]
    bound = operation.bound(listed, attrs) if operation.bound else None
    tensors, layouts = [], []
    for position, (shape, layout) in enumerate(zip(listed, inputs, strict=True)):
        kind = operation.kind(position)
        many = isinstance(shape, list)
        for one, its in zip(shape if many else [shape], layout if many else [layout], strict=True):
            absent = position in operation.optional and one in ((), (0,))
            tensors.append(None if absent else sample(kind, one, bound, rng))
            layouts.append(its)

    def call(values, attributes):
        made = attributes.pop("templates", templates)
        program, there = programs(operation, listed, made, values, attributes)
        results = iter(numpy_jaxpr.run(program, [x for x in values if x is not None]))
        return [next(results) if is_there else None for is_there in there]

    expected = call(tensors, dict(attrs))
    for number, (value, layout) in enumerate(zip(expected, outputs, strict=False)):
        if value is not None and layout is not None and layout.ndim != value.ndim:
            return (
                f"result {number} has {value.ndim} dims, and is placed as if it had {layout.ndim}"
            )
    parts = [
        None if x is None else mesh.contributions(x, layout, rng)
        for x, layout in zip(tensors, layouts, strict=True)
    ]
    results = []
    for at in mesh.coordinates:
        local = [
            None if part is None else mesh.block(part, layout, at)
            for part, layout in zip(parts, layouts, strict=True)
        ]
        if any(x is not None and x.size == 0 for x in local):
            return "skipped"
        attributes = _local_attrs(
            operation, attrs, templates, at, local, layouts, expected, outputs, mesh
        )
        try:
            results.append(call(local, attributes))
        except (TypeError, ValueError, IndexError) as error:
            return f"a device's own blocks do not fit: {str(error)[:100]}"
    for number, (value, layout) in enumerate(zip(expected, outputs, strict=False)):
        if value is None or layout is None:
            continue
        found = whole_of([result[number] for result in results], layout, value.shape, mesh)
        if isinstance(found, str):
            return f"result {number}: {found}"
        if not same(found, value):
            return f"result {number}: values differ"
    return ""


def _local_attrs(operation, attrs, templates, at, local, layouts, expected, outputs, mesh):
    """The attributes of one device's call: target shapes are those of its blocks."""
    made = tuple(
        tuple(b - a for a, b in blocks_of(layout, value.shape, mesh.sizes, at))
        for value, layout in zip(expected, outputs, strict=False)
        if value is not None and layout is not None
    )
    attributes = dict(attrs)
    if templates:
        attributes["templates"] = [list(made)]
    if operation.local is None:
        return attributes
    shapes = tuple(() if x is None else x.shape for x in local)
    starts = tuple(
        ()
        if x is None
        else tuple(a for a, _ in blocks_of(layout, _global(x, layout, mesh), mesh.sizes, at))
        for x, layout in zip(local, layouts, strict=True)
    )
    wholes = tuple(
        () if x is None else _global(x, layout, mesh)
        for x, layout in zip(local, layouts, strict=True)
    )
    call = SimpleNamespace(wholes=wholes, inputs=shapes, outputs=made, starts=starts)
    return operation.local(attributes, call)


def _global(block, layout, mesh):
    """The global shape of evenly cut blocks."""
    return tuple(
        size * math.prod(mesh.sizes[axis] for axis in axes)
        for size, axes in zip(block.shape, layout.dims, strict=True)
    )
