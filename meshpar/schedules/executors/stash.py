"""What a rank keeps between the actions of the `mpmd` executor, as long as the table says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshpar.schedules.actions import Action
from meshpar.schedules.executors.signatures import Blocks, Kind, Signatures

__all__ = ["Stash"]


class Stash:
    """The values of one rank. Dropping the last reference is what frees one.

    Args:
      signatures: what actions take and make.
    """

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self.values: dict[tuple[str, int, int], dict[int, Any]] = {}

    def put(self, name: str, chunk: int, microbatch: int, arrays: Sequence[Any]) -> None:
        """Keeps an input `x` or a gradient `g`."""
        self.values[name, chunk, microbatch] = dict(enumerate(arrays))

    def taken(self, kind: Kind, action: Action) -> Blocks:
        """What an action takes of what is kept."""
        out: Blocks = {}
        for name in self._signatures.takes(kind):
            if name in ("x", "g", "F", "I"):
                values = self.values[name, action.chunk, action.microbatch]
                out[name] = [values[k] for k in self._signatures.kept(kind, name)]
        return out

    def after(self, kind: Kind, action: Action, made: Blocks) -> None:
        """Keeps what an action made, and lets go of what nothing takes any more."""
        at = action.chunk, action.microbatch
        for name in set(made) & {"F", "I"}:
            kept = self._signatures.kept(kind, name)
            self.values[name, *at] = dict(zip(kept, made[name], strict=True))
        if kind.op == "F":
            x = self.values.pop(("x", *at), {})
            if "F" in made:
                passed = self._signatures.passed(kind)
                self.values["F", *at] |= {k: x[position] for k, position in passed}
            return
        for name in {"B": "gF", "I": "g", "W": "FI"}[kind.op]:
            self.values.pop((name, *at), None)
        if kind.op == "I":
            kept = self.values.pop(("F", *at))
            later = self._signatures.kept(Kind("W", kind.first, kind.last), "F")
            self.values["F", *at] = {k: kept[k] for k in later}
