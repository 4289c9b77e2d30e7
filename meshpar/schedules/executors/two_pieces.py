"""A model without equal layers, in two: what comes before a place and what comes after it."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import accumulate

import jax.numpy as jnp

from meshpar.compiler.program import Node, Program
from meshpar.schedules.executors.evaluate import depending_on, values_of
from meshpar.schedules.executors.layers import Layers, cuts

__all__ = ["cut_in_half", "cut_in_two"]


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
    places = _places(program, active)
    if after:
        found = next((place for place in places if place[0] > at), None)
    else:
        found = next((place for place in reversed(places) if place[0] <= at), None)
    if found is None:
        return None
    position, _ = found
    between = program.nodes[at + 1 : position] if after else program.nodes[position:at]
    weights = of_params - of_batch
    if any(
        not weights.isdisjoint(values_of(node.ins)) and not active.isdisjoint(node.outs)
        for node in between
    ):
        return None
    return _no_layers(program, found)


def cut_in_half(program: Program, params: Collection[int], batch: Collection[int]) -> Layers | None:
    """No layers, at the place with the nearest to half of the arithmetic before it.

    Args: see `cut_in_two`.
    """
    active = depending_on(program, params) & depending_on(program, batch)
    places = _places(program, active)
    if not places:
        return None
    costs = [
        _cost(program, node) if not active.isdisjoint(node.outs) else 0 for node in program.nodes
    ]
    before = list(accumulate(costs, initial=0))
    return _no_layers(program, min(places, key=lambda at: abs(2 * before[at[0]] - before[-1])))


def _places(program: Program, active: set[int]) -> list[tuple[int, int]]:
    """The cuts where the one value that goes on is an array of floats."""
    return [
        (position, value)
        for position, value in cuts(program, active)
        if program.avals[value].ndim and jnp.issubdtype(program.avals[value].dtype, jnp.inexact)
    ]


def _no_layers(program: Program, place: tuple[int, int]) -> Layers:
    position, x = place
    body = Program(program.avals, (x,), program.constants, [], (x,))
    return Layers(body, x, x, ((),), (), 0, position - 1)


def _cost(program: Program, node: Node) -> int:
    """Additions and the like, or products where there are: a matrix product has most."""
    made = sum(math.prod(program.avals[value].shape) for value in node.outs)
    if node.name != "dot_general":
        return made
    (dims, _), _ = node.params["dimension_numbers"]
    shape = program.aval(node.ins[0]).shape
    return made * math.prod(shape[dim] for dim in dims)
