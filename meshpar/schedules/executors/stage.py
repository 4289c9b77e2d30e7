"""The programs of a stage: its forward pass F, its backward pass B, and B in halves, I and W."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar._jax import is_key_array
from meshpar.compiler.program import Constant, Program, Ref, program_of
from meshpar.schedules.executors.evaluate import (
    depending_on,
    run_program,
    values_of,
    without_calls,
)
from meshpar.schedules.executors.split import split

__all__ = ["Kept", "StagePrograms", "is_differentiable", "stage_programs"]

StageFn = Callable[[Any, Any, Any], Any]
"""`(parameters, input, extras) -> output`, the output like the input in shapes and dtypes."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An array that F leaves for the backward pass, or I for W.

    Args:
      aval: shape and dtype.
      by_input: whether I takes it.
      by_weight: whether W takes it.
    """

    aval: Any  # a jax.core.ShapedArray, whose type JAX does not export
    by_input: bool
    by_weight: bool


@dataclass(frozen=True, slots=True)
class StagePrograms:
    """The actions of a stage as programs, all of whose inputs begin with parameters and extras.

    Args:
      forward: (..., input) -> (output, residuals).
      full: (..., residuals, output gradient) -> (input gradient, parameter gradients).
      for_input: (..., residuals, output gradient) -> (input gradient, cut).
      for_weight: (..., residuals, cut) -> parameter gradients.
      residuals: what F leaves.
      cut: what I leaves for W.
      trained: positions of the parameters that have a gradient.
    """

    forward: Program
    full: Program
    for_input: Program
    for_weight: Program
    residuals: tuple[Kept, ...]
    cut: tuple[Kept, ...]
    trained: tuple[int, ...]


def is_differentiable(x: Any) -> bool:
    """Whether a value has a gradient: floats have, integers and random keys have not."""
    return not is_key_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def stage_programs(
    stage: StageFn, own: Any, x: Any, extras: Any, *, recompute: bool = False
) -> StagePrograms:
    """Traces a stage and splits its backward pass.

    Args:
      stage: `(parameters, input, extras) -> output`.
      own: the parameters, as arrays or structs.
      x: the input of one microbatch, floats only.
      extras: what else belongs to a microbatch; it has no gradient.
      recompute: whether F keeps its input only, and the backward pass runs the stage again.
    """
    trace = _Trace(stage, own, x, extras)
    forward = _as_program(trace.forward_only if recompute else trace.forward, trace.structs)
    given = len(trace.own) + len(trace.extras)
    outputs = forward.outputs[len(trace.x) :]
    if recompute:
        kept = list(forward.inputs[given:])
        backward = _as_program(trace.recomputed, [*trace.structs, *trace.x])
    else:
        kept = _to_keep(forward, outputs, forward.inputs[:given], len(trace.own))
        again = [ref for ref in outputs if ref not in kept]
        asked = replace(forward, outputs=tuple(again))
        prelude = replace(split(asked, range(len(again)), ()).first, inputs=forward.inputs[:given])

        def from_residuals(*leaves: Any) -> list[Any]:
            made = iter(run_program(prelude, *leaves[:given]))
            stored: dict[Ref, Any] = dict(zip(kept, leaves[given : given + len(kept)], strict=True))
            residuals = [stored[r] if r in kept else next(made) for r in outputs]
            return trace.pulled_back(residuals, leaves[given + len(kept) :])

        avals = [forward.avals[value] for value in kept]
        backward = _as_program(
            from_residuals, [*trace.structs[:given], *map(_struct, avals), *trace.x]
        )
    forward.outputs = (*forward.outputs[: len(trace.x)], *kept)
    return _programs(forward, backward, trace, len(kept))


def _programs(forward: Program, backward: Program, trace: _Trace, residuals: int) -> StagePrograms:
    given = len(trace.own) + len(trace.extras)
    gradients = backward.inputs[given + residuals :]
    outs = range(len(backward.outputs))
    halves = split(
        backward,
        outs[: len(trace.x)],
        outs[len(trace.x) :],
        private=gradients,
        free=backward.inputs[: len(trace.own)],
    )
    used = _used(halves.first), _used(halves.second)
    stored = backward.inputs[given : given + residuals]
    return StagePrograms(
        forward,
        backward,
        halves.first,
        halves.second,
        tuple(Kept(backward.avals[v], v in used[0], v in used[1]) for v in stored),
        tuple(Kept(halves.first.aval(v), False, True) for v in halves.cut),
        trace.trained,
    )


class _Trace:
    """A stage as functions of leaves."""

    def __init__(self, stage: StageFn, own: Any, x: Any, extras: Any) -> None:
        self._stage = stage
        self.own, self._own_tree = jax.tree.flatten(own)
        self.extras, self._extras_tree = jax.tree.flatten(extras)
        self.x, self._x_tree = jax.tree.flatten(x)
        self.own, self.extras, self.x = (
            [_struct(leaf) for leaf in leaves] for leaves in (self.own, self.extras, self.x)
        )
        self.structs = [*self.own, *self.extras, *self.x]
        self.trained = tuple(k for k, leaf in enumerate(self.own) if is_differentiable(leaf))
        self._pullback: Any = None

    def forward_only(self, *leaves: Any) -> list[Any]:
        own, extras, x = self._apart(leaves)
        return jax.tree.leaves(self._run([own[k] for k in self.trained], x, own, extras))

    def forward(self, *leaves: Any) -> list[Any]:
        y, vjp = self._vjp(leaves)
        residuals, self._pullback = jax.tree.flatten(vjp)
        return [*jax.tree.leaves(y), *residuals]

    def recomputed(self, *leaves: Any) -> list[Any]:
        y, vjp = self._vjp(leaves[: len(self.structs)])
        return self._gradients(vjp, jax.tree.structure(y), leaves[len(self.structs) :])

    def pulled_back(self, residuals: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        vjp = jax.tree.unflatten(self._pullback, residuals)
        return self._gradients(vjp, self._x_tree, gradients)

    def _gradients(self, vjp: Any, tree: Any, gradients: Sequence[Any]) -> list[Any]:
        for_own, for_x = vjp(jax.tree.unflatten(tree, gradients))
        return [*for_x, *for_own]

    def _vjp(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        own, extras, x = self._apart(leaves)
        return jax.vjp(
            lambda trained, x: self._run(trained, x, own, extras),
            [own[k] for k in self.trained],
            list(x),
        )

    def _run(
        self, trained: Sequence[Any], x: Sequence[Any], own: Sequence[Any], extras: Sequence[Any]
    ) -> Any:
        own = list(own)
        for k, leaf in zip(self.trained, trained, strict=True):
            own[k] = leaf
        return self._stage(
            jax.tree.unflatten(self._own_tree, own),
            jax.tree.unflatten(self._x_tree, x),
            jax.tree.unflatten(self._extras_tree, extras),
        )

    def _apart(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        first, second = len(self.own), len(self.own) + len(self.extras)
        return leaves[:first], leaves[first:second], leaves[second:]


def _to_keep(
    forward: Program, outputs: Sequence[Ref], given: Sequence[int], parameters: int
) -> list[int]:
    """The residuals to keep: not those that follow from parameters, nor the extras themselves."""
    bound = depending_on(forward, forward.inputs[parameters:])
    kept: dict[int, None] = {}
    for ref in outputs:
        if not isinstance(ref, Constant) and ref in bound and ref not in given:
            kept[ref] = None
    return list(kept)


def _as_program(fn: Callable[..., list[Any]], structs: Sequence[Any]) -> Program:
    return without_calls(program_of(jax.make_jaxpr(fn)(*structs)))


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _used(program: Program) -> set[int]:
    return values_of(program.outputs).union(*(values_of(node.ins) for node in program.nodes))
