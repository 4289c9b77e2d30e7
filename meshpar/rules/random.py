"""Rules of random numbers: each device draws exactly its part of the one global draw.

JAX's default generator makes a number from its key and its position in the array, so a device that
knows where its block begins draws it without the rest, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from meshpar.rules.elementwise import elementwise
from meshpar.rules.registry import register, rule_for
from meshpar.rules.rule import Aval, Emission, Rule, einsum, letters

Shape = tuple[int, ...]
_UINTS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


@rule_for("random_bits")
def random_bits(keys: Aval, *, bit_width: int, shape: Shape, **_: Any) -> Rule:
    """`k->kij`, for one key or an array of them; only threefry can be cut inside a draw."""
    names = letters(keys.ndim + len(shape))
    per_key, drawn = names[: keys.ndim], names[keys.ndim :]
    threefry = str(keys.dtype) == "key<fry>" and jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]

    def emit(at: Emission, key: jax.Array) -> Any:
        if not any(at.is_cut(name) for name in drawn):
            return at.bind(key)
        high, low = _positions(at, drawn, shape, key.ndim)
        words = jax.random.key_data(key)
        # Keys as small as they are: on CPU the rounds are a loop that would carry full copies.
        along = (*key.shape, *(1,) * len(drawn)) if key.ndim else ()
        first, second = (words[..., i].reshape(along) for i in (0, 1))
        block = (*key.shape, *(at.local_size(name) for name in drawn))
        bits = threefry2x32_p.bind(
            first, second, jnp.broadcast_to(high, block), jnp.broadcast_to(low, block)
        )
        dtype = _UINTS[bit_width]
        if bit_width == 64:
            return bits[0].astype(dtype) << jnp.asarray(32, dtype) | bits[1].astype(dtype)
        return (bits[0] ^ bits[1]).astype(dtype)

    return Rule(
        operands=(tuple((n,) for n in per_key),),
        results=(tuple((n,) for n in names),),
        sizes=dict(zip(names, (*keys.shape, *shape), strict=True)),
        blocked=frozenset() if threefry else frozenset(drawn),
        emit=emit,
    )


def _positions(
    at: Emission, names: list[str], shape: Shape, leading: int
) -> tuple[jax.Array, jax.Array]:
    """The row-major position of each element in the whole draw, as two 32-bit words."""
    high = low = jnp.zeros((1,) * len(names), jnp.uint32)
    stride = 1
    for dim in reversed(range(len(names))):
        size = at.local_size(names[dim])
        along = [1] * len(names)
        along[dim] = size
        index = jnp.arange(size, dtype=jnp.uint32).reshape(along)
        if at.is_cut(names[dim]):
            index = index + at.start(names[dim]).astype(jnp.uint32)
        if math.prod(shape) < 2**32:
            low = low + index * jnp.uint32(stride % 2**32)
        else:
            more_high, more_low = _times(index, stride)
            low = low + more_low
            high = high + more_high + (low < more_low).astype(jnp.uint32)
        stride *= shape[dim]
    lead = (1,) * leading
    return high.reshape(*lead, *high.shape), low.reshape(*lead, *low.shape)


def _times(index: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """index * stride in 64 bits, as two words: by 16-bit limbs, as uint64 may be off."""
    high = low = jnp.zeros_like(index)
    for place in range(4):
        limb = jnp.uint32(stride >> (16 * place) & 0xFFFF)
        for half in range(2):
            part = (index >> (16 * half) & 0xFFFF) * limb
            shift = 16 * (place + half)
            if shift >= 64:
                continue
            if shift >= 32:
                high = high + (part << (shift - 32))
                continue
            more = part << shift
            low = low + more
            high = high + (low < more).astype(jnp.uint32)
            if shift:
                high = high + (part >> (32 - shift))
    return high, low


def _fold_in(key: Aval, data: Aval, **_: Any) -> Rule:
    return elementwise(key, data)


register("random_fold_in", _fold_in)


@rule_for("random_wrap")
def random_wrap(words: Aval, **_: Any) -> Rule:
    """`kw->k`, with the words of a key whole."""
    names = [f"k{d}" for d in range(words.ndim - 1)]
    return Rule(
        operands=(((*((n,) for n in names), ("w",))),),
        results=(tuple((n,) for n in names),),
        sizes={**dict(zip(names, words.shape, strict=False)), "w": words.shape[-1]},
        blocked=frozenset({"w"}),
    )


@rule_for("random_unwrap")
def random_unwrap(keys: Aval, **_: Any) -> Rule:
    """`k->kw`, with the words of a key whole."""
    names = [f"k{d}" for d in range(keys.ndim)]
    return Rule(
        operands=(tuple((n,) for n in names),),
        results=(((*((n,) for n in names), ("w",))),),
        sizes={**dict(zip(names, keys.shape, strict=True)), "w": 4},
        blocked=frozenset({"w"}),
    )


@rule_for("random_seed")
def random_seed(seeds: Aval, **_: Any) -> Rule:
    """`k->k`."""
    return elementwise(seeds)


@rule_for("random_clone")
def random_clone(keys: Aval, **_: Any) -> Rule:
    """`k->k`."""
    return elementwise(keys)


@rule_for("random_gamma")
def random_gamma(keys: Aval, alphas: Aval, **_: Any) -> Rule:
    """`k,kij->kij`: each device draws for all parameters of a key, and keeps what is its own.

    A draw depends on the position of its parameter, which the primitive counts from 0; the
    parameters of other devices do not matter, so that they need not be sent.
    """
    names = letters(alphas.ndim)

    def emit(at: Emission, key: jax.Array, block: jax.Array) -> jax.Array:
        rows = block.shape
        cut = [d for d in range(key.ndim, alphas.ndim) if at.is_cut(names[d])]
        for d in cut:
            shape = (*block.shape[:d], alphas.shape[d] + rows[d], *block.shape[d + 1 :])
            block = lax.dynamic_update_slice_in_dim(
                jnp.ones(shape, block.dtype), block, at.start(names[d]), d
            )
            block = lax.slice_in_dim(block, 0, alphas.shape[d], axis=d)
        (out,) = at.bind(key, block)
        for d in cut:
            config = [(0, 0, 0)] * out.ndim
            config[d] = (0, rows[d], 0)
            out = lax.pad(out, jnp.zeros((), out.dtype), config)
            out = lax.dynamic_slice_in_dim(out, at.start(names[d]), rows[d], d)
        return out

    return einsum(([names[: keys.ndim], names], [names]), (keys, alphas), emit=emit)


@rule_for("rng_bit_generator")
def rng_bit_generator(key: Aval, *, shape: Shape, **_: Any) -> Rule:
    """`k->k,ij`, all whole: XLA's generator says nothing about where a number comes from."""
    names = letters(1 + len(shape))
    sizes = dict(zip(names, (key.shape[0], *shape), strict=True))
    return Rule(
        operands=(((names[0],),),),
        results=(((names[0],),), tuple((n,) for n in names[1:])),
        sizes=sizes,
        blocked=frozenset(names),
    )


@rule_for("random_split")
def random_split(keys: Aval, *, shape: Shape, **_: Any) -> Rule:
    """`k->kij`: each device makes all new keys, and keeps its own."""
    names = letters(keys.ndim + len(shape))

    def emit(at: Emission, key: jax.Array) -> jax.Array:
        (out,) = at.bind(key)
        for d in range(keys.ndim, len(names)):
            if at.is_cut(names[d]):
                rows = jnp.arange(at.local_size(names[d])) + at.start(names[d])
                out = jnp.take(out, jnp.minimum(rows, at.size(names[d]) - 1), axis=d)
        return out

    return Rule(
        operands=(tuple((n,) for n in names[: keys.ndim]),),
        results=(tuple((n,) for n in names),),
        sizes=dict(zip(names, (*keys.shape, *shape), strict=True)),
        emit=emit,
    )
