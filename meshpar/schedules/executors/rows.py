"""Blocks that are stacked along their first dim: by microbatch, by chunk, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

__all__ = ["add", "add_to_row", "put_rows", "row_of", "rows_at"]


def row_of(x: Any, index: Any) -> Any:
    """One of the stacked blocks; where there is only one it is that of every index."""
    if x.shape[0] == 1:
        return x[0]
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def rows_at(stacks: Sequence[Any], index: Any) -> list[Any]:
    """The blocks of one index."""
    return [row_of(stack, index) for stack in stacks]


def put_rows(stacks: Sequence[Any], blocks: Sequence[Any], index: Any) -> list[Any]:
    """The stacks with other blocks at one index."""
    return [
        lax.dynamic_update_index_in_dim(stack, block, index, 0)
        for stack, block in zip(stacks, blocks, strict=True)
    ]


def add_to_row(stacks: Sequence[Any], terms: Sequence[Any], index: Any) -> list[Any]:
    """The stacks with something added to their blocks at one index, in the dtype of the stack."""
    return [
        lax.dynamic_update_index_in_dim(
            stack, row_of(stack, index) + term.astype(stack.dtype), index, 0
        )
        for stack, term in zip(stacks, terms, strict=True)
    ]


def add(sums: Sequence[Any], terms: Sequence[Any]) -> list[Any]:
    """The sums, one by one, in the dtype of what there is."""
    return [x + y.astype(x.dtype) for x, y in zip(sums, terms, strict=True)]
