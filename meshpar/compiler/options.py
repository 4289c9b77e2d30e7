"""The ways in which one operation can be cut over a mesh, as a rule allows.

Each mesh axis is independent: it cuts one factor, or a pending reduction passes through along it,
or it does nothing. An `Option` says which for every axis; `layouts_of` expands it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshpar.placements.layout import Layout
from meshpar.placements.types import ReduceType
from meshpar.rules.rule import Dim, Rule

__all__ = ["Cut", "Expanded", "Wish", "Wished", "expand", "options"]

Wish = Mapping[str, int | None]
"""Mesh axis -> the dim that it should cut, or `None` for none; axes not in it may do anything."""


@dataclass(frozen=True, slots=True)
class Wished:
    """What the operations after a value wish of it, and what that is worth.

    Args:
      axes: the wish, as pairs.
      bytes: of the smallest value between this one and where the wish comes from. Who fulfils the
        wish there moves no more than that, so it is worth no more here.
    """

    axes: tuple[tuple[str, int | None], ...] = ()
    bytes: float = math.inf

    @property
    def wish(self) -> Wish:
        """The wish."""
        return dict(self.axes)


@dataclass(frozen=True, slots=True)
class Cut:
    """What one mesh axis does: cut a factor, or pass a pending reduction, or neither.

    Args:
      factor: the factor it cuts.
      through: the position in `rule.passes` of what passes.
      kind: the reduction that is pending.
    """

    factor: str | None = None
    through: int = -1
    kind: ReduceType | None = None


NOTHING = Cut()


@dataclass(frozen=True, slots=True)
class Expanded:
    """An option as layouts.

    Args:
      operands: the layout that each operand must have.
      results: the layout that each result comes in.
      axes: factor -> the mesh axes that cut it, outermost first.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    axes: Mapping[str, tuple[str, ...]]


def options(
    rule: Rule,
    operands: Sequence[Sequence[Layout]],
    wishes: Sequence[Wish],
    sizes: Mapping[str, int],
) -> Iterator[dict[str, Cut]]:
    """Every option that an operand's layout or a wish for a result suggests, for all axes.

    Args:
      rule: the operation's rule.
      operands: the layouts in which each operand is there.
      wishes: what is wanted of each result.
      sizes: the mesh's axes.
    """
    per_axis = [
        list(_cuts_of(axis, rule, operands, wishes, sizes)) if size > 1 else [NOTHING]
        for axis, size in sizes.items()
    ]
    for combination in itertools.product(*per_axis):
        yield dict(zip(sizes, combination, strict=True))


def _cuts_of(
    axis: str,
    rule: Rule,
    operands: Sequence[Sequence[Layout]],
    wishes: Sequence[Wish],
    sizes: Mapping[str, int],
) -> Iterator[Cut]:
    seen: set[Cut] = set()

    def new(cut: Cut) -> Iterator[Cut]:
        if cut not in seen:
            seen.add(cut)
            yield cut

    for position, (dims, layouts) in enumerate(zip(rule.operands, operands, strict=True)):
        for layout in layouts:
            dim, kind = layout.dim_of(axis), layout.kind_of(axis)
            if dim is not None:
                factor = factor_of(axis, dims[dim], layout.dims[dim], rule, sizes)
                if factor is not None and _may_cut(factor, rule):
                    yield from new(Cut(factor))
            if kind is not None:
                for number, passing in enumerate(rule.passes):
                    if kind in passing.kinds and position in passing.operands:
                        yield from new(Cut(None, number, kind))
    for dims, wish in zip(rule.results, wishes, strict=True):
        dim = wish.get(axis)
        if dim is not None:
            for factor in dims[dim][:1]:
                if _may_cut(factor, rule):
                    yield from new(Cut(factor))
    yield from new(NOTHING)


def _may_cut(factor: str, rule: Rule) -> bool:
    return factor not in rule.blocked and rule.sizes[factor] > 1


def factor_of(
    axis: str, dim: Dim, axes: tuple[str, ...], rule: Rule, sizes: Mapping[str, int]
) -> str | None:
    """The factor that an axis cuts, where the axes on a dim fill its factors from the major one."""
    left = [rule.sizes[name] for name in dim]
    position = 0
    for one in axes:
        while position < len(dim) and left[position] == 1:
            position += 1
        if position == len(dim):
            return None
        if len(dim) > 1 and left[position] % sizes[one]:
            return None
        if one == axis:
            return dim[position]
        left[position] = -(-left[position] // sizes[one])
    return None


def expand(
    rule: Rule,
    option: Mapping[str, Cut],
    operands: Sequence[Sequence[Layout]],
    sizes: Mapping[str, int],
) -> Expanded | None:
    """The layouts of an option, or `None` where they cannot be.

    Axes on one factor nest as they do on the operand that has them already, else in mesh order.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for axis, cut in option.items():
        if cut.factor is not None:
            axes[cut.factor] = (*axes.get(cut.factor, ()), axis)
    for factor, on in axes.items():
        if len(on) > 1:
            axes[factor] = _nesting(factor, on, rule, operands)
        count = 1
        for axis in axes[factor]:
            count *= sizes[axis]
        if factor in rule.even and rule.sizes[factor] % count:
            return None
    ins = [_layout(dims, axes, rule, sizes) for dims in rule.operands]
    outs = [_layout(dims, axes, rule, sizes) for dims in rule.results]
    if None in ins or None in outs:
        return None
    operands_out, results = [x for x in ins if x is not None], [x for x in outs if x is not None]
    for axis, cut in option.items():
        if cut.factor is not None and cut.factor in rule.reduce:
            kind = rule.reduce[cut.factor]
            results = [r.with_partial(axis, kind) for r in results]
            pending = rule.contributes.get(cut.factor, ())
            operands_out = [
                x.with_partial(axis, kind) if i in pending else x
                for i, x in enumerate(operands_out)
            ]
        elif cut.kind is not None:
            through = rule.passes[cut.through].operands
            operands_out = [
                x.with_partial(axis, cut.kind) if i in through else x
                for i, x in enumerate(operands_out)
            ]
            results = [r.with_partial(axis, cut.kind) for r in results]
    return Expanded(tuple(operands_out), tuple(results), axes)


def _nesting(
    factor: str, on: tuple[str, ...], rule: Rule, operands: Sequence[Sequence[Layout]]
) -> tuple[str, ...]:
    for dims, layouts in zip(rule.operands, operands, strict=True):
        for dim, names in enumerate(dims):
            if factor in names:
                for layout in layouts:
                    found = tuple(axis for axis in layout.dims[dim] if axis in on)
                    if len(found) == len(on):
                        return found
    return on


def _layout(
    dims: tuple[Dim, ...],
    axes: Mapping[str, tuple[str, ...]],
    rule: Rule,
    sizes: Mapping[str, int],
) -> Layout | None:
    out: list[tuple[str, ...]] = []
    for dim in dims:
        on = tuple(axis for factor in dim for axis in axes.get(factor, ()))
        if len(dim) > 1 and on and not _contiguous(dim, axes, rule, sizes):
            return None
        out.append(on)
    return Layout(tuple(out))


def _contiguous(
    dim: Dim, axes: Mapping[str, tuple[str, ...]], rule: Rule, sizes: Mapping[str, int]
) -> bool:
    """Whether a dim of several factors stays in contiguous blocks: major ones are cut up first."""
    whole = True  # every factor so far is cut into single rows
    for factor in dim:
        count = 1
        for axis in axes.get(factor, ()):
            count *= sizes[axis]
        if count > 1 and not whole:
            return False
        whole = whole and count == rule.sizes[factor]
    return True
