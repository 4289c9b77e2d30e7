"""The choice for one operation: of its options, the one that takes the least time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshpar.compiler.annotations import Surroundings
from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.options import Expanded, Wish, Wished, expand, options
from meshpar.compiler.program import Node
from meshpar.placements.blocks import local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.rules import find_rule
from meshpar.rules.rule import Aval, Rule

__all__ = ["Choice", "Decider", "value_bytes", "wished"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one operation runs.

    Args:
      expanded: the layouts of its operands and results.
      sources: for each operand, which of the layouts in which it is there is taken.
      seconds: the estimated time of the reshards, of the operation and of what the wishes need.
    """

    expanded: Expanded
    sources: tuple[Layout, ...]
    seconds: float


class Decider:
    """Makes the choice for operations of one program, remembering equal ones.

    Args:
      sizes: the mesh's axes.
      model: what things cost.
      around: in what the axes differ from those of the mesh that annotations name.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        model: DeviceModel,
        around: Surroundings | None = None,
    ) -> None:
        self.sizes, self.model, self.around = dict(sizes), model, around or Surroundings()
        self._reshards: dict[tuple[object, ...], float] = {}
        self._rules: dict[Hashable, Rule | None] = {}
        self._choices: dict[Hashable, Choice] = {}

    def rule_of(self, node: Node, avals: Sequence[Aval]) -> Rule | None:
        """The rule of an operation; equal operations have the same."""
        if node.key is None:
            return find_rule(node.name, avals, node.params)
        if node.key not in self._rules:
            self._rules[node.key] = find_rule(node.name, avals, node.params)
        return self._rules[node.key]

    def choose(
        self,
        node: Node,
        rule: Rule,
        avals: Sequence[Aval],
        results: Sequence[Aval],
        operands: tuple[tuple[Layout, ...], ...],
        wishes: tuple[Wished, ...],
        uses: tuple[int, ...],
    ) -> Choice:
        """The option of least time; of equals the first, and those that communicate less first.

        Args:
          node: the operation.
          rule: its rule.
          avals: shapes and dtypes of its operands.
          results: those of its results.
          operands: the layouts in which each operand is there.
          wishes: what is wished of each result.
          uses: how many operations take each operand; they share what it costs to reduce it.
        """
        if node.key is None:
            return self._chosen(rule, avals, results, operands, wishes, uses)
        key = (node.key, operands, wishes, uses)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._chosen(rule, avals, results, operands, wishes, uses)
            self._choices[key] = choice
        return choice

    def _chosen(
        self,
        rule: Rule,
        avals: Sequence[Aval],
        results: Sequence[Aval],
        operands: Sequence[tuple[Layout, ...]],
        wishes: Sequence[Wished],
        uses: Sequence[int],
    ) -> Choice:
        best: Choice | None = None
        best_key: tuple[float, float, int] | None = None
        for number, (choice, now) in enumerate(
            self.alternatives(rule, avals, results, operands, wishes, uses)
        ):
            key = (round(choice.seconds, 12), now, number)
            if best_key is None or key < best_key:
                best, best_key = choice, key
        assert best is not None, "the option of doing nothing is always there"
        return best

    def alternatives(
        self,
        rule: Rule,
        avals: Sequence[Aval],
        results: Sequence[Aval],
        operands: Sequence[tuple[Layout, ...]],
        wishes: Sequence[Wished],
        uses: Sequence[int],
    ) -> Iterator[tuple[Choice, float]]:
        """Every option that can be, and the time of its reshards alone."""
        asked = [each.wish for each in wishes]
        for option in options(rule, operands, asked, self.sizes):
            expanded = expand(rule, option, operands, self.sizes)
            if expanded is None:
                continue
            moves = [
                min((self.reshard_seconds(src, dst, aval), i) for i, src in enumerate(there))
                for there, dst, aval in zip(operands, expanded.operands, avals, strict=True)
            ]
            now = 0.0
            for (seconds, i), there, dst, n in zip(
                moves, operands, expanded.operands, uses, strict=True
            ):
                reduces = len(there[i].partial) > len(dst.partial)
                now += seconds / n if reduces else seconds
            later = sum(map(self._later, expanded.results, wishes, results))
            work = self._work(rule, expanded, avals, results)
            sources = tuple(there[i] for there, (_, i) in zip(operands, moves, strict=True))
            yield Choice(expanded, sources, now + later + work), now

    def _later(self, layout: Layout, wish: Wished, aval: Aval) -> float:
        """The time to bring a result to what is wished of it, with nothing pending.

        A reduction that waits may share its collective with others, so it takes half a latency.
        """
        settled = wished(layout, wish.wish, self.sizes).without_partial()
        if layout.partial:
            return self.reshard_seconds(layout, settled, aval) - self.model.latency / 2
        share = min(1.0, wish.bytes / max(value_bytes(aval), 1))
        return self.reshard_seconds(layout, settled, aval, share)

    def reshard_seconds(self, src: Layout, dst: Layout, aval: Aval, share: float = 1.0) -> float:
        """The time to turn a layout of a value into another, or a share of the value."""
        if src == dst:
            return 0.0
        key = (src, dst, aval.shape, aval.dtype, share)
        if key not in self._reshards:
            steps = planned_steps(src, dst, tuple(aval.shape), aval.dtype, self.sizes)
            self._reshards[key] = self.model.reshard_seconds(steps, share)
        return self._reshards[key]

    def _work(
        self, rule: Rule, expanded: Expanded, avals: Sequence[Aval], results: Sequence[Aval]
    ) -> float:
        """The time of the operation on its blocks: two operations per point of its factors."""
        points = 2.0
        for factor, size in rule.sizes.items():
            cut = math.prod(self.sizes[axis] for axis in expanded.axes.get(factor, ()))
            points *= -(-size // cut)
        moved = sum(
            math.prod(local_shape(tuple(aval.shape), layout, self.sizes)) * _itemsize(aval)
            for aval, layout in (
                *zip(avals, expanded.operands, strict=True),
                *zip(results, expanded.results, strict=True),
            )
        )
        return self.model.compute_seconds(points, moved)


def wished(layout: Layout, wish: Wish, sizes: Mapping[str, int]) -> Layout:
    """A layout changed to what is wished of it; axes that the wish leaves open stay."""
    dims = [tuple(a for a in axes if wish.get(a, d) == d) for d, axes in enumerate(layout.dims)]
    for axis, dim in wish.items():
        if dim is not None and axis not in dims[dim]:
            dims[dim] = (*dims[dim], axis)
    pending = tuple((axis, kind) for axis, kind in layout.partial if axis not in wish)
    return Layout(tuple(dims), pending)


def value_bytes(aval: Aval) -> int:
    """The bytes of a whole value."""
    return math.prod(aval.shape) * _itemsize(aval)


def _itemsize(aval: Aval) -> int:
    return np.dtype(aval.dtype).itemsize if isinstance(aval.dtype, np.dtype) else 4
