"""Arrays between the mesh of a pipeline and those of its ranks, copied only where they must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding

__all__ = ["everywhere", "joined", "on_rank", "split"]


def split(x: Any, sharding: NamedSharding, ranks: Sequence[NamedSharding]) -> list[jax.Array]:
    """The parts of the ranks, whose dim 0 has size 1.

    Args:
      x: dim 0 counts the ranks.
      sharding: on the whole mesh; its axis of ranks cuts dim 0.
      ranks: the same on the mesh of each rank.
    """
    placed = jax.device_put(x, sharding)
    blocks = _blocks(placed)
    shape = (1, *placed.shape[1:])
    return [_array(shape, own, blocks) for own in ranks]


def joined(
    parts: Sequence[jax.Array], shape: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """What `split` split."""
    return _array(shape, sharding, {d: x for part in parts for d, x in _blocks(part).items()})


def on_rank(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array on the mesh of one rank; its own blocks where it is there already."""
    if isinstance(x, jax.Array) and sharding.device_set <= x.sharding.device_set:
        there, wanted = (s.devices_indices_map(x.shape) for s in (x.sharding, sharding))
        if all(there[device] == box for device, box in wanted.items()):
            return _array(x.shape, sharding, _blocks(x))
    return jax.device_put(x, sharding)


def everywhere(x: jax.Array, copied: NamedSharding, wanted: NamedSharding) -> jax.Array:
    """An array of one rank on the whole mesh.

    Args:
      x: on the mesh of the rank.
      copied: its layout there, on the whole mesh: all ranks have the same.
      wanted: the layout that it gets, where ranks may have different parts.
    """
    x = jax.device_put(x, copied)
    return x if copied == wanted else laid_out(wanted)(x)


@lru_cache(maxsize=256)
def laid_out(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    """The program that gives an array on the same devices another sharding."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def _blocks(x: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in x.addressable_shards}


def _array(
    shape: tuple[int, ...], sharding: NamedSharding, blocks: dict[Any, jax.Array]
) -> jax.Array:
    # Arrays of random keys need their blocks in the order of the mesh.
    devices: Any = sharding.mesh.devices  # `None` on abstract meshes only
    ordered = [blocks[device] for device in devices.flat]
    dtype = ordered[0].dtype
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered, dtype=dtype)
