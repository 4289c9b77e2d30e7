"""Where the optimizer's state lies, and its creation in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from meshpar.placements.layout import Layout
from meshpar.training.paths import keys_of
from meshpar.training.state import Arrays, Slots, slots_of

__all__ = ["create_optimizer_state", "optimizer_slots"]

Cut = Callable[[tuple[int, ...], Layout], Layout]  # shape, layout -> layout of optimizer state


def optimizer_slots(tx: optax.GradientTransformation, params: Slots, cut: Cut) -> Slots:
    """The slots of an optimizer's state.

    A leaf whose path ends with the path of a parameter, and that has its shape, belongs to that
    parameter (moments, accumulated gradients) and lies as it does; every other leaf is replicated.
    Names begin with "opt.".

    Args:
      tx: the optimizer.
      params: the slots of the parameters.
      cut: changes a layout as the ZeRO stage asks.
    """
    avals = jax.tree.unflatten(
        params.treedef,
        [jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in params.leaves],
    )
    paths, _ = jax.tree_util.tree_flatten_with_path(avals)
    owner = {keys_of(path): slot for (path, _), slot in zip(paths, params.leaves, strict=True)}
    state = {"opt": jax.eval_shape(tx.init, avals)}
    slots = slots_of(state, params.mesh)

    def layout(keys: tuple[str, ...], shape: tuple[int, ...]) -> Layout:
        endings = (keys[start:] for start in range(len(keys) + 1))
        owners = (owner[ending] for ending in endings if ending in owner)
        mine = next((slot.layout for slot in owners if slot.shape == shape), None)
        return cut(shape, Layout.replicated(len(shape)) if mine is None else mine)

    state_paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return slots.with_layouts(layout(keys_of(path), leaf.shape) for path, leaf in state_paths)


def create_optimizer_state(
    tx: optax.GradientTransformation, params: Slots, arrays: Arrays, opt: Slots
) -> Arrays:
    """The fresh state as storage arrays: one program, each device makes its own blocks."""

    def init(stored: Arrays) -> Any:
        return opt.pack({"opt": tx.init(params.unpack(stored))})

    return jax.jit(init, out_shardings=opt.shardings)(arrays)
