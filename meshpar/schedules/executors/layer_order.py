"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.schedules.schedule import Schedule

__all__ = ["LayerOrder", "even_counts"]


def even_counts(count: int, stages: int) -> tuple[int, ...]:
    """Layers shared out over stages, the first of which have one more where it does not come out.

    Example:
      >>> even_counts(5, 3)
      (2, 2, 1)
    """
    return tuple(count // stages + (s < count % stages) for s in range(stages))


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """Which layers each stage has, in order; shorter stages repeat a layer unused.

    Args:
      ranks: number of ranks.
      chunks: stages on a rank.
      per_stage: the most layers in a stage.
      layers: (ranks, chunks, per_stage) the layer in each place.
      active: of the same shape: whether it is computed with.
    """

    ranks: int
    chunks: int
    per_stage: int
    layers: np.ndarray
    active: np.ndarray

    @classmethod
    def of(cls, counts: Sequence[int], schedule: Schedule) -> LayerOrder:
        """The order for the number of layers of each stage, which may be none."""
        most, last = max(counts), sum(counts) - 1
        starts = np.cumsum([0, *counts[:-1]])
        layers = np.zeros((schedule.P, schedule.V, most), int)
        active = np.zeros(layers.shape, bool)
        for stage, (rank, chunk) in enumerate(schedule.places):
            here = np.arange(most)
            layers[rank, chunk] = np.minimum(starts[stage] + here, last)
            active[rank, chunk] = here < counts[stage]
        return cls(schedule.P, schedule.V, most, layers, active)

    @property
    def full(self) -> bool:
        """Whether all stages have the same number of layers."""
        return bool(self.active.all())

    @property
    def _in_order(self) -> bool:
        return self.full and bool((np.diff(self.layers.reshape(-1)) == 1).all())

    def stack(self, row: Sequence[int], values: dict[int, Any]) -> Any:
        """A value of all layers, of shape (ranks, chunks, per_stage, ...)."""
        places = self.layers.reshape(-1)
        if len(row) == 1 and len(set(places)) > 1:
            whole = values[row[0]] if self._in_order else values[row[0]][places]
        else:
            whole = jnp.stack([values[row[k]] for k in places])
        return whole.reshape(*self.layers.shape, *whole.shape[1:])

    def unstack(self, gradient: Any, row: Sequence[int]) -> list[Any]:
        """The gradient of a value of all layers, in the form of `row`."""
        flat = gradient.reshape(-1, *gradient.shape[3:])
        if self._in_order and len(row) == 1:
            return [flat]
        where = np.flatnonzero(self.active.reshape(-1))
        where = where[np.argsort(self.layers.reshape(-1)[where])]
        return [flat[where]] if len(row) == 1 and len(where) > 1 else [flat[k] for k in where]
