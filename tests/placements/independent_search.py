"""The least bytes of a reshard by another way: all pairs of layouts are judged, then relaxed.

An edge is found by asking of two given layouts what a collective over some axes could do, from the
blocks that each rank holds. Nothing is generated, ordered or bounded as in `meshpar`.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from meshpar.placements.blocks import block_of, local_shape
from meshpar.placements.types import ReduceType

COLLECTIVE = 1  # a cost is bytes * SCALE + number of collectives
SCALE = 10**6
SUM_LIKE = {ReduceType.kRedSum, ReduceType.kRedAvg}


def suffixes(lhs, rhs):
    """Dim -> axes that lhs has at its end and rhs has not; None unless one row starts the other."""
    out = {}
    for dim, (a, b) in enumerate(zip(lhs.dims, rhs.dims, strict=True)):
        if a[: len(b)] == b:
            if a != b:
                out[dim] = a[len(b) :]
        elif b[: len(a)] != a:
            return None
    return out


def commutes(lhs, rhs):
    return lhs == rhs or {lhs, rhs} <= SUM_LIKE


class Graph:
    """All layouts of one tensor on one mesh, and the cost of each single step between them."""

    def __init__(self, layouts, shape, itemsize, sizes):
        self.layouts, self.shape, self.itemsize, self.sizes = layouts, shape, itemsize, sizes
        self.number = {layout: i for i, layout in enumerate(layouts)}
        self.order = list(sizes)
        self.blocks = [self._blocks(layout) for layout in layouts]
        n = len(layouts)
        self.cost = np.full((n, n), np.inf)
        for i, j in itertools.product(range(n), repeat=2):
            self.cost[i, j] = 0 if i == j else self._edge(i, j)
        self.known = {}

    def _blocks(self, layout):
        """The block of each rank, all empty ones alike."""
        out = []
        for at in itertools.product(*(range(n) for n in self.sizes.values())):
            coordinate = dict(zip(self.order, at, strict=True))
            box = block_of(self.shape, layout, self.sizes, coordinate)
            rows = [(s.start, s.stop) for s in box]
            out.append(tuple(rows) if all(a < b for a, b in rows) else None)
        return out

    def _edge(self, i, j):
        src, dst = self.layouts[i], self.layouts[j]
        if src.partial == dst.partial:
            return min(self._moved(src, dst), self._permuted(i, j))
        return (
            self._reduced(src, dst) if len(src.partial) > len(dst.partial) else self._made(src, dst)
        )

    def _operand(self, src, gained):
        count = self.itemsize
        for dim, size in enumerate(local_shape(self.shape, src, self.sizes)):
            n = math.prod(self.sizes[a] for a in gained.get(dim, ()))
            count *= math.ceil(size / n) * n
        return count

    def _moved(self, src, dst):
        lost, gained = suffixes(src, dst), suffixes(dst, src)
        if lost is None or gained is None:
            return np.inf
        out, into = (sorted(itertools.chain(*d.values())) for d in (lost, gained))
        n = math.prod(self.sizes[a] for a in out)
        if not out and len(into) == 1:
            return 0
        if not into and len(lost) == 1:
            return self._operand(src, {}) * (n - 1) * SCALE + COLLECTIVE
        if out == into and not set(lost) & set(gained):
            return self._operand(src, gained) * (n - 1) // n * SCALE + COLLECTIVE
        return np.inf

    def _permuted(self, i, j):
        src, dst = self.layouts[i], self.layouts[j]
        if local_shape(self.shape, src, self.sizes) != local_shape(self.shape, dst, self.sizes):
            return np.inf
        # along the pending axes the contributions differ, so a block must stay on its coordinate
        pending = [k for k, axis in enumerate(self.order) if axis in src.partial_axes]
        places = list(itertools.product(*(range(n) for n in self.sizes.values())))
        held, wanted = (
            sorted(
                (tuple(at[k] for k in pending), b or ())
                for at, b in zip(places, blocks, strict=True)
            )
            for blocks in (self.blocks[i], self.blocks[j])
        )
        if held != wanted:
            return np.inf
        if self.blocks[i] == self.blocks[j]:
            return 0
        return self._operand(src, {}) * SCALE + COLLECTIVE

    def _reduced(self, src, dst):
        before, after = dict(src.partial), dict(dst.partial)
        done = set(before) - set(after)
        kinds = {before[a] for a in done}
        gained = suffixes(dst, src)
        if len(kinds) > 1 or any(before.get(a) != kind for a, kind in after.items()):
            return np.inf
        if any(len(a) > len(b) for a, b in zip(src.dims, dst.dims, strict=True)) or gained is None:
            return np.inf
        (kind,) = kinds
        for axis in done:
            later = [a for a in after if self.order.index(a) > self.order.index(axis)]
            if not all(commutes(kind, before[a]) for a in later):
                return np.inf
        into = set(itertools.chain(*gained.values()))
        n = math.prod(self.sizes[a] for a in done)
        if not into:
            block = self._operand(src, {})
            sent = (
                block * (n - 1)
                if kind == ReduceType.kRedProd
                else math.ceil(2 * block * (n - 1) / n)
            )
        elif into == done:
            sent = self._operand(src, gained) * (n - 1) // n
        else:
            return np.inf
        return sent * SCALE + COLLECTIVE

    def _made(self, src, dst):
        before, after = dict(src.partial), dict(dst.partial)
        made = set(after) - set(before)
        if len(made) > 1 or any(after.get(a) != kind for a, kind in before.items()):
            return np.inf
        (axis,) = made
        kind, lost = after[axis], suffixes(src, dst)
        later = [a for a in before if self.order.index(a) > self.order.index(axis)]
        if lost is None or not all(commutes(kind, before[a]) for a in later):
            return np.inf
        if any(len(a) < len(b) for a, b in zip(src.dims, dst.dims, strict=True)):
            return np.inf
        out = list(itertools.chain(*lost.values()))
        if not out:
            return 0
        return 0 if out == [axis] and kind != ReduceType.kRedAvg else np.inf

    # --- shortest paths ---------------------------------------------------------------------------

    def still(self, src, dst):
        """The axes that must not be touched, with what they do: those that change nothing."""
        out = {}
        for axis in self.order:
            if axis not in src.shard_axes + dst.shard_axes + src.partial_axes + dst.partial_axes:
                out[axis] = "idle"
        for dim, (lhs, rhs) in enumerate(zip(src.dims, dst.dims, strict=True)):
            for level, (a, b) in enumerate(zip(lhs, rhs, strict=False)):
                if a != b:
                    break
                out[a] = (dim, level)
        pending = {a: {k.kind_of(a) for k in (src, dst)} - {None} for a in self.order}
        touched = {a for a in self.order if src.kind_of(a) != dst.kind_of(a)}
        for a, b in itertools.combinations(self.order, 2):  # by a, so chains are closed
            if a in touched and not all(
                commutes(*kinds) for kinds in itertools.product(pending[a], pending[b])
            ):
                touched.add(b)
        for axis in self.order:
            if pending[axis] and axis not in touched:
                out[axis] = pending[axis].pop()
        return out

    def allowed(self, still, pending):
        """The numbers of the layouts in which those axes do that, with no other reductions."""
        key = (tuple(sorted(still.items(), key=str)), pending)
        if key not in self.known:
            self.known[key] = np.array(
                [
                    i
                    for i, layout in enumerate(self.layouts)
                    if pending.issuperset(layout.partial) and self._keeps(layout, still)
                ]
            )
        return self.known[key]

    def _keeps(self, layout, still):
        for axis, role in still.items():
            dim, kind = layout.dim_of(axis), layout.kind_of(axis)
            if role == "idle":
                here = "idle" if dim is None and kind is None else None
            elif isinstance(role, tuple):
                here = None if dim is None else (dim, layout.dims[dim].index(axis))
            else:
                here = kind
            if here != role:
                return False
        return True

    def cheapest(self, src, dst, still=None):
        """The bytes and the number of collectives of the best plan (Bellman-Ford)."""
        pending = frozenset(src.partial + dst.partial)
        numbers = self.allowed(self.still(src, dst) if still is None else still, pending)
        cost = self.cost[np.ix_(numbers, numbers)]
        best = np.where(numbers == self.number[src], 0.0, np.inf)
        while True:
            better = np.minimum(best, (best[:, None] + cost).min(axis=0))
            if (better == best).all():
                break
            best = better
        total = int(best[list(numbers).index(self.number[dst])])
        return total // SCALE, total % SCALE
