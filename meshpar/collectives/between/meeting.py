"""Where processes meet before `jax.distributed` starts, so that a missing one has a name.

Rank 0 listens at the master's port. Each other rank connects and says who it is; rank 0 answers
with who is missing, again whenever that changes, and at last that all are there. JAX's own start-up
ends the process when a rank does not come, and cannot say which.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshpar.errors import CollectiveError

__all__ = ["Line", "loopback", "meet"]

_MAGIC = "meshpar 1"
_LONGEST = 1 << 16  # bytes of a message, so that a stranger cannot fill the memory
_SPEAK_AFTER = 30.0  # seconds until a rank says on the terminal whom it waits for
_PORT_PATIENCE = 5.0  # seconds for a port that an earlier job is just leaving


@dataclass(slots=True)
class Line:
    """A connection that carries one JSON object a line."""

    socket: socket.socket
    buffer: bytearray = field(default_factory=bytearray)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message; whether the other side was still there to take it."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Reads what is there, waiting for some of it; `None` once the other side has gone.

        Raises:
          ValueError: it is no message of a meshpar process.
        """
        try:
            data = self.socket.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, rest = (bytes(self.buffer) + data).split(b"\n")
        if len(rest) > _LONGEST:
            raise ValueError("a line without an end")
        self.buffer = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line that holds no object")
        return messages

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def meet(
    address: str, rank: int, size: int, timeout: float, *, held: bool = False
) -> dict[int, Line]:
    """Waits until all ranks of a job have come to `address`.

    Args:
      address: `host:port`, the same on all ranks, where rank 0 listens meanwhile.
      rank: who this process is.
      size: how many there are.
      timeout: seconds.
      held: whoever started the ranks holds the port for them, with SO_REUSEPORT.

    Returns:
      On rank 0 the lines to all others, elsewhere the one to rank 0.

    Raises:
      CollectiveError: not all came in time (it names the missing ones), two came as one rank, they
        disagree about their number, or the port is taken.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CollectiveError(
            "init_parallel_env(): the master's address is no host:port.", because=repr(address)
        )
    where = (host.strip("[]"), int(port))
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _Reception(where, size, deadline, timeout).run(held=held)
    return {0: _join(where, rank, size, deadline, timeout)}


def loopback(host: str) -> bool:
    """Whether a host name means this machine only."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


class _Reception:
    """Rank 0's side: takes the others in until they are complete."""

    def __init__(self, where: tuple[str, int], size: int, deadline: float, timeout: float) -> None:
        self.where, self.size, self.deadline, self.timeout = where, size, deadline, timeout
        self.present: dict[int, Line] = {}
        self.selector = selectors.DefaultSelector()

    def run(self, *, held: bool) -> dict[int, Line]:
        listener = _listen(self.where, min(self.timeout, _PORT_PATIENCE), held=held)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        speak_at = time.monotonic() + _SPEAK_AFTER
        try:
            while len(self.present) < self.size - 1:
                now = time.monotonic()
                if now > self.deadline:
                    self._fail(_missing_message(self.missing(), self.size, self.timeout))
                if now > speak_at:
                    _say(0, self.missing(), self.where)
                    speak_at = self.deadline + 1
                for key, _ in self.selector.select(min(0.5, max(self.deadline - now, 0.01))):
                    self._take(key, listener)
        finally:
            listener.close()
            self.selector.close()
        for line in self.present.values():
            line.socket.setblocking(True)
            line.send({"magic": _MAGIC, "complete": True})
        return self.present

    def missing(self) -> list[int]:
        return [r for r in range(1, self.size) if r not in self.present]

    def _take(self, key: selectors.SelectorKey, listener: socket.socket) -> None:
        if key.fileobj is listener:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                connection.setblocking(False)
                self.selector.register(connection, selectors.EVENT_READ, Line(connection))
            return
        line: Line = key.data
        try:
            messages = line.receive()
            heard = None if messages is None else [_checked(m) for m in messages]
        except ValueError:  # a stranger, such as a port scanner: it does not belong here
            heard = None
        if heard is None:
            self.selector.unregister(line.socket)
            line.close()
            self.present = {r: other for r, other in self.present.items() if other is not line}
            return
        for message in heard:
            self._greet(int(message["rank"]), int(message["size"]), line)

    def _greet(self, rank: int, size: int, line: Line) -> None:
        if size != self.size:
            self._fail(
                f"rank 0 was told of {self.size} processes, rank {rank} of {size}; "
                "PADDLE_TRAINERS_NUM must be the same on all",
                [line],
            )
        if rank in self.present or not 0 < rank < size:
            self._fail(f"two processes say that they are rank {rank}", [line])
        self.present[rank] = line
        for other in self.present.values():
            other.send({"magic": _MAGIC, "missing": self.missing()})

    def _fail(self, because: str, others: Sequence[Line] = ()) -> None:
        for line in (*self.present.values(), *others):
            line.send({"magic": _MAGIC, "failed": because})
            line.close()
        raise _failed(because, self.where)


