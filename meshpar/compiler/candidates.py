"""The ways in which an operation may run on blocks of a mesh, what they cost, and the best of them.

Each mesh axis takes a flow of its own. Of the combinations the likeliest, by a guess from each axis
alone, are tried, and their bytes counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from meshpar.compiler.flows import REPLICATE, Flow
from meshpar.compiler.traced_operation import TracedOperation, runs_on_blocks
from meshpar.placements.blocks import is_even, local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.placements.types import Partial, Placement, ReduceType, Replicate, Shard

__all__ = ["Candidate", "Ways", "backward_candidates", "best_of", "forward_candidates"]

Shape = tuple[int, ...]
Layouts = tuple[Layout, ...]
Sizes = Mapping[str, int]
Wanted = Sequence[Layout | None]
Guess = tuple[float, float]  # bytes, elements
Ranked = tuple[Guess, Flow]
SUM, AVG = ReduceType.kRedSum, ReduceType.kRedAvg
_BEAM = 16  # the flows of one axis that are tried
_TRIED = 300  # the combinations of them


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way: the layouts, and a key by which it is compared with the others."""

    key: tuple[Any, ...]  # numbers and tuples of such
    inputs: Layouts
    outputs: Layouts


@dataclass(frozen=True, slots=True)
class Ways:
    """An operation on a mesh.

    Args:
      traced: the operation.
      sizes: the mesh's axes.
    """

    traced: TracedOperation
    sizes: Sizes

    def flows(self) -> Iterator[Flow]:
        """The flows on which a device need not know where its block begins, or may.

        With all inputs whole each device would do the same: then no result can be cut.
        """
        for flow in self.traced.flows.flows:
            if flow.located and not self.traced.operation.located:
                continue
            if flow.is_replicated and any(p != REPLICATE for p in flow.outputs):
                continue
            yield flow

    def combined(
        self,
        axes: Sequence[str],
        suits: Callable[[str, Flow], bool],
        guess: Callable[[str, Flow], Guess],
        given: Sequence[Layout],
    ) -> Iterator[tuple[Layouts, Layouts]]:
        """The likeliest layouts of inputs and results, one flow per axis.

        Args:
          axes: the mesh axes that do something; of those on one dim an earlier one is outside.
          suits: whether an axis may take a flow.
          guess: what it costs if there is no other axis.
          given: layouts of the inputs, whose nesting of axes is kept.
        """
        flows = list(self.flows())
        ways = [
            _ranked([f for f in flows if suits(a, f)], lambda f, a=a: guess(a, f)) for a in axes
        ]
        for choice in _likeliest(ways):
            joined = self._joined(dict(zip(axes, choice, strict=True)), given)
            if joined is not None:
                yield joined

    def _joined(
        self, chosen: Mapping[str, Flow], given: Sequence[Layout]
    ) -> tuple[Layouts, Layouts] | None:
        joined = self.traced.flows.joined(chosen, given, self.sizes)
        averaged = [axis for axis, flow in chosen.items() if self._averages(flow)]
        if joined is None or not averaged:
            return joined
        inputs, outputs = joined
        if not all(map(is_even, self.traced.shapes, inputs, itertools.repeat(self.sizes))):
            return None  # blocks of different sizes weigh differently in an average
        return inputs, tuple(_averaged(layout, averaged) for layout in outputs)

    def _averages(self, flow: Flow) -> bool:
        """Whether the sums that a flow leaves pending are averages.

        They are where each device divides by the number of its own elements.
        """
        pending_before = any(isinstance(p, Partial) for p in flow.inputs)
        return self.traced.averages and not pending_before and Partial(SUM) in flow.outputs

    def outputs_of(self, flow: Flow) -> tuple[Placement, ...]:
        """The placements of the results."""
        if not self._averages(flow):
            return flow.outputs
        return tuple(Partial(AVG) if p == Partial(SUM) else p for p in flow.outputs)

    def elements(self, inputs: Layouts, outputs: Layouts = ()) -> int:
        """The elements of the blocks of inputs and of results."""
        shapes = (*self.traced.shapes, *(self.traced.made if outputs else ()))
        layouts = (*inputs, *outputs)
        blocks = (local_shape(s, x, self.sizes) for s, x in zip(shapes, layouts, strict=True))
        return sum(math.prod(block) for block in blocks)


