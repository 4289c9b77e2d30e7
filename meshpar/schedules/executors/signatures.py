"""What the actions of one rank take and make, where each is a program of its own.

Arrays go in and out by name: `own`, `first` and `last` parameters; `microbatches`, `targets` and
`extras`; `kept`, those values of `LocalActions.uses` that an action takes or makes; `sent`, what it
makes for the next or the previous stage. Totals, which actions add to, are the results of the whole
step: gradients of `own`, `first` and `last` parameters, and for each microbatch `result` and
`given`, the gradient of the input.
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
        self.uses = step.actions.uses

    # --- what goes in and out ---------------------------------------------------------------------

    def takes(self, kind: Kind) -> tuple[str, ...]:
        """The names of what an action takes."""
        enters = ("first", "microbatches") if kind.first else ()
        if kind.op == "F":
            return ("own", "extras", "kept", *enters, *(("last", "targets") if kind.last else ()))
        if kind.op == "W" or self._actions.first_backward is None:
            return ("own", "extras", "kept")
        return ("own", "extras", "kept", *enters)

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
            sends = self._step.train or not kind.last
        else:
            sends = kind.op != "W" and not kind.first
        return ("sent", "kept") if sends else ("kept",)

    def reads(self, kind: Kind) -> list[int]:
        """The values that an action takes, by their numbers."""
        if kind.op == "F":
            return [] if kind.first else [v for v, use in enumerate(self.uses) if use.made == "x"]
        return self._later(kind.op)

    def writes(self, kind: Kind) -> list[int]:
        """The values that it makes; those of another rank come when they are sent."""
        if kind.op not in "FI":
            return []
        made = "xF" if kind.op == "F" and kind.first else kind.op
        later = self._later("B" if kind.op == "F" else "W")
        return [v for v in later if self.uses[v].made in made]

    def ended(self, kind: Kind) -> list[int]:
        """The values that nothing takes after an action."""
        following = {"F": "B", "I": "W"}
        later = self._later(following[kind.op]) if kind.op in following else []
        return [v for v in self.reads(kind) if v not in later]

    def _later(self, op: str) -> list[int]:
        """The values that an action of the backward pass takes; those of I are not kept by B."""
        return [
            v
            for v, use in enumerate(self.uses)
            if (use.made != "I" or op == "W")
            and ((use.by_input and op in "BI") or (use.by_weight and op in "BW"))
        ]

    def layouts(self, name: str) -> Sequence[Layout]:
        """The layouts of arrays between actions, on the mesh; of `kept` those of all values.

        A batch has a dim of microbatches first, also where they are parts of it.
        """
        step, actions, s = self._step, self._actions, self._step.stages
        groups: dict[str, Sequence[Layout]] = {
            "own": step.own,
            "first": s.first_params.layouts,
            "last": s.last_params.layouts,
            "microbatches": step.by_microbatch[0],
            "targets": step.by_microbatch[1],
            "extras": step.by_microbatch[2],
            "sent": [without_time(y) for y in actions.x_layouts],
            "kept": [without_time(y) for y in actions.layouts],
        }
        return groups[name]

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
