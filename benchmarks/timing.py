"""Timing of programs that are compared: in turns, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def measure(runs: Sequence[Callable[[], Any]], steps: int) -> list[float]:
    """Median seconds per call of each, run in turns.

    The order changes every round, so that a busy machine hits all alike.
    """
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        for _ in range(3):
            jax.block_until_ready(run())
    for turn in range(steps):
        order = [*range(len(runs))]
        for which in order if turn % 2 else reversed(order):
            start = time.perf_counter()
            jax.block_until_ready(runs[which]())
            times[which].append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]
