"""Ports for a job: found by asking the system, and held where nobody may take them meanwhile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["free_ports", "held_port"]


@contextlib.contextmanager
def held_port(host: str, port: int = 0) -> Iterator[int]:
    """A port that only the ranks of this job can listen at, while the context lasts.

    It is bound here with SO_REUSEPORT and never listened at. Rank 0 binds it with SO_REUSEPORT too,
    to meet the others and then for JAX's service, and gets every connection. To all others, and
    to those that ask for a free port, it is taken.

    Args:
      host: an address of this machine.
      port: 0 for a free one.

    Raises:
      OSError: another program has this port, or the address is not this machine's.
    """
    family, address = _resolved(host, port)
    if port:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise OSError(f"nobody can listen at {host}:{port}: {error}") from None
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        yield holder.getsockname()[1]


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody had a moment ago; with an empty `host` on all addresses."""
    family, address = _resolved(host, 0)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for each in sockets:
            each.bind(address)
        return [each.getsockname()[1] for each in sockets]


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    kind, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
    found = socket.getaddrinfo(host or None, port, type=kind, flags=passive)[0]
    return found[0], (str(found[4][0]), port)
