"""`Step`: one collective, or one local operation, that turns a layout into another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshpar.placements.layout import Layout
from meshpar.placements.types import ReduceType

__all__ = ["LOCAL_KINDS", "Axes", "Step", "StepKind"]

StepKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "ppermute", "mask"
]
Axes = tuple[str, ...]

LOCAL_KINDS = frozenset({"slice", "mask"})
"""The kinds of steps that no device hears of."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a reshard; the collectives are named as XLA names them.

    With s the bytes of the block that enters the collective, its padding included, and n devices
    over `axes`, a device sends: all_gather s*(n-1), all_reduce 2*s*(n-1)/n, reduce_scatter and
    all_to_all s*(n-1)/n, ppermute s, slice and mask nothing.

    Args:
      kind: the operation. XLA has no all_reduce for products and reduce_scatter for sums only:
        the others are an all_gather or all_to_all with a local reduction, and are called so.
      axes: the mesh axes over which devices talk, the order in which they are numbered. A slice
        without axes says that every device holds its block already.
      dims: the tensor dims that change: those that get longer, then those that get shorter.
      src: the layout before.
      dst: the layout after.
      bytes: what each device sends; elements count `dtype.itemsize`, so 1 byte for int4.
      reduce: the reduction, where contributions are reduced or made.
      permutation: for ppermute, pairs (from, to) of positions along `axes`, row-major. Devices
        that keep their block are paired with themselves; those without rows are in no pair.
    """

    kind: StepKind
    axes: Axes
    dims: tuple[int, ...]
    src: Layout
    dst: Layout
    bytes: int
    reduce: ReduceType | None = None
    permutation: tuple[tuple[int, int], ...] = ()

    @property
    def is_collective(self) -> bool:
        """Whether devices talk."""
        return self.kind not in LOCAL_KINDS

    @property
    def lost(self) -> dict[int, Axes]:
        """Tensor dim -> the axes that no longer cut it, outermost first."""
        return _suffixes(self.src, self.dst)

    @property
    def gained(self) -> dict[int, Axes]:
        """Tensor dim -> the axes that newly cut it, outermost first."""
        return _suffixes(self.dst, self.src)

    def __str__(self) -> str:
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        by = f" by {self.reduce.word}" if self.reduce is not None else ""
        return f"{self.kind}{over}{by}: {self.bytes} bytes"


def _suffixes(longer: Layout, shorter: Layout) -> dict[int, Axes]:
    pairs = enumerate(zip(longer.dims, shorter.dims, strict=True))
    return {d: lhs[len(rhs) :] for d, (lhs, rhs) in pairs if len(lhs) > len(rhs)}
