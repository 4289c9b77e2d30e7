"""Where the launchers of several nodes meet: a thread in that of node 0.

Each launcher says when it is ready to start ranks. Once enough are there, each is told the team.
When ranks of a node fail, or a node goes away, the others are told to stop; when all have stopped,
all are told whether to start again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from dataclasses import dataclass, field

from meshpar.launch.line import Line, Message
from meshpar.launch.options import Options

__all__ = ["MeetingPlace"]

_LOG = logging.getLogger("meshpar.launch")
_SPEAK_AFTER = 30.0  # seconds
_GIVE_UP_AFTER = 900.0


@dataclass(eq=False, slots=True)
class _Node:
    """A launcher that has come."""

    line: Line
    ready: Message | None = None  # what it says of itself, until it is told the team
    ended: bool = False
    number: int = -1

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.line.connection.getpeername()[0]})"


@dataclass(slots=True)
class _Run:
    """One run of the job."""

    team: list[_Node] = field(default_factory=list)
    code: int = 0
    text: str = ""
    interrupted: bool = False
    left: list[_Node] = field(default_factory=list)  # who has gone


class MeetingPlace:
    """Serves until the job is over.

    Args:
      options: of the job.
      listener: a socket that listens.
    """

    def __init__(self, options: Options, listener: socket.socket) -> None:
        self._options, self._listener = options, listener
        self._inbox: queue.SimpleQueue[tuple[Line, Message | None]] = queue.SimpleQueue()
        self._nodes: dict[Line, _Node] = {}
        self._restart, self._run = 0, _Run()
        self._since = time.monotonic()
        self._spoken = self._over = False
        threading.Thread(target=self._accept, daemon=True).start()
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    def close(self) -> None:
        """Waits until everybody knows that the job is over, or goes away with it unfinished."""
        if self._over:
            self._server.join()
        for node in [*self._nodes.values()]:
            node.line.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                Line(connection, lambda line, message: self._inbox.put((line, message)))

    def _serve(self) -> None:
        while not self._over:
            with contextlib.suppress(queue.Empty):
                line, message = self._inbox.get(timeout=0.5)
                self._handle(line, message)
            if not self._run.team:
                self._gather()

    def _handle(self, line: Line, message: Message | None) -> None:
        node = self._nodes.get(line)
        if message is None:
            if node is not None:
                self._gone(node)
        elif "ready" in message:
            self._welcome(node or _Node(line), message["ready"])
        elif "ended" in message and node is not None:
            self._ended(node, message["ended"])

    # --- before a run -----------------------------------------------------------------------------

    def _welcome(self, node: _Node, said: Message) -> None:
        wrong = None
        ranks = [n.ready["rank"] for n in self._nodes.values() if n.ready and n is not node]
        if said["job_id"] != self._options.job_id:
            wrong = f"here meets the job {self._options.job_id}, not {said['job_id']}"
        elif said["rank"] >= 0 and said["rank"] in ranks:
            wrong = f"two nodes say --rank {said['rank']}"
        if wrong is not None:
            node.line.send({"error": wrong})
            return
        self._nodes[node.line] = node
        node.ready = said

    def _gather(self) -> None:
        (low, high), waited = self._options.nnodes, time.monotonic() - self._since
        ready = [node for node in self._nodes.values() if node.ready is not None]
        late = len(ready) >= low and waited > self._options.elastic_timeout
        if len(ready) >= high or late:
            self._start(ready[:high])
        elif waited > _GIVE_UP_AFTER:
            self._finish(1, f"{len(ready)} of {low} nodes came in {_GIVE_UP_AFTER:.0f} s")
        elif waited > _SPEAK_AFTER and not self._spoken:
            self._spoken = True
            _LOG.warning("%d node(s) are here, waiting for %d more", len(ready), low - len(ready))

    def _start(self, ready: list[_Node]) -> None:
        # Those without a number of their own follow in the order in which they came.
        ready.sort(key=lambda n: n.ready["rank"] if n.ready and n.ready["rank"] >= 0 else 1 << 30)
        said = [node.ready or {} for node in ready]
        team = {
            "restart": self._restart,
            "coordinator": said[0]["coordinator"],
            "endpoints": [endpoint for node in said for endpoint in node["endpoints"]],
            "nodes": [len(node["endpoints"]) for node in said],
        }
        self._run = _Run(ready)
        for number, node in enumerate(ready):
            node.ready, node.ended, node.number = None, False, number
            node.line.send({"team": {**team, "node": number}})

    # --- during a run -----------------------------------------------------------------------------

    def _ended(self, node: _Node, said: Message) -> None:
        node.ended = True
        self._run.interrupted |= said["interrupted"]
        if said["code"]:
            self._fail(said["code"], said["text"])
        self._conclude()

    def _gone(self, node: _Node) -> None:
        del self._nodes[node.line]
        if node in self._run.team:
            self._run.left.append(node)
            self._fail(1, f"node {node.number} has gone, its launcher with it")
            self._conclude()

    def _fail(self, code: int, text: str) -> None:
        if self._run.code:
            return
        self._run.code, self._run.text = code, text
        for node in self._run.team:
            if not node.ended:
                node.line.send({"stop": self._restart})

    def _conclude(self) -> None:
        run = self._run
        if not all(node.ended or node in run.left for node in run.team):
            return
        restarts = self._options.max_restart
        if not run.code or run.interrupted or self._restart >= restarts:
            self._finish(run.code, run.text)
            return
        self._restart += 1
        self._run, self._since, self._spoken = _Run(), time.monotonic(), False
        for node in run.team:
            node.line.send({"verdict": {"again": True, "code": run.code, "text": run.text}})

    def _finish(self, code: int, text: str) -> None:
        self._over = True
        for node in self._nodes.values():
            node.line.send({"verdict": {"again": False, "code": code, "text": text}})
