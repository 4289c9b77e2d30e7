"""The nodes of a job as one launcher sees them: itself alone, or with those of other machines."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from meshpar.launch.events import Ended, Events, Interrupted, Signalled, Stop, Told
from meshpar.launch.line import Line, Message
from meshpar.launch.meeting_place import MeetingPlace
from meshpar.launch.options import Options
from meshpar.launch.ports import free_ports, held_port
from meshpar.launch.team import Team

__all__ = ["Party", "Verdict", "party"]

_LOG = logging.getLogger("meshpar.launch")
_SPEAK_AFTER = 30.0  # seconds
_GIVE_UP_AFTER = 900.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comes after a run.

    Args:
      again: whether the job starts again.
      code: the exit code of the job.
      text: what failed first, if anything did.
    """

    again: bool
    code: int
    text: str


class Party(Protocol):
    """The nodes of a job."""

    def gather(self, restart: int, count: int, stack: ExitStack) -> Team:
        """Waits for the nodes of a run.

        Args:
          restart: the number of the run.
          count: the ranks of this node.
          stack: holds the run's ports.
        """
        ...

    def settle(self, ended: Ended) -> Verdict:
        """Tells the others how the ranks of this node ended, and waits for theirs."""
        ...


@contextlib.contextmanager
def party(options: Options, events: Events) -> Iterator[Party]:
    """The nodes that a job asks for.

    Raises:
      OSError: node 0 cannot listen at `--master`, or nobody listens there.
      Interrupted: a signal came while waiting for them.
    """
    if options.nnodes[1] == 1:
        yield Alone(options)
        return
    assert options.master is not None, "parse_options asks for it"
    host, _, port = options.master.rpartition(":")
    listener = _listener(options.rank, host.strip("[]"), int(port))
    place = None if listener is None else MeetingPlace(options, listener)
    try:
        line = _joined(host.strip("[]"), int(port), events)
        try:
            yield Several(options, events, line, is_first=place is not None)
        finally:
            line.close()
    finally:
        if place is not None:
            place.close()


class Alone:
    """One node."""

    def __init__(self, options: Options) -> None:
        self._options, self._restart = options, 0

    def gather(self, restart: int, count: int, stack: ExitStack) -> Team:
        """The ranks of this node."""
        self._restart = restart
        host, _, port = (self._options.master or "127.0.0.1:0").rpartition(":")
        port = stack.enter_context(held_port(host.strip("[]"), int(port)))
        endpoints = _endpoints(self._options, host, count)
        job, most = self._options.job_id, self._options.max_restart
        return Team(job, restart, most, f"{host}:{port}", tuple(endpoints), (count,))

    def settle(self, ended: Ended) -> Verdict:
        """Starts again after a failure, unless it was a signal or there were restarts enough."""
        again = (
            ended.failure is not None
            and ended.signal is None
            and self._restart < self._options.max_restart
        )
        return Verdict(again, ended.exit_code, ended.text)


class Several:
    """Nodes that meet at node 0."""

    def __init__(self, options: Options, events: Events, line: Line, *, is_first: bool) -> None:
        self._options, self._events, self._line = options, events, line
        self._rank = 0 if is_first and options.rank < 0 else options.rank

    def gather(self, restart: int, count: int, stack: ExitStack) -> Team:
        """Says that this node is ready, and waits to be told the team."""
        own = self._line.connection.getsockname()[0]  # the address that node 0 sees
        host = self._options.host or own
        host = f"[{host}]" if ":" in host else host
        port = stack.enter_context(held_port(own, 0))
        ready = {
            "job_id": self._options.job_id,
            "rank": self._rank,
            "coordinator": f"{host}:{port}",
            "endpoints": _endpoints(self._options, host, count),
        }
        self._line.send({"ready": ready})
        said = self._hear("team")
        return Team(
            self._options.job_id,
            said["restart"],
            self._options.max_restart,
            said["coordinator"],
            tuple(said["endpoints"]),
            tuple(said["nodes"]),
            said["node"],
        )

    def settle(self, ended: Ended) -> Verdict:
        """Tells node 0 and waits for its verdict."""
        interrupted = ended.signal is not None
        said = {"code": ended.exit_code, "text": ended.text, "interrupted": interrupted}
        self._line.send({"ended": said})
        return Verdict(**self._hear("verdict"))

    def _hear(self, what: str) -> Message:
        """The next message of a kind.

        Raises:
          ConnectionError: node 0 has gone, or does not want this node.
          Interrupted: a signal came first.
        """
        while True:
            match self._events.get():
                case Signalled(number):
                    raise Interrupted(number)
                case Told(None):
                    raise ConnectionError("node 0 has gone, its launcher with it")
                case Told(message) if message is not None:
                    if "error" in message:
                        raise ConnectionError(f"node 0 says: {message['error']}")
                    if "verdict" in message and what == "team":
                        raise ConnectionError(message["verdict"]["text"] or "the job is over")
                    if what in message:
                        return message[what]
                case _:  # ranks that have ended already
                    continue


def _endpoints(options: Options, host: str, count: int) -> list[str]:
    first = options.start_port
    ports = free_ports("", count) if first is None else range(first, first + count)
    return [f"{host}:{port}" for port in ports]


def _listener(rank: int, host: str, port: int) -> socket.socket | None:
    """The socket to meet at, if this is node 0."""
    if rank > 0:
        return None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(found[4][0]), port), family=found[0], backlog=1024)
    except OSError as error:
        if rank < 0:
            return None  # another machine's address, or another launcher of this one was first
        raise OSError(f"node 0 cannot listen at --master {host}:{port}: {error}") from None


def _joined(host: str, port: int, events: Events) -> Line:
    """The connection to node 0, which may not be there yet."""

    def receive(line: Line, message: Message | None) -> None:
        stop = message is not None and "stop" in message
        events.put(Stop(message["stop"]) if message and stop else Told(message))

    began, spoken = time.monotonic(), False
    while True:
        try:
            return Line(socket.create_connection((host, port), timeout=5), receive)
        except OSError as error:
            waited = time.monotonic() - began
            if waited > _GIVE_UP_AFTER:
                raise OSError(
                    f"nobody listens at --master {host}:{port} since {waited:.0f} s: {error}"
                ) from None
            if waited > _SPEAK_AFTER and not spoken:
                spoken = True
                _LOG.warning("waiting for node 0 at %s:%d: %s", host, port, error)
        with contextlib.suppress(IndexError):
            if not events.empty():  # before there are ranks, signals only
                event = events.get()
                if isinstance(event, Signalled):
                    raise Interrupted(event.number)
        time.sleep(0.2)
