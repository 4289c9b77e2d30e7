"""Rules of linear algebra and Fourier transforms: batch dims pass, matrices are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshpar.placements.types import ReduceType
from meshpar.rules.registry import register, rule_for
from meshpar.rules.rows import without_padding
from meshpar.rules.rule import SUM_LIKE, Aval, Dim, Emission, Pass, Rule, letters, multilinear


def batched(
    avals: Sequence[Aval], own: Sequence[int], results: Sequence[int], passes: Sequence[Pass] = ()
) -> Rule:
    """`bij->bk`: equal leading dims pass through, the last ones are whole.

    Args:
      avals: the operands.
      own: how many of the last dims of each operand are not batch dims.
      results: the same for the results.
      passes: pending reductions that pass through.
    """
    batch = letters(avals[0].ndim - own[0])
    sizes = dict(zip(batch, avals[0].shape, strict=False))
    blocked: set[str] = set()

    def dims(count: int, what: str, shape: Sequence[int] = ()) -> tuple[Dim, ...]:
        names = [f"{what}{i}" for i in range(count)]
        sizes.update(zip(names, shape[len(batch) :] or [1] * count, strict=True))
        blocked.update(names)
        return tuple((n,) for n in (*batch, *names))

    return Rule(
        operands=tuple(
            dims(n, f"in{i}x", tuple(x.shape))
            for i, (x, n) in enumerate(zip(avals, own, strict=True))
        ),
        results=tuple(dims(n, f"out{i}x") for i, n in enumerate(results)),
        sizes=sizes,
        blocked=frozenset(blocked),
        passes=tuple(passes),
    )


Results = Callable[[dict[str, Any]], Sequence[int]]


def _register(name: str, own: Sequence[int], results: Sequence[int] | Results) -> None:
    def rule(*avals: Aval, **params: Any) -> Rule:
        shape = results(params) if callable(results) else results
        plain = batched(avals, own, shape)

        def emit(at: Emission, *blocks: jax.Array) -> list[jax.Array]:
            # LAPACK complains on the terminal of matrices that hold no numbers, as padding may.
            for dim, (factor,) in enumerate(plain.operands[0][: avals[0].ndim - own[0]]):
                if at.is_cut(factor):
                    blocks = tuple(without_padding(at, x, dim, factor, 0) for x in blocks)
            return at.bind(*blocks)

        return replace(plain, emit=emit)

    register(name, rule)


_register("cholesky", (2,), (2,))
_register("cholesky_update", (2, 1), (2,))
_register("lu", (2,), (2, 1, 1))
_register("lu_pivots_to_permutation", (1,), (1,))
_register("qr", (2,), lambda params: (2, 2, 1) if params.get("pivoting") else (2, 2))
_register("geqrf", (2,), (2, 1))
_register("geqp3", (2, 1), (2, 1, 1))
_register("householder_product", (2, 1), (2,))
_register("ormqr", (2, 1, 2), (2,))
_register("eigh", (2,), (2, 1))
_register("svd", (2,), lambda params: (1, 2, 2) if params["compute_uv"] else (1,))
_register("hessenberg", (2,), (2, 1))
_register("tridiagonal", (2,), (2, 1, 1, 1))
_register("tridiagonal_solve", (1, 1, 1, 2), (2,))
_register("schur", (2,), lambda params: (2, 2) if params["compute_schur_vectors"] else (2,))
_register(
    "eig",
    (2,),
    lambda params: (
        (1,) + (2,) * (params["compute_left_eigenvectors"] + params["compute_right_eigenvectors"])
    ),
)


@rule_for("triangular_solve")
def triangular_solve(a: Aval, b: Aval, *, left_side: bool, **_: Any) -> Rule:
    """`bij,bjn->bin`, with the matrix whole; each column of the right-hand side is on its own."""
    batch = letters(a.ndim - 2)
    right = ["j", "n"] if left_side else ["n", "j"]
    names = [*batch, *right]
    sizes = dict(zip(names, b.shape, strict=True))
    matrix = [*batch, "row", "column"]
    return Rule(
        operands=(tuple((n,) for n in matrix), tuple((n,) for n in names)),
        results=(tuple((n,) for n in names),),
        sizes={**sizes, "row": a.shape[-1], "column": a.shape[-1]},
        blocked=frozenset({"j", "row", "column"}),
        passes=(Pass(SUM_LIKE, (1,)),),
    )


@rule_for("fft")
def fft(x: Aval, *, fft_lengths: Sequence[int], **_: Any) -> Rule:
    """`bi->bj`, with the transformed dims whole."""
    count = len(fft_lengths)
    return batched((x,), (count,), (count,), (Pass(SUM_LIKE, (0,)),))


@rule_for("ragged_dot_general")
def ragged_dot_general(
    lhs: Aval,
    rhs: Aval,
    group_sizes: Aval,
    *,
    ragged_dot_dimension_numbers: Any,
    preferred_element_type: Any = None,
    **_: Any,
) -> Rule:
    """`mk,gkn,g->mn`, with the ragged dim and the groups whole."""
    dn = ragged_dot_dimension_numbers
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dn.dot_dimension_numbers
    names = letters(lhs.ndim + rhs.ndim)
    left, right = names[: lhs.ndim], names[lhs.ndim :]
    for i, j in zip((*lhs_b, *lhs_k), (*rhs_b, *rhs_k), strict=True):
        right[j] = left[i]
    ragged, groups = {left[d] for d in dn.lhs_ragged_dimensions}, set(dn.rhs_group_dimensions)
    out = [left[d] for d in lhs_b]
    out += [n for d, n in enumerate(left) if d not in {*lhs_b, *lhs_k}]
    out += [n for d, n in enumerate(right) if d not in {*rhs_b, *rhs_k, *groups}]
    if ragged & {left[d] for d in lhs_k}:
        out.insert(len(lhs_b) if ragged & {left[d] for d in lhs_b} else 0, "group")
    sizes = {
        **dict(zip(left, lhs.shape, strict=True)),
        **dict(zip(right, rhs.shape, strict=True)),
        "group": group_sizes.shape[-1],
    }
    sizes_dims = [f"sizes{d}" for d in range(group_sizes.ndim)]
    sizes |= dict(zip(sizes_dims, group_sizes.shape, strict=True))
    blocked = {*ragged, *(right[d] for d in groups), "group", *sizes_dims}
    reduced = {left[d] for d in lhs_k} - blocked
    return Rule(
        operands=(
            tuple((n,) for n in left),
            tuple((n,) for n in right),
            tuple((n,) for n in sizes_dims),
        ),
        results=(tuple((n,) for n in out),),
        sizes=sizes,
        reduce=dict.fromkeys(reduced, ReduceType.kRedSum),
        blocked=frozenset(blocked),
        passes=multilinear(lhs, rhs, result=preferred_element_type),
    )
