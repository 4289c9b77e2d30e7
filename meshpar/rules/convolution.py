"""Rules of convolutions: batch, features, groups, and spatial dims with a halo."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from meshpar.placements.types import ReduceType
from meshpar.rules.registry import rule_for
from meshpar.rules.rule import Aval, Dim, Emission, Rule, multilinear
from meshpar.rules.windows import dilated_rows, window_spans


class _Space(NamedTuple):
    """One spatial dim: its place in the operands and the result, and how the window moves."""

    name: str
    lhs: int
    rhs: int
    out: int
    rows: int
    window: int
    stride: int
    low: int
    high: int
    base: int  # row i of the left operand stands at i * base
    spread: int  # row i of the window at i * spread

    @property
    def reach(self) -> int:
        """From the first row of a window to its last."""
        return (self.window - 1) * self.spread

    @property
    def results(self) -> int:
        """The rows of the result."""
        span = max(self.rows - 1, 0) * self.base + (self.rows > 0) + self.low + self.high
        return max((span - self.reach - 1) // self.stride + 1, 0)

    @property
    def over_window(self) -> bool:
        """Whether the dim is cut with the window's dim: the wider one, as in weights' gradients."""
        return self.window > self.results

    def halo(self, at: Emission, x: jax.Array) -> jax.Array:
        """The rows, dilated and padded, that this device's part of the window or result needs."""
        if self.over_window:
            step, mine, reach = self.spread, self.window, (self.results - 1) * self.stride
        else:
            step, mine, reach = self.stride, self.results, self.reach
        spans = window_spans(at.ranges(self.name, mine), step, self.low, reach)
        return dilated_rows(at, x, self.lhs, self.name, self.rows, self.base, spans, 0)


def _spaces(lhs: Aval, rhs: Aval, params: dict[str, Any]) -> list[_Space]:
    dn = params["dimension_numbers"]
    moves = zip(
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    places = zip(dn.lhs_spec[2:], dn.rhs_spec[2:], dn.out_spec[2:], strict=True)
    return [
        _Space(f"s{i}", x, k, out, lhs.shape[x], rhs.shape[k], stride, low, high, base, spread)
        for i, ((x, k, out), (stride, (low, high), base, spread)) in enumerate(
            zip(places, moves, strict=True)
        )
    ]


@rule_for("conv_general_dilated")
def conv_general_dilated(lhs: Aval, rhs: Aval, **params: Any) -> Rule:
    """`ncs,ock->nos` with c reduced; groups g are the major part of the dims that they divide.

    A spatial dim s is cut with the result's, and each device fetches its halo of the left operand.
    Where the window is wider than the result, as in the gradient of the weights, s is cut with the
    window's dim instead, and the result is pending a sum.
    """
    dn, spaces = params["dimension_numbers"], _spaces(lhs, rhs, params)
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    grouped: Dim = (*(["g"] if groups > 1 else []), *(["b"] if batches > 1 else []))
    of_lhs: dict[int, Dim] = {
        dn.lhs_spec[0]: (*(n for n in grouped if n == "b"), "n"),
        dn.lhs_spec[1]: (*(n for n in grouped if n == "g"), "c"),
    }
    of_rhs: dict[int, Dim] = {dn.rhs_spec[0]: (*grouped, "o"), dn.rhs_spec[1]: ("c",)}
    of_out: dict[int, Dim] = {dn.out_spec[0]: ("n",), dn.out_spec[1]: (*grouped, "o")}
    sizes = {
        "g": groups,
        "b": batches,
        "n": lhs.shape[dn.lhs_spec[0]] // batches,
        "c": rhs.shape[dn.rhs_spec[1]],
        "o": rhs.shape[dn.rhs_spec[0]] // (groups * batches),
    }
    for space in spaces:
        own, other = (space.name,), (f"{space.name}whole",)
        of_lhs[space.lhs] = own
        of_rhs[space.rhs], of_out[space.out] = (own, other) if space.over_window else (other, own)
        sizes[space.name] = space.rows
        sizes[other[0]] = space.results if space.over_window else space.window

    def emit(at: Emission, x: jax.Array, weights: jax.Array) -> list[jax.Array]:
        pads, bases = [*params["padding"]], [*params["lhs_dilation"]]
        for i, space in enumerate(spaces):
            if at.is_cut(space.name):
                x, pads[i], bases[i] = space.halo(at, x), (0, 0), 1
        return at.bind(
            x,
            weights,
            padding=tuple(pads),
            lhs_dilation=tuple(bases),
            feature_group_count=at.local_size("g"),
            batch_group_count=at.local_size("b"),
        )

    reduced = ["c", *(space.name for space in spaces if space.over_window)]
    return Rule(
        operands=(_ordered(of_lhs), _ordered(of_rhs)),
        results=(_ordered(of_out),),
        sizes=sizes,
        reduce=dict.fromkeys(reduced, ReduceType.kRedSum),
        blocked=frozenset(f"{space.name}whole" for space in spaces),
        even=frozenset(grouped),
        passes=multilinear(lhs, rhs, result=params["preferred_element_type"]),
        emit=emit,
        exchanged=frozenset(space.name for space in spaces),
    )


def _ordered(dims: dict[int, Dim]) -> tuple[Dim, ...]:
    return tuple(dims[d] for d in range(len(dims)))
