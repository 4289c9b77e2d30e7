"""Values of arguments: few bits, so that sums and splits of them are exact."""

from typing import Any

import numpy as np


def eighths(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Distinct small multiples of 1/8 in random order: sums and splits of them are exact."""
    count = int(np.prod(shape))
    return (
        ((np.random.default_rng(seed).permutation(count) - count // 2) / 8)
        .reshape(shape)
        .astype(dtype)
    )


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Values between 0 and 1, in the open."""
    count = int(np.prod(shape))
    return (
        ((np.random.default_rng(seed).permutation(count) + 1) / (count + 2))
        .reshape(shape)
        .astype(np.float32)
    )


def integers(*shape: int, seed: int = 0, high: int = 9, dtype: Any = np.int32) -> np.ndarray:
    """Small integers, some of them equal."""
    return np.random.default_rng(seed).integers(0, high, shape).astype(dtype)


def booleans(*shape: int, seed: int = 0) -> np.ndarray:
    """True and false."""
    return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)


def with_nans(x: np.ndarray) -> np.ndarray:
    """Every third value is NaN."""
    out = x.copy()
    out.reshape(-1)[::3] = np.nan
    return out
