"""The actions of one rank, each as a function of its blocks that is complete in itself.

What they take and make, by name, is in `signatures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshpar.schedules.executors.local import LocalProgram
from meshpar.schedules.executors.rows import add, add_to_row, put_rows, rows_at
from meshpar.schedules.executors.signatures import Blocks, Kind, Signatures
from meshpar.schedules.executors.step import PipelineStep

__all__ = ["RankActions"]


@dataclass(frozen=True, slots=True)
class _Call:
    """What an action is called with."""

    kind: Kind
    totals: Blocks
    values: Blocks
    chunk: Any
    microbatch: Any


class RankActions:
    """The actions of a step.

    Args:
      step: what is run.
      signatures: what they take and make.
    """

    def __init__(self, step: PipelineStep, signatures: Signatures) -> None:
        self._step, self._actions, self._signatures = step, step.actions, signatures
        self._x = len(step.actions.x)

    def run(
        self, kind: Kind, totals: Blocks, values: Blocks, chunk: Any, microbatch: Any
    ) -> tuple[Blocks, Blocks]:
        """Runs an action on blocks: the totals it adds to as they are then, and what it makes."""
        actions = {
            "F": self._forward,
            "B": self._full,
            "I": self._for_input,
            "W": self._for_weight,
        }
        return actions[kind.op](_Call(kind, totals, values, chunk, microbatch))

    def _forward(self, call: _Call) -> tuple[Blocks, Blocks]:
        kind, totals, values = call.kind, call.totals, call.values
        x = self._enter(call) if kind.first else values["kept"]
        out = self._actions.forward.run(*self._given(call), *x)
        y = out[: self._x]
        left = dict(enumerate(x)) | dict(zip(self._actions.residuals, out[self._x :], strict=True))
        made = {"sent": y, "kept": [left[v] for v in self._signatures.writes(kind)]}
        if not kind.last:
            return totals, made
        target = self._of_batch(call, "targets")
        results = self._actions.last.run(*values["last"], *y, *target)
        count = len(totals["result"])
        new = {"result": put_rows(totals["result"], results[:count], call.microbatch)}
        if self._step.train:
            made["sent"] = results[count : count + self._x]
            new["last"] = add(totals["last"], results[count + self._x :])
        return new, made

    def _enter(self, call: _Call) -> list[Any]:
        microbatch = self._of_batch(call, "microbatches")
        first = self._actions.first
        return microbatch if first is None else first.run(*call.values["first"], *microbatch)

    def _full(self, call: _Call) -> tuple[Blocks, Blocks]:
        out = _there(self._actions.full).run(*self._taken(call, "residuals", "g"))
        totals, made = self._return(call, out[: self._x])
        return {"own": self._added(call, out[self._x :]), **totals}, made

    def _for_input(self, call: _Call) -> tuple[Blocks, Blocks]:
        out = _there(self._actions.for_input).run(*self._taken(call, "residuals", "g"))
        totals, made = self._return(call, out[: self._x])
        left = dict(zip(self._actions.cut, out[self._x :], strict=True))
        return totals, {**made, "kept": [left[v] for v in self._signatures.writes(call.kind)]}

    def _for_weight(self, call: _Call) -> tuple[Blocks, Blocks]:
        out = _there(self._actions.for_weight).run(*self._taken(call, "residuals", "cut"))
        return {"own": self._added(call, out)}, {"kept": []}

    def _return(self, call: _Call, gradient: list[Any]) -> tuple[Blocks, Blocks]:
        """The way back of `_enter`, or the gradient as what is sent."""
        if not call.kind.first:
            return {}, {"sent": gradient, "kept": []}
        totals: Blocks = {}
        if self._step.keep_given:
            totals["given"] = put_rows(call.totals["given"], gradient, call.microbatch)
        if self._actions.first_backward is not None:
            run = self._actions.first_backward.run
            out = run(*call.values["first"], *self._of_batch(call, "microbatches"), *gradient)
            totals["first"] = add(call.totals["first"], out)
        return totals, {"kept": []}

    # --- blocks -----------------------------------------------------------------------------------

    def _given(self, call: _Call) -> list[Any]:
        """The parameters and extras that all programs of a stage take."""
        own = rows_at([x[0] for x in call.values["own"]], call.chunk)
        return [*own, *self._of_batch(call, "extras")]

    def _of_batch(self, call: _Call, name: str) -> list[Any]:
        """A microbatch of what is there for all of them."""
        return rows_at(call.values[name], call.microbatch)

    def _taken(self, call: _Call, *groups: str) -> list[Any]:
        """What a program of the backward pass takes; what it never looks at is zero."""
        uses = self._signatures.uses
        there = dict(zip(self._signatures.reads(call.kind), call.values["kept"], strict=True))
        numbers = {
            "residuals": self._actions.residuals,
            "g": [v for v, use in enumerate(uses) if use.made == "g"],
            "cut": self._actions.cut,
        }
        kept = [
            there[v] if v in there else jnp.zeros(uses[v].struct.shape, uses[v].struct.dtype)
            for group in groups
            for v in numbers[group]
        ]
        return [*self._given(call), *kept]

    def _added(self, call: _Call, terms: Sequence[Any]) -> list[Any]:
        """The gradients of the rank's own parameters, which have a dim of ranks too."""
        sums = add_to_row([x[0] for x in call.totals["own"]], terms, call.chunk)
        return [x[None] for x in sums]


def _there(program: LocalProgram | None) -> LocalProgram:
    assert program is not None, "a table with backwards has the programs for them"
    return program
