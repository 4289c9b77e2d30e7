"""Lanes: calls of one lane run one after the other, as all ranks of a group expect them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Lane"]

Work = Callable[[], Any]


class Lane:
    """Runs calls in the order in which they come, here or in a thread of its own.

    The thread ends with the process, so that a call that never returns does not hold it up; the
    executors of the standard library would wait.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._turn = threading.RLock()
        self._counting = threading.Lock()
        self._waiting = 0
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is running or waiting in the thread."""
        return self._waiting == 0

    @property
    def is_mine(self) -> bool:
        """Whether the caller is a call of this lane itself."""
        return threading.current_thread() is self._thread

    def here(self, work: Work) -> Any:
        """Runs a call in the caller's thread; the lane must be free for it."""
        with self._turn:
            return work()

    def later(self, work: Work) -> Future[Any]:
        """Queues a call for the lane's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._count(1)
        self._queue.put((work, future))
        return future

    def close(self) -> None:
        """Lets the thread end once its calls have."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                with self._turn:
                    result = work()
            except BaseException as error:  # it is raised where the future is waited for
                self._count(-1)
                future.set_exception(error)
            else:
                self._count(-1)
                future.set_result(result)

    def _count(self, more: int) -> None:
        with self._counting:
            self._waiting += more
