"""The exceptions that meshpar raises for a user's mistake, and the form of their messages.

A message names the call and the argument, shows the values that disagree, says which law fails with
the numbers, and ends with code that works:

    PlacementError: reshard(h): Shard(2) is out of range.
      h           float32[12, 64]
      placements  [Shard(0), Shard(2)]: mesh axis 'tp' asks for tensor dim 2
      because     h has 2 dims, so Shard takes -2, -1, 0 or 1
      instead     [Shard(0), Shard(1)]

Inner functions raise a short reason; the public function that the user called adds the rest, by
`within`.
"""

from __future__ import annotations

from typing import Self


class MeshparError(ValueError):
    """Base of every error that meshpar raises for a value it cannot accept.

    Args:
      headline: what is wrong, as a sentence.
      facts: label -> value, shown in the order given; `None` leaves the line out.
    """

    def __init__(self, headline: str, /, **facts: object) -> None:
        super().__init__(message(headline, **facts))
        self.headline, self.facts = headline, facts

    def within(self, call: str, **facts: object) -> Self:
        """The same error seen from the function that the user called.

        Args:
          call: that function, with the argument at fault where it is known.
          facts: its arguments, shown before what the inner function said.
        """
        return type(self)(f"{call}: {self.headline}", **{**facts, **self.facts})


class MeshError(MeshparError):
    """A mesh that cannot be built, or that does not have what is asked of it."""


class PlacementError(MeshparError):
    """Placements that do not fit their tensor or their mesh."""


class DistTensorError(MeshparError):
    """An operation outside `mp.jit` that would compute on storage instead of the value."""


class CollectiveError(MeshparError):
    """A collective whose arguments do not fit its group, or that has no ranks to run between."""


class CollectiveTimeout(CollectiveError):
    """A collective between processes to which not all ranks have come in time."""


class PeerError(CollectiveError):
    """A collective between processes one of which is not there any more."""


def message(headline: str, /, **facts: object) -> str:
    """Lays out an error message: a headline, then one aligned line a fact.

    Args:
      headline: call, argument and what is wrong, as a sentence.
      facts: label -> value, shown in the order given; `None` leaves the line out.

    Returns:
      The text to raise an exception with.

    Example:
      >>> print(message("reshard(x): Shard(2) is out of range.", because="x has 2 dims"))
      reshard(x): Shard(2) is out of range.
        because  x has 2 dims
    """
    shown = {label: str(fact) for label, fact in facts.items() if fact is not None}
    width = max((len(label) for label in shown), default=0)
    lines = [f"  {label:<{width}}  {fact}" for label, fact in shown.items()]
    return "\n".join([headline, *lines])
