"""Batches of which each process has a part."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshpar.errors import MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.placements.local import join_parts, processes_of
from meshpar.placements.shard import shard_tensor
from meshpar.placements.types import Placement
from meshpar.placements.values import Value
from meshpar.tell_all import tell_all

__all__ = ["Part", "SplitBatches"]

_numbers = itertools.count()  # processes make their loaders in the same order


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """This process's part of a leaf of a batch; a leaf to `jax.tree`.

    Args:
      array: the part, or a number, which every process has whole.
      name: what the leaf is called.
      mesh: where the whole lies.
      placements: one per mesh axis.
    """

    array: Any
    name: str
    mesh: ProcessMesh
    placements: tuple[Placement, ...]


class SplitBatches:
    """Joins the parts of one batch after the other."""

    def __init__(self) -> None:
        self._topic = f"batches of split loader {next(_numbers)}"

    def join(self, parts: Any) -> Any:
        """The batch of which every process has a part.

        Args:
          parts: a pytree of `Part`s, `None` where this process has no batch left.

        Returns:
          The same pytree of placed values; `None` where no process has a batch left.

        Raises:
          ValueError: some processes have a batch and others have none, or one of another form.
          PlacementError: the parts are no blocks of one value.
        """
        leaves: list[Part]
        leaves, tree = jax.tree.flatten(parts, is_leaf=lambda x: isinstance(x, Part))
        mine = [[p.name, str(np.asarray(p.array).dtype), np.shape(p.array)] for p in leaves]
        told = tell_all(self._topic, None if parts is None else mine)
        ended = [process for process, said in enumerate(told) if said is None]
        if len(ended) == len(told):
            return None
        if ended:
            raise ValueError(
                f"shard_dataloader(is_dataset_splitted=True): the data of process(es) {ended} have "
                "ended, those of the others go on; give every process the same number of batches"
            )
        for process, said in enumerate(told):
            if [leaf[:2] for leaf in said] != [leaf[:2] for leaf in mine]:
                raise ValueError(
                    f"shard_dataloader(is_dataset_splitted=True): process {process} has a batch of "
                    f"{_form(said)}, process {jax.process_index()} one of {_form(mine)}"
                )
        values = [
            _joined(leaf, [tuple(said[i][2]) for said in told]) for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, values)


def _joined(leaf: Part, shapes: list[tuple[int, ...]]) -> Value:
    try:
        if not np.ndim(leaf.array):
            return shard_tensor(leaf.array, leaf.mesh, leaf.placements)
        shapes = [shapes[process] for process in processes_of(leaf.mesh)]
        return join_parts(leaf.array, shapes, leaf.mesh, leaf.placements)
    except MeshparError as error:
        raise error.within("shard_dataloader", leaf=leaf.name, parts=shapes) from None


def _form(said: list[list[Any]]) -> str:
    return ", ".join(f"{name} {dtype}{tuple(shape)}" for name, dtype, shape in said)
