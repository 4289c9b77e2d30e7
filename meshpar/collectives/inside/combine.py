"""`all_reduce`, `reduce` and `reduce_scatter` inside a region."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.inside.members import Members, members_of, varying
from meshpar.collectives.inside.pieces import exchanged, gathered, spread
from meshpar.collectives.reduce_op import ReduceOp
from meshpar.mesh import Group
from meshpar.placements.apply_steps import extreme
from meshpar.placements.reductions import identity, reduce_stacked
from meshpar.placements.types import ReduceType

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

_KIND = {
    ReduceOp.SUM: ReduceType.kRedSum,
    ReduceOp.MAX: ReduceType.kRedMax,
    ReduceOp.MIN: ReduceType.kRedMin,
    ReduceOp.PROD: ReduceType.kRedProd,
    ReduceOp.AVG: ReduceType.kRedSum,  # and divided
}


def all_reduce(x: jax.Array, op: ReduceOp, group: Group, timeout: float | None = None) -> jax.Array:
    """The combined arrays on members; other devices keep theirs."""
    members = members_of(group)
    return members.only_members(_combined(x, op, members), x)


def reduce(
    x: jax.Array, dst: int, op: ReduceOp, group: Group, timeout: float | None = None
) -> jax.Array:
    """The combined arrays on `dst`; other devices keep theirs."""
    members = members_of(group)
    on_dst = members.position() == members.index_of(dst)
    return jnp.where(on_dst, _combined(x, op, members), x)


def reduce_scatter(
    xs: Sequence[jax.Array], op: ReduceOp, group: Group, timeout: float | None = None
) -> jax.Array:
    """The combined i-th arrays on the i-th member; zeros on other devices."""
    members = members_of(group)
    if not members.axes:
        return members.only_members(xs[0], jnp.zeros_like(xs[0]))
    chunks = spread(xs, members)
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        # The parts of other devices are no part of the sum.
        ours = members.only_members(chunks, jnp.zeros_like(chunks))
        ours = varying(ours, members.axes)
        result = _mean(lax.psum_scatter(ours, members.axes, scatter_dimension=0), op, members)
    else:
        result = reduce_stacked(_KIND[op], exchanged(chunks, members), 0)
    return members.only_members(result, jnp.zeros_like(result))


def _combined(x: jax.Array, op: ReduceOp, members: Members) -> jax.Array:
    """The members' arrays combined, on all devices along the group's axes."""
    if not members.axes:
        return x
    if op is ReduceOp.PROD:
        return jnp.prod(gathered(x, members), axis=0, dtype=x.dtype)
    x = varying(x, members.axes)
    if not members.whole:
        nothing = jnp.asarray(identity(_KIND[op], x.dtype))
        x = jnp.where(_picked(members), x, nothing)
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return _mean(lax.psum(x, members.axes), op, members)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _extreme(x, members.axes, op is ReduceOp.MAX)
    return extreme(x, members.axes, largest=op is ReduceOp.MAX)


def _picked(members: Members) -> jax.Array:
    """Whether this device's position along the axes is one of the members'."""
    table = np.zeros(members.length, np.bool_)
    table[list(members.picks)] = True
    return jnp.asarray(table)[members.here()]


def _mean(total: jax.Array, op: ReduceOp, members: Members) -> jax.Array:
    return total / jnp.asarray(members.count, total.dtype) if op is ReduceOp.AVG else total


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: jax.Array, axes: tuple[str, ...], largest: bool) -> jax.Array:
    """`extreme`, whose derivative is that of the devices that hold it, shared where several do."""
    return extreme(x, axes, largest=largest)


@_extreme.defjvp
def _extreme_jvp(
    axes: tuple[str, ...], largest: bool, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    found = _extreme(x, axes, largest)
    holds = ((x == found) | (jnp.isnan(x) & jnp.isnan(found))).astype(x.dtype)
    share = holds / lax.psum(holds, axes)
    return found, lax.psum(varying(tangent * share, axes), axes)
