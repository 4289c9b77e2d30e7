"""Channels: the ranks of a group, or a sender and its receiver, and the calls between them."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from meshpar._jax import is_ready

__all__ = ["Channel", "Moment", "Open", "Past"]

_KEPT = 1 << 14  # calls: more than are made between two looks of the watchdog


class Moment(NamedTuple):
    """A call of a channel.

    Args:
      number: which one it is, from 1.
      text: the call, `all_reduce(ReduceOp.SUM) of float32[4]`; equal on all ranks.
      since: `time.monotonic()` at its begin.
      until: `time.monotonic()` when the caller, which waits in this thread, gives up.
    """

    number: int
    text: str
    since: float = 0.0
    until: float | None = None

    def __str__(self) -> str:
        return f"call {self.number}, {self.text}"


class Past(NamedTuple):
    """A call that was agreed on.

    Args:
      number, text: as of its `Moment`.
      digest: of its text and those of all before it.
    """

    number: int
    digest: int
    text: str


@dataclass(eq=False, slots=True)
class Open:
    """A call that has not ended.

    Args:
      moment: which one.
      timed: whether somebody waits for it with a time limit, and so it needs no watchdog.
      result: the first of its arrays, once its program is started and nobody may be waiting.
    """

    moment: Moment
    timed: bool = False
    result: jax.Array | None = None


@dataclass(eq=False, slots=True)
class Channel:
    """Calls that these ranks make together, in the same order on each.

    Args:
      ranks: the members, in the order of the group; of two, sender and receiver, if `pair`.
      pair: whether it carries messages from the first to the second.
      agreed: the calls that all members have agreed on; text -> a number for it.
      moment: the last call that was begun here.
      open: number -> call, of those that have not ended.
      failed: the number of the last call that has raised here.
      past: the last calls that were agreed on, by all members in this order.
      given_up: whether a caller has stopped waiting for a call, which is still there to meet.
    """

    ranks: tuple[int, ...]
    pair: bool = False
    agreed: dict[str, int] = field(default_factory=dict)
    moment: Moment = field(default_factory=lambda: Moment(0, ""))
    open: dict[int, Open] = field(default_factory=dict)
    failed: int = 0
    past: deque[Past] = field(default_factory=lambda: deque(maxlen=_KEPT))
    given_up: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        name = f"{'to' if self.pair else 'group'}{self.ranks}"
        self.key = hashlib.sha256(name.encode()).hexdigest()[:16]

    def begin(self, text: str, timeout: float | None, *, gives_up: bool) -> Open:
        """The next call.

        Args:
          text: as of `Moment`.
          timeout: seconds, where its caller waits with a limit.
          gives_up: whether it stops waiting in this thread when they are over.
        """
        now = time.monotonic()
        until = now + timeout if gives_up and timeout is not None else None
        self.moment = Moment(self.moment.number + 1, text, now, until)
        call = Open(self.moment, timeout is not None)
        self.open[self.moment.number] = call
        return call

    def agree(self, text: str) -> None:
        """Notes that all members make the same of a call with this text."""
        self.agreed[text] = zlib.crc32(text.encode())

    def remember(self, moment: Moment) -> None:
        """Notes a call that was agreed on, now or before."""
        past = self.past
        before = past[-1].digest if past else 0
        digest = (before * 31 + self.agreed[moment.text]) & 0xFFFFFFFFFFFF
        past.append(Past(moment.number, digest, moment.text))

    def end(self, call: Open) -> None:
        """Notes that a call has ended."""
        self.open.pop(call.moment.number, None)

    def settle(self) -> None:
        """Ends the calls whose result is there, though nobody has asked for it."""
        for call in list(self.open.values()):
            if call.result is not None and is_ready(call.result):
                self.end(call)

    @property
    def state(self) -> str:
        """Whether the last call still runs."""
        return "running" if self.moment.number in self.open else "done"

    def __str__(self) -> str:
        if self.pair:
            return f"messages from rank {self.ranks[0]} to rank {self.ranks[1]}"
        shown = ", ".join(map(str, self.ranks[:16])) + (", ..." if len(self.ranks) > 16 else "")
        return f"ranks [{shown}]"
