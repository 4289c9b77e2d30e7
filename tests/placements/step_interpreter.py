"""A second meaning of reshard steps: numpy, rank by rank, without padding and without devices.

A state maps each coordinate of the mesh to the rows that the device there really has. A step may
take data from the devices along its axes only. It shares nothing with how steps are run by JAX.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from meshpar.placements.blocks import block_of, local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.steps import Step
from meshpar.placements.types import ReduceType

REDUCERS = {
    ReduceType.kRedSum: lambda c: c.sum(0),
    ReduceType.kRedMax: lambda c: c.max(0),
    ReduceType.kRedMin: lambda c: c.min(0),
    ReduceType.kRedProd: lambda c: c.prod(0),
    ReduceType.kRedAvg: lambda c: c.mean(0),
    ReduceType.kRedAny: lambda c: c.any(0),
    ReduceType.kRedAll: lambda c: c.all(0),
}
NOTHING = {
    ReduceType.kRedSum: 0,
    ReduceType.kRedMax: -(2**40),
    ReduceType.kRedMin: 2**40,
    ReduceType.kRedProd: 1,
    ReduceType.kRedAny: False,
    ReduceType.kRedAll: True,
}
COPIES_STAY = {k for k in ReduceType if k not in (ReduceType.kRedSum, ReduceType.kRedProd)}


def coordinates(sizes):
    return list(itertools.product(*(range(n) for n in sizes.values())))


@lru_cache(maxsize=65536)
def box_at(shape, layout, axis_sizes, at):
    sizes = dict(axis_sizes)
    return block_of(shape, layout, sizes, dict(zip(sizes, at, strict=True)))


def contributions(value, kind, n, rng):
    """n arrays, no two alike, whose reduction is `value`."""
    shape = (n, *value.shape)
    if kind in (ReduceType.kRedSum, ReduceType.kRedAvg):
        parts = rng.integers(-9, 9, shape).astype(value.dtype)
        factor = n if kind is ReduceType.kRedAvg else 1
        parts[-1] = factor * value - parts[:-1].sum(0)
        return parts
    if kind is ReduceType.kRedProd:
        parts = rng.choice([-1, 1], shape).astype(value.dtype)
        parts[-1] = value * parts[:-1].prod(0)
        return parts
    winner = rng.integers(0, n, value.shape)
    wins = np.arange(n).reshape(-1, *[1] * value.ndim) == winner
    if kind in (ReduceType.kRedAny, ReduceType.kRedAll):
        noise = rng.random(shape) < 0.5
        loses = value & noise if kind is ReduceType.kRedAny else value | noise
    else:
        sign = -1 if kind is ReduceType.kRedMax else 1
        loses = value + (sign * rng.integers(0, 9, shape)).astype(value.dtype)
    return np.where(wins, value, loses)


def scatter(value, layout: Layout, sizes, rng):
    """The state of a value in a layout; the outermost pending reduction is split first."""
    axes = list(sizes)
    pending = [axis for axis in axes if axis in layout.partial_axes]
    parts = {(): value}
    for axis in pending:
        parts = {
            (*at, i): part
            for at, whole in parts.items()
            for i, part in enumerate(contributions(whole, layout.kind_of(axis), sizes[axis], rng))
        }
    state = {}
    for at in coordinates(sizes):
        coordinate = dict(zip(axes, at, strict=True))
        part = parts[tuple(coordinate[axis] for axis in pending)]
        state[at] = np.array(part[block_of(value.shape, layout, sizes, coordinate)])
    return state


def check(state, value, layout: Layout, sizes):
    """Whether a state is `value` in a layout."""
    axes = list(sizes)
    pending = [i for i, axis in enumerate(axes) if axis in layout.partial_axes]
    for at in coordinates(sizes):
        if any(at[i] for i in pending):
            continue
        grid = [
            state[tuple(dict(zip(pending, c, strict=True)).get(i, at[i]) for i in range(len(at)))]
            for c in itertools.product(*(range(sizes[axes[i]]) for i in pending))
        ]
        stacked = np.stack(grid).reshape(tuple(sizes[axes[i]] for i in pending) + grid[0].shape)
        for i in reversed(pending):  # the later axis first
            level = pending.index(i)
            kind = layout.kind_of(axes[i])
            stacked = REDUCERS[kind](np.moveaxis(stacked, level, 0))
        expected = value[box_at(value.shape, layout, tuple(sizes.items()), at)]
        assert stacked.shape == expected.shape
        assert np.allclose(stacked, expected, rtol=1e-12, atol=0), (stacked, expected)


def run(state, step: Step, shape, sizes):
    """The state after a step."""
    axes = list(sizes)

    axis_sizes = tuple(sizes.items())

    def box(layout, at):
        return box_at(shape, layout, axis_sizes, at)

    def group(at):
        """The coordinates along the step's axes through `at`, in the order of their numbers."""
        out = []
        for c in itertools.product(*(range(sizes[axis]) for axis in step.axes)):
            moved = dict(zip(axes, at, strict=True)) | dict(zip(step.axes, c, strict=True))
            out.append(tuple(moved[axis] for axis in axes))
        return out

    def part(data, have, want):
        return data[
            tuple(
                slice(w.start - h.start, w.stop - h.start) for h, w in zip(have, want, strict=True)
            )
        ]

    after = {}
    for at in coordinates(sizes):
        want = box(step.dst, at)
        if step.kind == "ppermute":
            members = group(at)
            sources = [a for a, b in step.permutation if members[b] == at]
            assert len(sources) <= 1
            have = box(step.src, members[sources[0]]) if sources else None
            if have is None:
                data = np.zeros([max(0, w.stop - w.start) for w in want], state[at].dtype)
                assert data.size == 0
            else:
                data = state[members[sources[0]]]
                assert have == want or data.size == 0
                data = data.reshape([w.stop - w.start for w in want])
        elif step.kind == "mask":
            data = _masked(state[at], step, box(step.src, at), want, at[axes.index(step.axes[0])])
        elif step.reduce is not None:
            have = box(step.src, at)
            assert all(box(step.src, m) == have for m in group(at))
            data = part(REDUCERS[step.reduce](np.stack([state[m] for m in group(at)])), have, want)
        else:  # slice, all_gather, all_to_all: whatever of my new block the others have
            data = np.empty([w.stop - w.start for w in want], state[at].dtype)
            missing = np.ones(data.shape, bool)
            for m in [at] if step.kind == "slice" else group(at):
                have = box(step.src, m)
                common = tuple(
                    slice(max(h.start, w.start), max(h.start, w.start, min(h.stop, w.stop)))
                    for h, w in zip(have, want, strict=True)
                )
                if all(c.stop > c.start for c in common):
                    to = tuple(
                        slice(c.start - w.start, c.stop - w.start)
                        for c, w in zip(common, want, strict=True)
                    )
                    data[to] = part(state[m], have, common)
                    missing[to] = False
            assert not missing.any(), f"{step} leaves rows without a source"
        after[at] = data
    return after


