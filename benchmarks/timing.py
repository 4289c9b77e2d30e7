"""Timing of programs that are compared: in turns, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def rounds(runs: Sequence[Callable[[], Any]], steps: int) -> list[list[float]]:
    """Seconds of each call of each, run in turns.

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
    return times


def measure(runs: Sequence[Callable[[], Any]], steps: int) -> list[float]:
    """Median seconds per call of each, run in turns."""
    return [statistics.median(each) for each in rounds(runs, steps)]


def ratio(lhs: Sequence[float], rhs: Sequence[float]) -> tuple[float, float]:
    """The ratio of two medians, and how far the halves of the rounds are apart in it.

    The second figure is the noise: no smaller difference from 1 means anything.
    """
    halves = [
        statistics.median(lhs[start::2]) / statistics.median(rhs[start::2]) for start in (0, 1)
    ]
    return statistics.median(lhs) / statistics.median(rhs), abs(halves[0] - halves[1])
