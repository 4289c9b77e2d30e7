"""The logs of ranks: one file each, which one of them also shows on the terminal."""

from __future__ import annotations

import codecs
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RankLog", "open_log", "shown"]

_PAUSE = 0.05  # seconds between two looks at a file


@dataclass(frozen=True, slots=True)
class RankLog:
    """What a rank prints in one run: the part of a file that begins at an offset."""

    path: Path
    start: int

    def tail(self, lines: int) -> str:
        """The last lines of it."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def open_log(folder: Path, rank: int, overwrite: bool, headline: str) -> RankLog:
    """Makes `folder/workerlog.<rank>` ready to be appended to.

    Args:
      folder: it is made where it is missing.
      rank: the rank.
      overwrite: whether what is in the file goes.
      headline: the line that parts this run from what is in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"workerlog.{rank}"
    with path.open("wb" if overwrite else "ab") as file:
        if file.tell():
            file.write(f"--- {headline} ---\n".encode())
        return RankLog(path, file.tell())


@contextmanager
def shown(log: RankLog) -> Iterator[None]:
    """Copies what is added to a log to the standard output, until the context ends.

    The rank writes to the file and not to a pipe: it does not wait for a terminal that stalls.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(log, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(log: RankLog, ended: threading.Event) -> None:
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    with log.path.open("rb") as file:
        file.seek(log.start)
        while True:
            last = ended.is_set()  # asked before reading: nothing that was written before is lost
            data = file.read()
            if data:
                sys.stdout.write(decode(data))
                sys.stdout.flush()
            elif last:
                return
            else:
                time.sleep(_PAUSE)
