"""Channels: the ranks of a group, or a sender and its receiver, and the calls between them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["Channel", "Moment", "State"]

State = Literal["running", "done"]


class Moment(NamedTuple):
    """Where a rank is in the calls of a channel.

    Args:
      number: which call it is, from 1.
      text: the call, `all_reduce(ReduceOp.SUM) of float32[4]`; equal on all ranks.
      state: whether it runs still.
      since: `time.monotonic()` at its begin.
      timed: whether the caller waits with a time limit, and so needs no watchdog.
    """

    number: int
    text: str
    state: State
    since: float
    timed: bool = False

    def __str__(self) -> str:
        return f"call {self.number}, {self.text}"


@dataclass(eq=False, slots=True)
class Channel:
    """Calls that these ranks make together, in the same order on each.

    Args:
      ranks: the members, in the order of the group; of two, sender and receiver, if `pair`.
      pair: whether it carries messages from the first to the second.
      agreed: the calls that all members have agreed on.
      moment: where this rank is.
      failed: the number of the last call that has raised here.
    """

    ranks: tuple[int, ...]
    pair: bool = False
    agreed: set[str] = field(default_factory=set)
    moment: Moment = field(default_factory=lambda: Moment(0, "", "done", 0.0))
    failed: int = 0
    key: str = field(init=False)

    def __post_init__(self) -> None:
        name = f"{'to' if self.pair else 'group'}{self.ranks}"
        self.key = hashlib.sha256(name.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        if self.pair:
            return f"messages from rank {self.ranks[0]} to rank {self.ranks[1]}"
        shown = ", ".join(map(str, self.ranks[:16])) + (", ..." if len(self.ranks) > 16 else "")
        return f"ranks [{shown}]"