def forward_candidates(ways: Ways, given: Layouts) -> Iterator[Candidate]:
    """Every way that the placements of the inputs suggest.

    Compared by bytes to bring the inputs there and to all-reduce the results; then by the number of
    inputs that change, the elements of the blocks, and whether the first inputs stay.
    """
    traced, sizes = ways.traced, ways.sizes
    used = {axis for layout in given for axis in (*layout.shard_axes, *layout.partial_axes)}
    axes = _nested([a for a in sizes if a in used and sizes[a] > 1], given)

    def suits(axis: str, flow: Flow) -> bool:
        return _goes_on([placement_on(layout, axis) for layout in given], flow)

    def guess(axis: str, flow: Flow) -> Guess:
        return _forward_guess(ways, [placement_on(layout, axis) for layout in given], axis, flow)

    for number, (inputs, outputs) in enumerate(ways.combined(axes, suits, guess, given)):
        moved = sum(
            reshard_bytes(src, dst, shape, sizes)
            for src, dst, shape in zip(given, inputs, traced.shapes, strict=True)
        )
        later = sum(
            _all_reduce_bytes(layout, shape, sizes)
            for layout, shape in zip(outputs, traced.made, strict=True)
        )
        changed = tuple(src != dst for src, dst in zip(given, inputs, strict=True))
        blocks = ways.elements(inputs, outputs)
        key = (round(moved + later, 3), sum(changed), blocks, changed, number)
        yield Candidate(key, inputs, outputs)


def backward_candidates(ways: Ways, wanted: Wanted) -> Iterator[Candidate]:
    """Every way that the wanted placements of the results suggest.

    Compared by bytes to bring the results there; then by the elements of the inputs' blocks, the
    reductions pending in inputs, and the number of results that come differently.
    """
    traced, sizes = ways.traced, ways.sizes
    used = {a for x in wanted if x is not None for a in (*x.shard_axes, *x.partial_axes)}
    axes = _nested([a for a in sizes if a in used and sizes[a] > 1], wanted)

    def suits(axis: str, flow: Flow) -> bool:
        return flow.is_replicated or any(
            there != REPLICATE and layout is not None and there == placement_on(layout, axis)
            for layout, there in zip(wanted, ways.outputs_of(flow), strict=True)
        )

    def guess(axis: str, flow: Flow) -> Guess:
        return _backward_guess(ways, wanted, axis, flow)

    plain = [Layout.replicated(len(shape)) for shape in traced.shapes]
    for number, (inputs, outputs) in enumerate(ways.combined(axes, suits, guess, plain)):
        moved = sum(
            reshard_bytes(src, dst, shape, sizes)
            for src, dst, shape in zip(outputs, wanted, traced.made, strict=True)
            if dst is not None
        )
        pending = sum(len(layout.partial) for layout in inputs)
        far = sum(src != dst for src, dst in zip(outputs, wanted, strict=True))
        key = (round(moved, 3), ways.elements(inputs), pending, far, number)
        yield Candidate(key, inputs, outputs)


def best_of(ways: Ways, candidates: Iterable[Candidate]) -> Candidate:
    """The best candidate on whose blocks the operation can be called."""
    for candidate in sorted(candidates, key=lambda c: c.key):
        blocks, made = (
            tuple(local_shape(s, x, ways.sizes) for s, x in zip(shapes, layouts, strict=True))
            for shapes, layouts in (
                (ways.traced.shapes, candidate.inputs),
                (ways.traced.made, candidate.outputs),
            )
        )
        if blocks == ways.traced.shapes or runs_on_blocks(ways.traced, blocks, made):
            return candidate
    raise AssertionError("an operation runs on whole tensors")


def _goes_on(given: Sequence[Placement], flow: Flow) -> bool:
    """Whether an axis goes on cutting some tensor that it cuts, or does nothing at all."""
    kept = flow.is_replicated
    for there, placement in zip(given, flow.inputs, strict=True):
        if placement is None or placement == REPLICATE:
            continue
        if isinstance(placement, Partial) and there not in (REPLICATE, placement):
            return False
        kept = kept or there != REPLICATE
    return kept


def _forward_guess(ways: Ways, given: Sequence[Placement], axis: str, flow: Flow) -> Guess:
    n, moved, elements = ways.sizes[axis], 0.0, 0.0
    for src, there, shape in zip(given, flow.inputs, ways.traced.shapes, strict=True):
        size = math.prod(shape)
        if there is not None:
            moved += size * _moved_share(src, there, n)
            elements += size / n if isinstance(there, Shard) else size
    for there, shape in zip(flow.outputs, ways.traced.made, strict=True):
        size = math.prod(shape)
        moved += size * _moved_share(there, REPLICATE, n) if isinstance(there, Partial) else 0
        elements += size / n if isinstance(there, Shard) else size
    return moved, elements


