"""Kills what a launcher started when the launcher itself is killed.

A process of its own in a session of its own, run as a script without site packages. It reads
`+group` and `-group` lines; at the end of its input, which comes however the launcher ends, it
kills the process groups that are left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

__all__ = ["Guard"]


class Guard:
    """The launcher's end: tells the guard which process groups are alive.

    It starts when it is made, and ends with `close` or as a context.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            start_new_session=True,  # it must not get the signals of the launcher's terminal
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Guard:
        return self

    def add(self, group: int) -> None:
        """From now on the group dies with this process."""
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        """The group has ended."""
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None, "it was opened with a pipe"
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            pipe.write(f"{line}\n")

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the guard, and with it the groups that are left."""
        pipe = self._process.stdin
        assert pipe is not None, "it was opened with a pipe"
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
        self._process.wait()


def _main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
