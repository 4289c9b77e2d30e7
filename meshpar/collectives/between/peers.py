"""Which other ranks are still there: the line between a rank and rank 0 ends with either of them.

Rank 0 hears of all others and passes it on. A rank that ends its program says so first; one that
fails sends its error; of one that is killed only the end of its line tells.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, NoReturn

from meshpar.collectives.between.meeting import Line

__all__ = ["Departure", "Peers"]

_LINGER = 2.0  # seconds that rank 0 gives the others to end

How = Literal["died", "failed", "left"]


@dataclass(frozen=True, slots=True)
class Departure:
    """How a rank went away.

    Args:
      rank: who.
      how: "died" without a word, "failed" by an error, or "left" at the end of its program.
      text: the error.
      at: `time.monotonic()` when this process heard of it.
    """

    rank: int
    how: How
    text: str = ""
    at: float = 0.0

    def __str__(self) -> str:
        word = {"died": "died", "failed": "failed", "left": "has ended its program"}[self.how]
        return f"rank {self.rank} {word}" + (f": {self.text}" if self.text else "")


class Peers:
    """The other ranks of the job, and the thread that listens to them.

    Args:
      rank: this one.
      lines: on rank 0 to all others, elsewhere to rank 0; empty in a job of one.
    """

    def __init__(self, rank: int, lines: dict[int, Line]) -> None:
        self.rank = rank
        self.gone: dict[int, Departure] = {}
        self._lines = lines
        self._sending = threading.Lock()
        self._waker, self._wakes = socket.socketpair()
        self._closed = False
        self._left = False
        for line in lines.values():
            _keep_alive(line.socket)
        self._followed: SimpleQueue[Departure | None] = SimpleQueue()
        # Both from the beginning: a process that ends starts no thread any more (Python 3.12).
        self._threads = [
            threading.Thread(target=target, name=f"meshpar {name}", daemon=True)
            for name, target in (("peers", self._listen), ("ending", self._follow))
        ]
        for thread in self._threads:
            thread.start()

    def of(self, ranks: Sequence[int]) -> list[Departure]:
        """Those of `ranks` that have gone."""
        return [self.gone[r] for r in ranks if r in self.gone]

    def say(self, how: How, text: str = "") -> None:
        """Tells all others that this rank goes away."""
        self._left = how == "left"
        self._tell({"rank": self.rank, "how": how, "text": text[:2000]})

    def fail(self, last_words: str) -> NoReturn:
        """Ends this process at once, which says why, here and to the others.

        Python's own way out runs JAX's exit handler, which waits for processes that may be waiting
        for this one. Without rank 0 JAX ends the others, so that it lets them go first.
        """
        # First here: once the others go, this process's own call may break off and end it.
        print(f"meshpar: rank {self.rank} ends: {last_words}", file=sys.stderr, flush=True)
        self.say("failed", last_words)
        until = time.monotonic() + _LINGER
        while self.rank == 0 and len(self.gone) < len(self._lines) and time.monotonic() < until:
            time.sleep(0.01)
        _end()

    def close(self) -> None:
        """Stops listening, and ends the lines."""
        self._closed = True
        self._waker.send(b"x")
        self._followed.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
        for line in self._lines.values():
            line.close()
        self._waker.close()
        self._wakes.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakes, selectors.EVENT_READ)
            for rank, line in self._lines.items():
                selector.register(line.socket, selectors.EVENT_READ, (rank, line))
            while not self._closed:
                for key, _ in selector.select():
                    if key.data is not None and not self._hear(*key.data):
                        selector.unregister(key.fileobj)

    def _hear(self, rank: int, line: Line) -> bool:
        """Takes in what a line says; whether it says more."""
        try:
            messages = line.receive()
        except ValueError:
            messages = None
        if messages is None:
            self._note({"rank": rank, "how": "died", "text": ""})
            return False
        for message in messages:
            self._note(message)
        return True

    def _note(self, message: dict[str, Any]) -> None:
        departure = Departure(message["rank"], message["how"], message["text"], time.monotonic())
        if departure.rank in self.gone or self._closed:
            return  # the end of a line that follows the farewell
        self.gone[departure.rank] = departure
        if self.rank == 0:
            self._tell(message)
        elif departure.rank == 0 and departure.how != "left":
            # JAX, whose service is gone with it, would abort this process with a stack trace.
            print(f"meshpar: rank {self.rank} ends: {departure}", file=sys.stderr)
            _end()
        if self._left and departure.how != "left":
            # JAX's exit handler waits here for all others, for minutes where one has failed.
            self._followed.put(departure)

    def _follow(self) -> None:
        departure = self._followed.get()
        if departure is not None:
            self.fail(str(departure))

    def _tell(self, message: dict[str, Any]) -> None:
        with self._sending:
            for line in self._lines.values():  # to those, too, that wait at their end for JAX
                line.send(message)


def _keep_alive(connection: socket.socket) -> None:
    """Lets the line end within half a minute when the other machine loses power."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
    for name, value in options.items():
        if hasattr(socket, name):  # not all systems have all of them
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    os.set_inheritable(connection.fileno(), False)


def _end() -> NoReturn:
    """Ends this process as failed, without exit handlers; what was printed is kept."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