def _backward_guess(ways: Ways, wanted: Wanted, axis: str, flow: Flow) -> Guess:
    n = ways.sizes[axis]
    moved = sum(
        math.prod(shape) * _moved_share(there, placement_on(layout, axis), n)
        for there, layout, shape in zip(
            ways.outputs_of(flow), wanted, ways.traced.made, strict=True
        )
        if layout is not None
    )
    inputs = zip(flow.inputs, ways.traced.shapes, strict=True)
    elements = sum(math.prod(s) / (n if isinstance(p, Shard) else 1) for p, s in inputs)
    return moved, elements


def _moved_share(src: Placement, dst: Placement, n: int) -> float:
    """The bytes of a change on one axis of n devices, per byte of the whole tensor."""
    if src == dst or isinstance(src, Replicate):
        return 0.0
    if isinstance(src, Shard):
        return (n - 1) / n if not isinstance(dst, Shard) else (n - 1) / n / n
    return (n - 1) / n * (1 if isinstance(dst, Shard) else 2)


def _ranked(flows: list[Flow], guess: Callable[[Flow], Guess]) -> list[Ranked]:
    """The likeliest flows of one axis with their guesses; to do nothing is always among them."""
    ranked = sorted((guess(flow), i) for i, flow in enumerate(flows))
    first, rest = ranked[:_BEAM], ranked[_BEAM:]
    kept = [*first, *(r for r in rest if flows[r[1]].is_replicated)]
    return [(g, flows[i]) for g, i in kept]


def _likeliest(ways: Sequence[list[Ranked]]) -> Iterator[tuple[Flow, ...]]:
    """One flow per axis, by the sum of the guesses; so many, and doing nothing at last."""
    combined = [
        (sum(g[0] for g, _ in choice), sum(g[1] for g, _ in choice), number, choice)
        for number, choice in enumerate(itertools.product(*ways))
    ]
    combined.sort(key=lambda c: c[:3])
    for *_, choice in combined[:_TRIED]:
        yield tuple(flow for _, flow in choice)
    if len(combined) > _TRIED:
        yield tuple(next(flow for _, flow in way if flow.is_replicated) for way in ways)


def _nested(axes: list[str], layouts: Wanted) -> list[str]:
    """Axes in an order in which those on one dim of a layout come from the outside in."""
    for layout in layouts:
        for on in layout.dims if layout is not None else ():
            inside = [axis for axis in on if axis in axes]
            places = sorted(axes.index(axis) for axis in inside)
            ordered = dict(zip(places, inside, strict=True))
            axes = [ordered.get(i, axis) for i, axis in enumerate(axes)]
    return axes


def _averaged(layout: Layout, axes: Sequence[str]) -> Layout:
    pending = tuple(
        (axis, AVG if axis in axes and kind is SUM else kind) for axis, kind in layout.partial
    )
    return Layout(layout.dims, pending)


def placement_on(layout: Layout, axis: str) -> Placement:
    """The placement of a layout on one axis."""
    dim, kind = layout.dim_of(axis), layout.kind_of(axis)
    return Shard(dim) if dim is not None else Partial(kind) if kind is not None else REPLICATE


def reshard_bytes(src: Layout, dst: Layout, shape: Shape, sizes: Sizes) -> float:
    """The bytes per device of a reshard of float32; see `mp.reshard`."""
    return 0.0 if src == dst else _bytes(src, dst, shape, tuple(sizes.items()))


@lru_cache(maxsize=65536)
def _bytes(src: Layout, dst: Layout, shape: Shape, sizes: tuple[tuple[str, int], ...]) -> float:
    steps = planned_steps(_summed(src), _summed(dst), shape, np.float32, dict(sizes))
    return sum(step.bytes for step in steps)


def _summed(layout: Layout) -> Layout:
    """Every pending reduction as a sum: here they all cost the same, and dtypes do not matter."""
    return Layout(layout.dims, tuple((axis, SUM) for axis, _ in layout.partial))


def _all_reduce_bytes(layout: Layout, shape: Shape, sizes: Sizes) -> float:
    block = 4 * math.prod(local_shape(shape, layout, sizes))
    return sum(2 * block * (sizes[axis] - 1) / sizes[axis] for axis in layout.partial_axes)
