"""A connection between launchers: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Line", "Message"]

Message = dict[str, Any]  # of JSON's types
_LONGEST = 1 << 20  # bytes of a message, so that a stranger cannot fill the memory


class Line:
    """One end of a connection.

    Args:
      connection: the socket.
      receive: called in a thread of its own with each message, and with `None` at the end: when
        the other side has gone, or says what is no message.
    """

    def __init__(
        self, connection: socket.socket, receive: Callable[[Line, Message | None], None]
    ) -> None:
        connection.settimeout(None)
        self.connection, self._receive = connection, receive
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message, if the other side is still there; `receive` hears when it is not."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self.connection.makefile("rb") as file:
            while (line := file.readline(_LONGEST)).endswith(b"\n"):
                message = json.loads(line)
                if not isinstance(message, dict):
                    break
                self._receive(self, message)
        self._receive(self, None)
