"""Arrays that go from one rank to all, or from all to one or all."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshpar.collectives.between import bodies
from meshpar.collectives.between.engine import Action, perform
from meshpar.collectives.between.terms import Terms
from meshpar.collectives.between.world import here
from meshpar.mesh import Group

__all__ = ["all_gather", "broadcast", "gather", "scatter"]


def broadcast(x: jax.Array, src: int, group: Group, terms: Terms) -> jax.Array:
    """The array of `src`."""
    action = Action(f"broadcast(src={src})", bodies.spread, (group.ranks.index(src),))
    return perform(action, x, group.ranks, terms)


def all_gather(x: jax.Array, group: Group, terms: Terms) -> list[jax.Array]:
    """The arrays of all ranks, in the group's order."""
    return perform(Action("all_gather()", bodies.gathered), x, group.ranks, terms)


def gather(x: jax.Array, dst: int, group: Group, terms: Terms) -> list[jax.Array]:
    """The arrays of all ranks on `dst`; an empty list elsewhere."""
    found = perform(Action(f"gather(dst={dst})", bodies.gathered), x, group.ranks, terms)
    return found if here().rank == dst else []


def scatter(
    xs: Sequence[jax.Array] | None,
    src: int,
    group: Group,
    terms: Terms,
    *,
    like: jax.Array,
) -> jax.Array:
    """This rank's item of the list of `src`; elsewhere `like` says of what shape it is."""
    # One array stands for all items of a list that nobody reads.
    items = xs if xs is not None and here().rank == src else [jnp.asarray(like)] * group.nranks
    action = Action(f"scatter(src={src})", bodies.scattered, (group.ranks.index(src),))
    return perform(action, list(items), group.ranks, terms)
