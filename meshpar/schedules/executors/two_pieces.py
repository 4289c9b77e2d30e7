"""A model without equal layers, in two: what comes before a place and what comes after it."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp

from meshpar.compiler.program import Program
from meshpar.schedules.executors.evaluate import depending_on, values_of
from meshpar.schedules.executors.layers import Layers, cuts

__all__ = ["cut_in_two"]


def cut_in_two(
    program: Program, params: Collection[int], batch: Collection[int], at: int, *, after: bool
) -> Layers | None:
    """No layers, at a place that an operation of the program gives.

    Args:
      program: the forward pass of a model, to its loss or its outputs.
      params: the inputs that are trained.
      batch: the inputs that are the batch.
      at: the position of an operation.
      after: whether the place comes after it, or before.

    Returns:
      Layers of which there are none: the place is the nearest where one array of floats alone goes
      on. `None` where there is no such place but beyond operations on other parameters.
    """
    of_params, of_batch = depending_on(program, params), depending_on(program, batch)
    active = of_params & of_batch
    places = [
        (position, value)
        for position, value in cuts(program, active)
        if program.avals[value].ndim and jnp.issubdtype(program.avals[value].dtype, jnp.inexact)
    ]
    if after:
        found = next((place for place in places if place[0] > at), None)
    else:
        found = next((place for place in reversed(places) if place[0] <= at), None)
    if found is None:
        return None
    position, x = found
    between = program.nodes[at + 1 : position] if after else program.nodes[position:at]
    weights = of_params - of_batch
    if any(
        not weights.isdisjoint(values_of(node.ins)) and not active.isdisjoint(node.outs)
        for node in between
    ):
        return None
    body = Program(program.avals, (x,), program.constants, [], (x,))
    return Layers(body, x, x, ((),), (), 0, position - 1)
