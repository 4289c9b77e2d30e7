"""The compiled programs of this process's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar._jax import array_type
from meshpar.collectives.between.program import AXIS, Body, Program
from meshpar.collectives.between.world import World

__all__ = ["program_of"]

_KEPT = 1024  # programs; the oldest go first


def program_of(
    world: World, body: Body, static: tuple[Any, ...], ranks: tuple[int, ...], x: Any
) -> Program:
    """The program of a body for arrays like `x`, compiled when it is first run."""
    model, count = (x[0], len(x)) if isinstance(x, list) else (x, 0)
    key = (body, static, ranks, count, model.shape, model.dtype)
    found = world.programs.get(key)
    if found is None:
        shown = f"{model.dtype}{list(model.shape)}"
        shown = f"{count} arrays {shown}" if isinstance(x, list) else shown
        found = _make(world, body, static, ranks, model, shown)
        with world.lock:
            world.programs[key] = found
            if len(world.programs) > _KEPT:
                world.programs.popitem(last=False)
    return found


def _make(
    world: World,
    body: Body,
    static: tuple[Any, ...],
    ranks: tuple[int, ...],
    model: jax.Array,
    shown: str,
) -> Program:
    devices = np.array([world.devices[rank] for rank in ranks], dtype=object)
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    spec, shape = PartitionSpec(AXIS), model.shape

    def of_each(blocks: Any) -> Any:
        out = body(jax.tree.map(lambda x: x.reshape(shape), blocks), *static)
        return jax.tree.map(lambda y: y if shape else y.reshape(1), out)

    def of_each_and_more(numbers: jax.Array, blocks: Any) -> tuple[jax.Array, Any]:
        return -numbers, of_each(blocks)

    def over_ranks(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    rows = shape[0] if shape else 1
    aval = array_type((rows * len(ranks), *shape[1:]), model.dtype)
    sharding = NamedSharding(mesh, spec)
    heavier = over_ranks(of_each_and_more)
    return Program(over_ranks(of_each), heavier, sharding, aval, not shape, shown)
