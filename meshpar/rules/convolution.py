"""Rules of convolutions: batch, features, groups, and spatial dims with a halo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from meshpar.placements.types import ReduceType
from meshpar.rules.registry import rule_for
from meshpar.rules.rule import SUM_LIKE, Aval, Dim, Emission, Pass, Rule
from meshpar.rules.windows import dilated_rows, window_spans


@rule_for("conv_general_dilated")
def conv_general_dilated(
    lhs: Aval,
    rhs: Aval,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **_: Any,
) -> Rule:
    """`ncs,ock->nos` with c reduced; groups g are the major part of the dims that they divide.

    A spatial dim s is cut with the result's, and each device fetches its halo of the left operand.
    Where the window is wider than the result, as in the gradient of the weights, s is cut with the
    window's dim instead, and the result is pending a sum.
    """
    dn = dimension_numbers
    (batch, feature, *space), (rhs_out, rhs_in, *window) = dn.lhs_spec, dn.rhs_spec
    out_batch, out_feature, *out_space = dn.out_spec
    places = range(len(space))
    groups: Dim = ("g",) if feature_group_count > 1 else ()
    batches: Dim = ("b",) if batch_group_count > 1 else ()
    lhs_dims: list[Dim] = [()] * lhs.ndim
    rhs_dims: list[Dim] = [()] * rhs.ndim
    out_dims: list[Dim] = [()] * lhs.ndim
    lhs_dims[batch], lhs_dims[feature] = (*batches, "n"), (*groups, "c")
    rhs_dims[rhs_out], rhs_dims[rhs_in] = (*groups, *batches, "o"), ("c",)
    out_dims[out_batch], out_dims[out_feature] = ("n",), (*groups, *batches, "o")
    divisor = feature_group_count * batch_group_count
    sizes = {
        "g": feature_group_count,
        "b": batch_group_count,
        "n": lhs.shape[batch] // batch_group_count,
        "c": rhs.shape[rhs_in],
        "o": rhs.shape[rhs_out] // divisor,
    }
    reach = [(rhs.shape[window[i]] - 1) * rhs_dilation[i] for i in places]
    results = [
        max(
            0,
            (max(lhs.shape[space[i]] - 1, 0) * lhs_dilation[i] + 1 + sum(padding[i]) - reach[i] - 1)
            // window_strides[i]
            + 1,
        )
        for i in places
    ]
    over_window = [rhs.shape[window[i]] > results[i] for i in places]
    for i in places:
        name, other = f"s{i}", f"w{i}"
        lhs_dims[space[i]] = (name,)
        rhs_dims[window[i]] = (name,) if over_window[i] else (other,)
        out_dims[out_space[i]] = (other,) if over_window[i] else (name,)
        sizes |= {
            name: lhs.shape[space[i]],
            other: results[i] if over_window[i] else rhs.shape[window[i]],
        }

    def emit(at: Emission, x: jax.Array, weights: jax.Array) -> list[jax.Array]:
        pads, dilations = [*padding], [*lhs_dilation]
        for i in places:
            if not at.is_cut(f"s{i}"):
                continue
            step = rhs_dilation[i] if over_window[i] else window_strides[i]
            mine = at.ranges(f"s{i}", rhs.shape[window[i]] if over_window[i] else results[i])
            further = (results[i] - 1) * window_strides[i] if over_window[i] else reach[i]
            spans = window_spans(mine, step, padding[i][0], further)
            size = lhs.shape[space[i]]
            x = dilated_rows(at, x, space[i], f"s{i}", size, dilations[i], spans, 0)
            pads[i], dilations[i] = (0, 0), 1
        return at.bind(
            x,
            weights,
            padding=tuple(pads),
            lhs_dilation=tuple(dilations),
            feature_group_count=at.local_size("g"),
            batch_group_count=at.local_size("b"),
        )

    kept = {name for dim in out_dims for name in dim}
    reduced = {name for dim in (*lhs_dims, *rhs_dims) for name in dim} - kept
    return Rule(
        operands=(tuple(lhs_dims), tuple(rhs_dims)),
        results=(tuple(out_dims),),
        sizes=sizes,
        reduce=dict.fromkeys(
            (n for n in reduced if n == "c" or n.startswith("s")), ReduceType.kRedSum
        ),
        blocked=frozenset(name for name in sizes if name.startswith("w")),
        even=frozenset({*groups, *batches}),
        passes=(Pass(SUM_LIKE, (0,)), Pass(SUM_LIKE, (1,))),
        emit=emit,
        exchanged=frozenset(f"s{i}" for i in places if reach[i] or results[i] != lhs.shape[space[i]]),
    )
