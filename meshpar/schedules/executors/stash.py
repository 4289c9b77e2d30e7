"""What a rank keeps between the actions of the `mpmd` executor, as long as the table says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshpar.schedules.actions import Action
from meshpar.schedules.executors.signatures import Kind, Signatures

__all__ = ["Stash"]


class Stash:
    """The values of one rank, by number, chunk and microbatch; a value that is dropped is freed.

    Args:
      signatures: what actions take and make.
    """

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self.values: dict[tuple[int, int, int], Any] = {}

    def put(self, made: str, chunk: int, microbatch: int, arrays: Sequence[Any]) -> None:
        """Keeps an input (`"x"`) or the gradient of an output (`"g"`)."""
        numbers = [v for v, use in enumerate(self._signatures.uses) if use.made == made]
        for number, array in zip(numbers, arrays, strict=True):
            self.values[number, chunk, microbatch] = array

    def taken(self, kind: Kind, action: Action) -> list[Any]:
        """What an action takes."""
        at = action.chunk, action.microbatch
        return [self.values[v, *at] for v in self._signatures.reads(kind)]

    def after(self, kind: Kind, action: Action, made: Sequence[Any]) -> None:
        """Keeps what an action made, and drops what nothing takes any more."""
        at = action.chunk, action.microbatch
        for number, array in zip(self._signatures.writes(kind), made, strict=True):
            self.values[number, *at] = array
        for number in self._signatures.ended(kind):
            del self.values[number, *at]
