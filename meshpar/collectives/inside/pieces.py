"""Pieces, one for each member, on their way over the axes of a group."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.inside.members import Members, varying

__all__ = ["exchanged", "gathered", "spread"]


def spread(xs: Sequence[jax.Array], members: Members) -> jax.Array:
    """One array for each member, as one for each device along the axes, along a new dim 0."""
    if members.whole:
        return jnp.stack(xs)
    by_position = dict(zip(members.picks, xs, strict=True))
    nothing = jnp.zeros_like(xs[0])
    return jnp.stack([by_position.get(i, nothing) for i in range(members.length)])


def gathered(x: jax.Array, members: Members) -> jax.Array:
    """The arrays of all members along a new dim 0, on all devices along the axes."""
    if not members.axes:
        return x[None]
    everyone = lax.all_gather(varying(x, members.axes), members.axes, to="invarying")
    return everyone if members.whole else everyone[np.asarray(members.picks)]


def exchanged(chunks: jax.Array, members: Members) -> jax.Array:
    """The chunks that the members have for this device, along dim 0.

    Args:
      chunks: one for each device along the axes, along dim 0.
    """
    if members.axes:
        chunks = lax.all_to_all(
            varying(chunks, members.axes), members.axes, split_axis=0, concat_axis=0, tiled=True
        )
    return chunks if members.whole else chunks[np.asarray(members.picks)]
