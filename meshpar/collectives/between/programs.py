"""The compiled programs of this process's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar.collectives.between.program import AXIS, LENGTH, Body, Program
from meshpar.collectives.between.runnable import Runnable
from meshpar.collectives.between.world import World

__all__ = ["program_of"]

_KEPT = 1024  # programs; the oldest go first


def program_of(
    world: World, body: Body, static: tuple[Any, ...], ranks: tuple[int, ...], x: Any
) -> Program:
    """The program of a body for arrays like `x`, compiled when it is first run."""
    model, count = (x[0], len(x)) if isinstance(x, list) else (x, 0)
    aval = model.aval
    key = (body, static, ranks, count, aval.shape, aval.dtype)
    found = world.programs.get(key)
    if found is None:
        found = _make(world, body, static, ranks, model, count)
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
    count: int,
) -> Program:
    """A new program for so many arrays like `model`; 0 stands for one by itself."""
    shown = f"{model.dtype}{list(model.shape)}"
    shown = f"{count} arrays {shown}" if count else shown
    devices = np.array([world.devices[rank] for rank in ranks], dtype=object)
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    cut, shape = PartitionSpec(AXIS), model.shape
    # Results without dims cannot be cut; each rank has its own all the same.
    out = cut if shape else PartitionSpec()

    def of_each(*blocks: jax.Array) -> Any:
        given = [block.reshape(shape) for block in blocks]
        return body(given if count else given[0], *static)

    def of_each_and_more(numbers: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, Any]:
        return -numbers, of_each(*blocks)

    def whole(rows: int, *rest: int, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, cut)
        return jax.ShapeDtypeStruct((rows * len(ranks), *rest), dtype, sharding=sharding)

    def over_ranks(fn: Callable[..., Any], specs: Any) -> Callable[..., Any]:
        return jax.shard_map(fn, mesh=mesh, in_specs=cut, out_specs=specs, check_vma=False)

    structs = [whole(*(shape or (1,)), dtype=model.dtype)] * max(count, 1)
    numbers = whole(LENGTH, dtype=np.float32)
    plain = Runnable(over_ranks(of_each, out), structs)
    heavier = Runnable(over_ranks(of_each_and_more, (cut, out)), [numbers, *structs])
    results = None if model.size else _cut(jax.eval_shape(plain.jitted, *structs), len(ranks))
    return Program(plain, heavier, None if shape else world.widened, results, shown)


def _cut(wholes: Any, ranks: int) -> Any:
    """The types of one rank's blocks."""
    return jax.tree.map(
        lambda y: jax.ShapeDtypeStruct((y.shape[0] // ranks, *y.shape[1:]), y.dtype), wholes
    )
