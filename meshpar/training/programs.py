"""The compiled programs of a `DistModel`: one per mode and kind of batch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled, Lowered

from meshpar.compiler.plan import Plan
from meshpar.training.backends import build
from meshpar.training.by_rank import StepByRank
from meshpar.training.state import Arrays, Slots
from meshpar.training.step import Recipe, State

__all__ = ["MODES", "Program", "Programs", "RecompileWarning", "whole_program"]

MODES = ("train", "eval", "predict")


class RecompileWarning(UserWarning):
    """A batch of a new shape or placement made a mode compile once more."""


@dataclass(frozen=True, slots=True)
class Program:
    """One compiled program and what it was compiled from."""

    batch: Slots
    lowered: Lowered
    compiled: Compiled
    finish: Callable[[Any], Any]
    plan: Plan | None

    def __call__(self, state: State, arrays: Arrays) -> Any:
        """Runs it; see `backends.Built`."""
        return self.compiled(state, arrays)


Runnable = Program | StepByRank


class Programs:
    """Compiles each program once, and remembers the last one of each mode."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._programs: dict[tuple[str, Slots], Runnable] = {}
        self._last: dict[str, Runnable] = {}

    def counts(self) -> dict[str, int]:
        """Mode -> how many programs were compiled for it."""
        counts = Counter(mode for mode, _ in self._programs)
        return {mode: counts[mode] for mode in MODES}

    def of(self, mode: str, batch: Slots, state: State, arrays: Arrays) -> Runnable:
        """The program of a mode for a kind of batch, compiled if it was not yet."""
        found = self._programs.get((mode, batch))
        if found is None:
            if mode in self._last:
                before, now = _shapes(self._last[mode].batch), _shapes(batch)
                warnings.warn(
                    f"DistModel in mode {mode!r} compiles once more, for a batch of {now}; the "
                    f"last one was {before}. Batches of one shape and placement compile once.",
                    RecompileWarning,
                    stacklevel=3,
                )
            found = build(self._recipe, mode, batch)
            if not isinstance(found, StepByRank):
                lowered = found.program.lower(state, arrays)
                found = Program(batch, lowered, lowered.compile(), found.finish, found.plan)
            self._programs[mode, batch] = found
        self._last[mode] = found
        return found

    def last(self, mode: str) -> Runnable:
        """The last program of a mode.

        Raises:
          ValueError: no such mode, or it has not run.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: the modes are 'train', 'eval' and 'predict'")
        if mode not in self._last:
            raise ValueError(
                f"DistModel in mode {mode!r} has not run yet, so there is no program: call it, or "
                "give a batch (jax.ShapeDtypeStructs will do) to lower() or compiled_text()"
            )
        return self._last[mode]


def whole_program(found: Runnable, asked: str) -> Program:
    """What runs a mode, if it is one program.

    Args:
      found: what runs it.
      asked: what asks.

    Raises:
      NotImplementedError: it is many programs.
    """
    if isinstance(found, StepByRank):
        raise NotImplementedError(
            f"DistModel.{asked} with Strategy.pipeline.executor = 'mpmd': a step in mode "
            f"{found.mode!r} is a program for each action of each rank, and {asked} is of one "
            "program; Strategy.pipeline.executor = 'program' makes one that computes the same"
        )
    return found


def _shapes(batch: Slots) -> str:
    parts = (
        f"{slot.name or 'batch'} {slot.shape} {slot.layout.placements(batch.mesh)}"
        for slot in batch.leaves
    )
    return ", ".join(parts)
