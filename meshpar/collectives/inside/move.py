"""`broadcast`, `all_gather`, `gather` and `scatter` inside a region."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.inside.members import members_of, varying
from meshpar.collectives.inside.pieces import exchanged, gathered, spread
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["all_gather", "broadcast", "gather", "scatter"]


def broadcast(x: jax.Array, src: int, group: Group, timeout: float | None = None) -> jax.Array:
    """The array of `src` on members; other devices keep theirs."""
    members = members_of(group)
    if not members.axes:
        return x
    at = members.picks[members.index_of(src)]
    return members.only_members(_sent_by(varying(x, members.axes), members.axes, at), x)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _sent_by(x: jax.Array, axes: tuple[str, ...], at: int) -> jax.Array:
    """The array of the device at a position, by a sum to which the others bring nothing.

    XLA has no broadcast that runs everywhere. The sum is one of whole numbers, so that it keeps
    every bit: of floats it would lose the sign of zeros.
    """
    bits = _bits(x)
    mine = jnp.where(lax.axis_index(axes) == at, bits, jnp.zeros_like(bits))
    return _from_bits(lax.psum(mine, axes), x)


@_sent_by.defjvp
def _sent_by_jvp(
    axes: tuple[str, ...], at: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    mine = jnp.where(lax.axis_index(axes) == at, tangent, jnp.zeros_like(tangent))
    return _sent_by(x, axes, at), lax.psum(varying(mine, axes), axes)


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _bits(jnp.stack([x.real, x.imag]))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = jnp.finfo(x.dtype).bits
    whole = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[bits]
    return lax.bitcast_convert_type(x, whole)


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    if like.dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        real, imag = _from_bits(bits, like.real)
        return lax.complex(real, imag)
    if not jnp.issubdtype(like.dtype, jnp.floating):
        return bits
    return lax.bitcast_convert_type(bits, like.dtype)


def all_gather(x: jax.Array, group: Group, timeout: float | None = None) -> list[jax.Array]:
    """The arrays of all members on members; zeros on other devices."""
    members = members_of(group)
    everyone = gathered(x, members)
    return list(members.only_members(everyone, jnp.zeros_like(everyone)))


def gather(x: jax.Array, dst: int, group: Group, timeout: float | None = None) -> list[jax.Array]:
    """The arrays of all members on `dst`; zeros on other devices."""
    members = members_of(group)
    everyone = gathered(x, members)
    on_dst = members.position() == members.index_of(dst)
    return list(jnp.where(on_dst, everyone, jnp.zeros_like(everyone)))


def scatter(
    xs: Sequence[jax.Array] | None,
    src: int,
    group: Group,
    timeout: float | None = None,
    *,
    like: jax.Array,
) -> jax.Array:
    """This member's array of those that `src` has; other devices get `like`'s zeros."""
    if xs is None:
        raise CollectiveError(
            "there is no list.",
            because="inside a region all ranks run one program, which has the list of rank src",
        )
    members = members_of(group)
    one = exchanged(spread(xs, members), members)[members.index_of(src)]
    return members.only_members(one, jnp.zeros_like(like))
