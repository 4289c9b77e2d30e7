"""Reductions between processes, and the barrier, which is one of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import numpy as np

from meshpar.collectives.between import bodies
from meshpar.collectives.between.engine import Action, perform
from meshpar.collectives.between.terms import Terms
from meshpar.collectives.between.world import here
from meshpar.collectives.reduce_op import ReduceOp
from meshpar.mesh import Group

__all__ = ["all_reduce", "barrier", "reduce", "reduce_scatter"]


def all_reduce(x: jax.Array, op: ReduceOp, group: Group, terms: Terms) -> jax.Array:
    """The arrays of all ranks, combined."""
    return perform(_of(op), x, group.ranks, terms)


@cache
def _of(op: ReduceOp) -> Action:
    return Action(f"all_reduce({op!r})", bodies.combined, (op,))


def reduce(x: jax.Array, dst: int, op: ReduceOp, group: Group, terms: Terms) -> jax.Array:
    """The arrays of all ranks, combined, on `dst`; elsewhere `x`."""
    action = Action(f"reduce({op!r}, dst={dst})", bodies.combined, (op,))
    result = perform(action, x, group.ranks, terms)
    return result if here().rank == dst else x


def reduce_scatter(xs: Sequence[jax.Array], op: ReduceOp, group: Group, terms: Terms) -> jax.Array:
    """Of the lists of all ranks, the item with this rank's number, combined."""
    action = Action(f"reduce_scatter({op!r})", bodies.combined_items, (op,))
    return perform(action, list(xs), group.ranks, terms)


def barrier(group: Group, terms: Terms) -> None:
    """Returns once all ranks of the group have called it."""
    nothing = np.zeros(1, np.int32)
    perform(Action("barrier()", bodies.combined, (ReduceOp.SUM,)), nothing, group.ranks, terms)
