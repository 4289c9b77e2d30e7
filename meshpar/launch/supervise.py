"""Starts the ranks of one node, waits for them, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshpar.launch.events import Ended, Event, Events, Exited, Failure, Signalled, Stop, Told
from meshpar.launch.guard import Guard
from meshpar.launch.logs import RankLog

__all__ = ["Start", "supervise"]


# What schedulers leave a job between SIGTERM and SIGKILL. JAX's own handler of SIGTERM lets a rank
# run on that does not ask for it.
_TERM_SECONDS = 30.0
# A rank that fails tells the others, who may be gone before it is.
_CAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """How a rank is started: its number, command, environment and log."""

    rank: int
    command: Sequence[str]
    environ: Mapping[str, str]
    log: RankLog


def supervise(
    starts: Sequence[Start], restart: int, events: Events, guard: Guard, grace: float
) -> Ended:
    """Runs the ranks until all have ended.

    Args:
      starts: the ranks.
      restart: the number of the run.
      events: where signals and other nodes' failures arrive.
      guard: it ends the ranks should this process be killed.
      grace: seconds between SIGTERM and SIGKILL for ranks that are to end.
    """
    ranks = _Ranks(restart, events, guard, grace)
    try:
        for start in starts:
            ranks.start(start)
        while ranks.alive:
            ranks.handle(ranks.next_event())
    finally:
        ranks.kill()
    return Ended(ranks.failure, ranks.signal)


class _Ranks:
    def __init__(self, restart: int, events: Events, guard: Guard, grace: float) -> None:
        self._restart = restart
        self._events, self._guard, self._grace = events, guard, grace
        self.alive: dict[int, tuple[Start, subprocess.Popen[bytes], float]] = {}
        self.failure: Failure | None = None
        self.signal: int | None = None
        self._signals = 0
        self._stopping = self._is_elsewhere = False
        self._deadline: float | None = None
        self._then: Callable[[], None] = self._kill

    def start(self, start: Start) -> None:
        with start.log.path.open("ab") as log:
            process = subprocess.Popen(
                start.command,
                env=dict(start.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children end with it, and Ctrl-C comes from here only
            )
        self._guard.add(process.pid)
        self.alive[process.pid] = (start, process, time.monotonic())
        threading.Thread(target=self._wait, args=(process.pid,), daemon=True).start()

    def _wait(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):  # it was killed and reaped meanwhile
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._events.put(Exited(pid))

    def next_event(self) -> Event | None:
        """The next event, or `None` when the time of those that are to end is over."""
        if self._deadline is None:
            return self._events.get()
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=max(self._deadline - time.monotonic(), 0))
        return None

    def handle(self, event: Event | None) -> None:
        match event:
            case None:
                self._deadline = None
                self._then()
            case Exited(pid):
                if pid in self.alive:
                    self._ended(pid)
            case Signalled(number):
                self._forward(number)
            case Stop(restart):
                if restart == self._restart:  # and not about one that is over
                    self._is_elsewhere = self.failure is None
                    self._stop()
            case Told(None):
                self._is_elsewhere = self.failure is None
                self._stop()
                self._events.put(event)  # for those that wait for node 0 next
            case Told():
                pass

    def _ended(self, pid: int) -> None:
        start, process, began = self.alive.pop(pid)
        seconds = time.monotonic() - began
        code = self._reap(process)
        by_us = self._stopping and code in (-signal.SIGTERM, -signal.SIGKILL)
        if code == 0 or by_us or self._is_elsewhere:
            return
        tail = start.log.tail(20)
        failure = Failure(start.rank, code, seconds, tail, str(start.log.path))
        if self.failure is not None:
            if self.failure.is_survivor and not failure.is_survivor:
                self.failure = failure
                self._stop()
            return
        self.failure = failure
        if self.signal is not None:  # the others are ending too
            self._after(self._grace, self._kill)
        elif failure.is_survivor:
            self._after(_CAUSE_SECONDS, self._stop)
        else:
            self._stop()

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self._deadline, self._then = time.monotonic() + seconds, then

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._send(signal.SIGTERM)
            self._after(self._grace, self._kill)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)

    def _forward(self, number: int) -> None:
        """Two signals are passed on, as a script may take the first one as a request."""
        self._signals += 1
        self.signal = self.signal or number
        self._send(number if self._signals <= 2 else signal.SIGKILL)
        if number == signal.SIGTERM:
            self._after(max(self._grace, _TERM_SECONDS), self._kill)

    def _send(self, number: int) -> None:
        for _, process, _ in self.alive.values():
            _signal_group(process.pid, number)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        _signal_group(process.pid, signal.SIGKILL)  # children that the rank left behind
        code = process.wait()
        self._guard.remove(process.pid)
        return code

    def kill(self) -> None:
        """Ends what is alive, at once."""
        for pid in [*self.alive]:
            self._reap(self.alive.pop(pid)[1])


def _signal_group(group: int, number: int) -> None:
    # A process that is not reaped keeps its number, so this is never another's group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
