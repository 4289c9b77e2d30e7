"""Ctrl-C as a request: the loop ends its step and saves, instead of losing its state."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import meshpar as mp


class StopRequest:
    """A context in which the first Ctrl-C sets `asked`; a second one interrupts as ever.

    Example:
      >>> with StopRequest() as stop:
      ...     signal.raise_signal(signal.SIGINT)
      >>> stop.asked
      True
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None  # a handler of whatever kind was installed

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def agreed(self) -> bool:
        """Whether to stop now; called by all ranks once a step, it tells all of them the same.

        Ctrl-C reaches ranks in different steps, and they can only stop in one. They tell each other
        beside the arrays, so that no device waits.
        """
        if mp.get_world_size() == 1:
            return self.asked
        asked: list[bool] = []
        mp.all_gather_object(asked, self.asked)
        return any(asked)

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
