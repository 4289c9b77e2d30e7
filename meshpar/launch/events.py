"""What happens to a launcher, and how ranks end."""

from __future__ import annotations

import queue
import re
import signal
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Ended",
    "Event",
    "Events",
    "Exited",
    "Failure",
    "Interrupted",
    "Signalled",
    "Stop",
    "Told",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank that failed first, and how.

    Args:
      rank: the rank.
      code: its exit code, or minus the signal that ended it, as in `subprocess`.
      seconds: how long it ran.
      tail: the end of its log.
      log: where all of it is.
    """

    rank: int
    code: int
    seconds: float
    tail: str
    log: str

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would give: 128 + the signal for one that was killed."""
        return self.code if self.code > 0 else 128 - self.code

    @property
    def is_survivor(self) -> bool:
        """Whether it ended because another rank did: `init_parallel_env` makes it say so."""
        words = f"meshpar: rank {self.rank} ends: "
        last = next((x for x in reversed(self.tail.splitlines()) if x.startswith(words)), "")
        return bool(re.search(r"\brank \d+ (failed|died)|: PeerError", last))

    @property
    def how(self) -> str:
        """In words."""
        if self.code > 0:
            return f"exit code {self.code}"
        return f"killed by {signal.Signals(-self.code).name}"

    def __str__(self) -> str:
        tail = "\n".join(f"    {line}" for line in self.tail.splitlines()) or "    (nothing)"
        return (
            f"rank {self.rank} failed first: {self.how} after {self.seconds:.1f} s. The end of "
            f"{self.log}:\n{tail}"
        )


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank has ended; it is not reaped yet, so that its number still means its process group."""

    pid: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher got a signal."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ranks of another node have failed in the run of that number."""

    restart: int


@dataclass(frozen=True, slots=True)
class Told:
    """Node 0 has sent a message; `None` when it has gone."""

    message: dict[str, Any] | None  # of JSON's types


Event = Exited | Signalled | Stop | Told
Events = queue.SimpleQueue[Event]


class Interrupted(Exception):
    """A signal came while the launcher waited for other nodes."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} while waiting for other nodes")
        self.number = number


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of this node ended.

    Args:
      failure: the first that failed, if any did before it was told to end.
      signal: the signal that the launcher was sent, if any.
    """

    failure: Failure | None
    signal: int | None

    @property
    def text(self) -> str:
        """What failed first, if anything did."""
        return "" if self.failure is None else str(self.failure)

    @property
    def exit_code(self) -> int:
        """The exit code of the job on this node."""
        if self.failure is None:
            return 0
        # Killed after a signal to the launcher: it is that signal which ended it.
        killed = self.signal is not None and self.failure.code < 0
        return 128 + (self.signal or 0) if killed else self.failure.exit_code