def _masked(data, step: Step, have, want, index):
    if have == want and not step.lost:
        if step.reduce in COPIES_STAY:
            return data
        return data if index == 0 else np.full_like(data, NOTHING[step.reduce])
    out = np.full([w.stop - w.start for w in want], NOTHING[step.reduce], data.dtype)
    out[
        tuple(slice(h.start - w.start, h.stop - w.start) for h, w in zip(have, want, strict=True))
    ] = data
    return out


def sent_bytes(step: Step, shape, itemsize, sizes):
    """The price of a step by the table of the documentation, from the padded local shapes."""
    n = math.prod(sizes[axis] for axis in step.axes)
    block = math.prod(local_shape(shape, step.src, sizes)) * itemsize
    if step.kind == "all_gather":
        return block * (n - 1)
    if step.kind == "all_reduce":
        return math.ceil(2 * block * (n - 1) / n)
    if step.kind in ("reduce_scatter", "all_to_all"):
        operand = itemsize  # the block, padded so that it can be cut into n equal chunks
        for dim, size in enumerate(local_shape(shape, step.src, sizes)):
            cuts = math.prod(sizes[axis] for axis in step.gained.get(dim, ()))
            operand *= math.ceil(size / cuts) * cuts
        return operand * (n - 1) // n
    return block if step.kind == "ppermute" else 0
