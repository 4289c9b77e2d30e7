"""What the actions of one rank take and make, where each is a program of its own.

Arrays go in and out by name. Values are `own`, `first` and `last` parameters; `microbatches`,
`targets` and `extras`; the input `x` of a stage and the gradient `g` of its output; what `F` keeps
and what `I` keeps. `sent` is what an action makes for the next or the previous stage. Totals, which
actions add to, are the results of the whole step: gradients of `own`, `first` and `last`
parameters, and for each microbatch `result` and `given`, the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshpar.placements.layout import Layout
from meshpar.schedules.executors.in_time import without_time
from meshpar.schedules.executors.step import PipelineStep, below

__all__ = ["Blocks", "Kind", "Signatures"]

Blocks = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """An action: its op, and whether its stage is the model's first or last one."""

    op: str
    first: bool
    last: bool


class Signatures:
    """The signatures of the actions of a step.

    Args:
      step: what is run.
    """

    def __init__(self, step: PipelineStep) -> None:
        self._step, self._actions = step, step.actions
        self._x = len(step.actions.x)
        uses = step.actions.uses
        self.uses = {kind: [use for use in uses if use.made == kind] for kind in "xgFI"}
        given = len(step.actions.forward.inputs) - self._x
        self._passed = [
            None if k is None or k < given else k - given
            for k in step.actions.forward.passed[self._x :]
        ]

    # --- what goes in and out ---------------------------------------------------------------------

    def takes(self, kind: Kind) -> tuple[str, ...]:
        """The names of the values that an action takes."""
        enters = ("first", "microbatches") if kind.first else ()
        if kind.op == "F":
            leaves = ("last", "targets") if kind.last else ()
            return ("own", "extras", *(enters or ("x",)), *leaves)
        if kind.op == "W":
            return ("own", "extras", "F", "I")
        returns = enters if self._actions.first_backward is not None else ()
        return ("own", "extras", "F", "g", *returns)

    def totals(self, kind: Kind) -> tuple[str, ...]:
        """The names of the totals that it adds to."""
        if kind.op == "F":
            return ("result", *(("last",) if self._step.train else ())) if kind.last else ()
        own = ("own",) if kind.op in "BW" else ()
        returns = kind.op != "W" and kind.first
        first = ("first",) if returns and self._actions.first_backward is not None else ()
        return (*own, *first, *(("given",) if returns and self._step.keep_given else ()))

    def makes(self, kind: Kind) -> tuple[str, ...]:
        """The names of what it makes."""
        if kind.op == "F":
            kept = ("F",) if self._step.train else ()
            return kept if kind.last and not self._step.train else ("sent", *kept)
        sent = () if kind.op == "W" or kind.first else ("sent",)
        return (*sent, *(("I",) if kind.op == "I" else ()))

    def kept(self, kind: Kind, name: str) -> list[int]:
        """Which of the values called `name` an action takes or makes, by their positions."""
        if name != "F":
            return [*range(len(self.uses[name]))]
        if kind.op != "F":
            return self._used(kind.op)
        as_it_came = {k for k, _ in self.passed(kind)}
        return [k for k in self._used("B") if k not in as_it_came]

    def passed(self, kind: Kind) -> list[tuple[int, int]]:
        """What F keeps as it came: (position in what it keeps, position in its input)."""
        found = [] if kind.first else [(k, self._passed[k]) for k in self._used("B")]
        return [(k, x) for k, x in found if x is not None]

    def _used(self, op: str) -> list[int]:
        """Which of what F keeps an action of the backward pass takes."""
        uses = enumerate(self.uses["F"])
        return [k for k, u in uses if (u.by_input and op in "BI") or (u.by_weight and op in "BW")]

    def layouts(self, name: str) -> Sequence[Layout]:
        """The layouts of values between actions, on the mesh; those of `F` and `I` are of all."""
        step, actions, s = self._step, self._actions, self._step.stages
        groups: dict[str, Sequence[Layout]] = {
            "own": step.own,
            "first": s.first_params.layouts,
            "last": s.last_params.layouts,
            "microbatches": step.batch[0],
            "targets": step.batch[1],
            "extras": step.batch[2],
            "F": actions.forward.outputs[self._x :],
            "I": () if actions.for_input is None else actions.for_input.outputs[self._x :],
        }
        return [without_time(y) for y in groups.get(name, actions.x_layouts)]

    def total_layouts(self, name: str) -> Sequence[Layout]:
        """The layouts of totals while they are added to, on the mesh of one rank."""
        actions = self._actions
        stacked = {"result": actions.result.layouts, "given": actions.x_layouts}
        if name in stacked:
            return [below(without_time(y), ()) for y in stacked[name]]
        return [r.made.without_partial((self._step.axis,)) for r in self._step.results[name]]

    def zeros(self, name: str) -> list[Any]:
        """The blocks of totals before the first action."""
        microbatches = self._step.schedule.M
        stacked = {"result": self._actions.result_blocks, "given": self._actions.x}
        if name in stacked:
            return [jnp.zeros((microbatches, *s.shape), s.dtype) for s in stacked[name]]
        lead = (1,) if name == "own" else ()
        return [jnp.zeros((*lead, *s.shape), s.dtype) for s in self._step.sums(name)]
