"""The single steps that lead from a layout to others: the edges of the search for a reshard.

Axes on a dim nest, so a dim loses and gains axes at the inner end only. Reductions that do not
commute are done from the last axis of the mesh to the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshpar.placements.layout import Layout
from meshpar.placements.permutations import (
    cuts_alike,
    has_empty_blocks,
    moving_axes,
    permutation,
)
from meshpar.placements.reductions import COPIED, EMBEDDED, commute
from meshpar.placements.steps import LOCAL_KINDS, Axes, Step, StepKind
from meshpar.placements.types import ReduceType

__all__ = ["Move", "Moves"]

Dims = tuple[Axes, ...]
Shape = tuple[int, ...]

_NOT_SCATTERED = frozenset(ReduceType) - {ReduceType.kRedSum, ReduceType.kRedAvg}


class Move(NamedTuple):
    """An edge: what a `Step` says, but for where it starts and the permutation."""

    kind: StepKind
    axes: Axes
    dst: Layout
    bytes: int
    reduce: ReduceType | None = None

    @property
    def talks(self) -> bool:
        """Whether it is a collective."""
        return self.kind not in LOCAL_KINDS


@dataclass(frozen=True)
class Moves:
    """The edges of the graph of layouts of one tensor, as far as they can serve one target.

    Args:
      shape: the tensor's.
      itemsize: bytes of an element.
      sizes: axis -> size, in the order of the mesh.
      target: the layout that is wanted; only its pending reductions are ever made.
      fixed: for each dim, how many of its outer axes stay where they are.
      free: the axes that may be used, in the order of the mesh.
    """

    shape: Shape
    itemsize: int
    sizes: Mapping[str, int]
    target: Layout
    fixed: tuple[int, ...]
    free: Axes

    # --- sizes ------------------------------------------------------------------------------------

    def block_bytes(self, dims: Dims) -> int:
        """The bytes of the padded block of a device."""
        known = self._known_bytes.get(dims)
        if known is None:
            known = self.itemsize
            for size, axes in zip(self.shape, dims, strict=True):
                known *= -(-size // self._count(axes))
            self._known_bytes[dims] = known
        return known

    @cached_property
    def _known_bytes(self) -> dict[Dims, int]:
        return {}

    def least(self, src: Layout) -> int:
        """The bytes that some device at least has to get before it has its block of the target.

        The rows that it has not got yet. Where a dim is cut by other axes from some level on, the
        device at the last coordinate of `src` and at the first of the target has none of its rows.
        """
        overlap = self.itemsize
        for size, lhs, rhs in zip(self.shape, src.dims, self.target.dims, strict=True):
            clash = next((a for a, b in zip(lhs, rhs, strict=False) if a != b), None)
            if clash is not None and clash not in self._target_axes:
                return self._goal
            overlap *= min(-(-size // self._count(lhs)), -(-size // self._count(rhs)))
        return self._goal - overlap

    @cached_property
    def _goal(self) -> int:
        return self.block_bytes(self.target.dims)

    @cached_property
    def _target_axes(self) -> frozenset[str]:
        return frozenset(self.target.shard_axes)

    def _count(self, axes: Iterable[str]) -> int:
        count = 1
        for axis in axes:
            count *= self.sizes[axis]
        return count

    def _exchanged(self, src: Dims, dst: Dims, axes: Axes) -> int:
        """What a device sends where each of the others gets one chunk of its block."""
        finer = tuple(
            [lhs if len(lhs) > len(rhs) else rhs for lhs, rhs in zip(src, dst, strict=True)]
        )
        return self.block_bytes(finer) * (self._count(axes) - 1)

    # --- edges ------------------------------------------------------------------------------------

    def of(self, src: Layout, limit: float = math.inf) -> Iterator[Move]:
        """The edges that leave a layout, in a fixed order; those over `limit` bytes may miss."""
        used = {axis for axes in src.dims for axis in axes}
        pending = {axis for axis, _ in src.partial}
        idle = tuple(axis for axis in self.free if axis not in used and axis not in pending)
        yield from self._slices(src, idle)
        yield from self._masks(src, idle)
        for axes, kind in self._reducible(src):
            yield from self._reductions(src, axes, kind, limit)
        yield from self._exchanges(src, limit)
        yield from self._gathers(src, limit)
        usable = tuple(axis for axis in self.free if axis not in pending)
        yield from self._permutations(src, usable, limit)

    def _slices(self, src: Layout, idle: Axes) -> Iterator[Move]:
        for axis in idle:
            for dim, axes in enumerate(src.dims):
                yield Move("slice", (axis,), src.with_dim(dim, (*axes, axis)), 0)

    def _gathers(self, src: Layout, limit: float) -> Iterator[Move]:
        block = self.block_bytes(src.dims)
        for dim, axes in enumerate(src.dims):
            for kept in range(self.fixed[dim], len(axes)):
                lost = axes[kept:]
                sent = block * (self._count(lost) - 1)
                if sent > limit:
                    continue
                yield Move("all_gather", lost, src.with_dim(dim, axes[:kept]), sent)

    def _exchanges(self, src: Layout, limit: float) -> Iterator[Move]:
        """All-to-alls: some dims lose inner axes, and other dims gain them."""
        block = self.block_bytes(src.dims)
        for kept in itertools.product(
            *(range(self.fixed[d], len(axes) + 1) for d, axes in enumerate(src.dims))
        ):
            lost = tuple(a for n, axes in zip(kept, src.dims, strict=True) for a in axes[n:])
            gaining = [d for d, axes in enumerate(src.dims) if kept[d] == len(axes)]
            n = self._count(lost)
            if not lost or not gaining or block * (n - 1) > limit * n:
                continue
            left = tuple(axes[:n] for n, axes in zip(kept, src.dims, strict=True))
            for dims, axes in _appended(left, lost, gaining):
                sent = self._exchanged(src.dims, dims, axes)
                yield Move("all_to_all", axes, Layout(dims, src.partial), sent)

    def _permutations(self, src: Layout, usable: Axes, limit: float) -> Iterator[Move]:
        block, empty = self.block_bytes(src.dims), self._has_empty_blocks(src)
        if block > limit and not empty:
            return
        held = [axis for axes in src.dims for axis in axes]
        choices = [self._alike(dim, axes, usable) for dim, axes in enumerate(src.dims)]
        for dims in itertools.product(*choices):
            axes = [axis for cut in dims for axis in cut]
            if dims == src.dims or len(set(axes)) < len(axes):
                continue
            if self._count(axes) != self._count(held):
                continue  # then a block has more or fewer holders than before
            dst = Layout(dims, src.partial)
            if empty and self._keeps_all(src, dst):
                yield Move("slice", (), dst, 0)
            elif block <= limit:
                yield Move("ppermute", moving_axes(self.shape, src, dst, self.sizes), dst, block)

    def _alike(self, dim: int, axes: Axes, usable: Axes) -> list[Axes]:
        """The rows of axes that cut a dim into the same blocks."""
        kept = axes[: self.fixed[dim]]
        factors, outer = (tuple(self.sizes[axis] for axis in row) for row in (axes, kept))
        others = [axis for axis in usable if axis not in kept]
        return [
            (*kept, *row)
            for length in range(len(others) + 1)
            for row in itertools.permutations(others, length)
            if cuts_alike(self.shape[dim], factors, (*outer, *[self.sizes[axis] for axis in row]))
        ]

    def _has_empty_blocks(self, layout: Layout) -> bool:
        return any(
            has_empty_blocks(size, tuple(self.sizes[axis] for axis in axes))
            for size, axes in zip(self.shape, layout.dims, strict=True)
        )

    def _keeps_all(self, src: Layout, dst: Layout) -> bool:
        """Whether no device needs another block: possible where some have none."""
        _, pairs = permutation(self.shape, src, dst, tuple(self.sizes.items()))
        return all(source == target for source, target in pairs)

    # --- pending reductions -----------------------------------------------------------------------

    @cached_property
    def _rank(self) -> dict[str, int]:
        return {axis: i for i, axis in enumerate(self.sizes)}

    def _may_do(
        self, axis: str, kind: ReduceType, others: Iterable[tuple[str, ReduceType]]
    ) -> bool:
        """Whether a reduction commutes with all others that are pending over later axes."""
        rank = self._rank[axis]
        return all(commute(kind, k) or self._rank[a] < rank for a, k in others)

    def _reducible(self, src: Layout) -> Iterator[tuple[Axes, ReduceType]]:
        """The sets of axes, of one kind each, that may be reduced together now."""
        for kind in sorted({kind for _, kind in src.partial}):
            ready = [
                axis
                for axis in self.free
                if src.kind_of(axis) is kind and self._may_do(axis, kind, src.partial)
            ]
            for count in range(1, len(ready) + 1):
                for axes in itertools.combinations(ready, count):
                    yield axes, kind

    def _reductions(
        self, src: Layout, axes: Axes, kind: ReduceType, limit: float
    ) -> Iterator[Move]:
        done = src.without_partial(axes)
        n, block = self._count(axes), self.block_bytes(src.dims)
        if block * (n - 1) > limit * n:
            return
        if kind is ReduceType.kRedProd:
            yield Move("all_gather", axes, done, block * (n - 1), kind)
        else:
            yield Move("all_reduce", axes, done, -(-2 * block * (n - 1) // n), kind)
        scatter: StepKind = "all_to_all" if kind in _NOT_SCATTERED else "reduce_scatter"
        for dims, order in _appended(src.dims, axes, range(src.ndim)):
            dst = Layout(dims, done.partial)
            yield Move(scatter, order, dst, self._exchanged(src.dims, dims, order), kind)

    def _masks(self, src: Layout, idle: Axes) -> Iterator[Move]:
        """The pending reductions of the target that can be made from what the devices hold."""
        for axis, kind in self.target.partial:
            if axis not in self.free or not self._may_do(axis, kind, src.partial):
                continue
            dim = src.dim_of(axis)
            if axis in idle and kind in COPIED | EMBEDDED:
                yield Move("mask", (axis,), src.with_partial(axis, kind), 0, kind)
            elif dim is not None and src.dims[dim][-1] == axis and kind in EMBEDDED:
                whole = src.with_dim(dim, src.dims[dim][:-1])
                yield Move("mask", (axis,), whole.with_partial(axis, kind), 0, kind)

    # --- steps ------------------------------------------------------------------------------------

    def step(self, src: Layout, move: Move) -> Step:
        """The step of an edge."""
        kind, axes, dst, sent, reduce = move
        pairs: tuple[tuple[int, int], ...] = ()
        if kind == "ppermute":
            axes, pairs = permutation(self.shape, src, dst, tuple(self.sizes.items()))
        both = list(zip(src.dims, dst.dims, strict=True))
        longer = [d for d, (lhs, rhs) in enumerate(both) if lhs != rhs and len(lhs) >= len(rhs)]
        shorter = [d for d, (lhs, rhs) in enumerate(both) if len(lhs) < len(rhs)]
        return Step(kind, axes, (*longer, *shorter), src, dst, sent, reduce, pairs)


def _appended(dims: Dims, axes: Axes, gaining: Iterable[int]) -> Iterator[tuple[Dims, Axes]]:
    """All ways to append axes to the inner ends of dims, with the axes dim by dim."""
    gaining = tuple(gaining)
    for order in itertools.permutations(axes):
        for chosen in itertools.combinations_with_replacement(gaining, len(order)):
            out = list(dims)
            for dim, axis in zip(chosen, order, strict=True):
                out[dim] = (*out[dim], axis)
            yield tuple(out), order