def _listen(where: tuple[str, int], patience: float, *, held: bool) -> socket.socket:
    host, port = where
    bound = host if loopback(host) else ""
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_server((bound, port), family=family, backlog=1024, reuse_port=held)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            if taken and time.monotonic() < until:
                time.sleep(0.1)
                continue
            because = "another program listens there" if taken else str(error)
            raise _failed(f"rank 0 cannot listen at port {port}: {because}", where) from None


def _join(where: tuple[str, int], rank: int, size: int, deadline: float, timeout: float) -> Line:
    """The other ranks' side: finds rank 0 and waits for its word."""
    wait = _Wait(where, rank, deadline)
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(where, timeout=min(5.0, timeout))
        except OSError:
            time.sleep(0.1)
            continue
        line = Line(connection)
        complete = False
        try:
            line.send({"magic": _MAGIC, "rank": rank, "size": size})
            complete = wait.until_complete(line)
        finally:
            if not complete:
                line.close()
        if complete:
            connection.settimeout(None)
            return line
        time.sleep(0.1)  # rank 0 has gone; it may come again
    raise _failed(_missing_message(wait.missing, size, timeout), where)


@dataclass(slots=True)
class _Wait:
    """What a rank other than 0 hears until all are there."""

    where: tuple[str, int]
    rank: int
    deadline: float
    missing: list[int] = field(default_factory=lambda: [0])
    speak_at: float = field(default_factory=lambda: time.monotonic() + _SPEAK_AFTER)

    def until_complete(self, line: Line) -> bool:
        """Whether all came, before the time was over or rank 0 went."""
        line.socket.settimeout(0.5)
        while time.monotonic() < self.deadline:
            try:
                messages = line.receive()
                heard = None if messages is None else [_checked(m) for m in messages]
            except ValueError:
                raise _failed("what answers there is no meshpar process", self.where) from None
            if heard is None:
                return False
            for message in heard:
                if "failed" in message:
                    raise _failed(message["failed"], self.where)
                if "complete" in message:
                    return True
                self.missing = message["missing"]
            if time.monotonic() > self.speak_at:
                _say(self.rank, self.missing, self.where)
                self.speak_at = self.deadline + 1
        return False


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("magic") != _MAGIC or not message.keys() & {
        "rank",
        "missing",
        "failed",
        "complete",
    }:
        raise ValueError("no message of a meshpar process")
    return message


def _say(rank: int, missing: Sequence[int], where: tuple[str, int]) -> None:
    print(
        f"meshpar: rank {rank} is at {where[0]}:{where[1]} and waits for {_named(missing)}",
        file=sys.stderr,
        flush=True,
    )


def _missing_message(missing: Sequence[int], size: int, timeout: float) -> str:
    return f"{_named(missing)} of {size} did not come within {timeout:g} s"


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _failed(because: str, where: tuple[str, int]) -> CollectiveError:
    return CollectiveError(
        "init_parallel_env(): the processes could not meet.",
        master=f"{where[0]}:{where[1]}",
        because=because,
    )
