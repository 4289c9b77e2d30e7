"""Python's own standard library as a byte-level text: a corpus that needs no download.

A batch is a pure function of (seed, step): a run that resumes at step n sees the batches that an
uninterrupted run sees, and nothing of the data's position has to be saved.
"""

import hashlib
import itertools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages"})
_VALIDATION_SHARE = 20  # one file in so many


@dataclass(frozen=True, slots=True, eq=False)  # eq: comparing megabytes is the caller's decision
class Corpus:
    """Bytes of whole files, split by file.

    Attributes:
      train: uint8 of shape `(train bytes,)`.
      validation: uint8 of shape `(validation bytes,)`.
    """

    train: np.ndarray
    validation: np.ndarray


class Batch(TypedDict):
    """Bytes and the bytes that follow them.

    Both are int32 of shape `(batch_size, seq_len)`, and `labels[:, t]` is `tokens[:, t + 1]`.
    """

    tokens: np.ndarray
    labels: np.ndarray


def load_corpus(*, root: Path | None = None, max_bytes: int = 20_000_000) -> Corpus:
    """Reads the `.py` files of the standard library, without its tests.

    Args:
      root: the folder to read; by default `sysconfig`'s `stdlib` of the running Python.
      max_bytes: stop before the file that would exceed this total.

    Returns:
      The same corpus for the same files, whatever the order the file system lists them in. A file
      goes to the validation part by the hash of its path, so that a file more or less in another
      Python moves no other file.

    Raises:
      FileNotFoundError: no `.py` file below `root`.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = _source_names(root)
    if not names:
        raise FileNotFoundError(f"load_corpus(root={str(root)!r}): no .py file in this folder")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for name in names:
        text = (root / name).read_bytes()
        total += len(text)
        if total > max_bytes:
            break
        parts[_hash(name) % _VALIDATION_SHARE == 0].append(text)
    train, validation = (
        np.frombuffer(b"".join(parts[is_validation]), np.uint8) for is_validation in (False, True)
    )
    return Corpus(train, validation)


def batch_at(data: np.ndarray, batch_size: int, seq_len: int, *, seed: int, step: int) -> Batch:
    """The batch of one step: windows at independent uniform offsets.

    Args:
      data: uint8 of shape `(bytes,)`, more than `seq_len` of them.
      batch_size: windows per batch.
      seq_len: tokens per window.
      seed: of the run; seeds give unrelated batches.
      step: of the run, from 0.

    Returns:
      A function of these arguments alone.

    Raises:
      ValueError: `data` has no window of `seq_len` tokens and a next one.
    """
    if len(data) <= seq_len:
        raise ValueError(
            f"batch_at(data, seq_len={seq_len}): a window needs {seq_len + 1} bytes, the last of "
            f"them as a label, and data has {len(data)}; seq_len <= {len(data) - 1} fits"
        )
    offsets = np.random.default_rng([seed, step]).integers(len(data) - seq_len, size=batch_size)
    windows = data[offsets[:, None] + np.arange(seq_len + 1)].astype(np.int32)  # [B,T+1]
    return {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


def batches(
    data: np.ndarray, batch_size: int, seq_len: int, seed: int, start_step: int = 0
) -> Iterator[Batch]:
    """The batches of steps `start_step`, `start_step + 1`, ... without end; see `batch_at`.

    Example:
      >>> data = np.arange(100, dtype=np.uint8)
      >>> next(batches(data, 2, 5, seed=0))["tokens"].shape
      (2, 5)
    """
    for step in itertools.count(start_step):
        yield batch_at(data, batch_size, seq_len, seed=seed, step=step)


def _source_names(root: Path) -> list[str]:
    """Paths below `root`, with forward slashes, in an order that mixes folders.

    Ordered by hash: a corpus that is cut short is still a sample of the whole library.
    """
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    return sorted(names, key=lambda name: (_hash(name), name))


def _hash(name: str) -> int:
    # Python's own hash of a string differs from process to process.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
