"""What `Strategy.pipeline` asks for, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshpar.errors import MeshError, MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.schedules import NAMES, Schedule, auto, generate
from meshpar.schedules.executors.mpmd import check_one_process
from meshpar.training.split_point import read_splits
from meshpar.training.stage_counts import OnRanks, Stages
from meshpar.training.state import Slots
from meshpar.training.strategy import Strategy

__all__ = ["Pipeline", "pipeline_of"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a model is pipelined.

    Args:
      axis: the mesh axis of the ranks.
      schedule: a name of `schedules.NAMES`, or "auto".
      chunks: stages on a rank.
      microbatches: their number; `None` where their size is given.
      rows: rows of a microbatch on each device; `None` where their number is given.
      split_backward: whether full backwards are split.
      stages: what the user said about stages; `None` shares out equal layers evenly.
      recompute: whether the backward pass runs a stage again.
      executor: what runs the schedule; "auto" is decided when a batch is known.
    """

    axis: str
    schedule: str
    chunks: int
    microbatches: int | None
    rows: int | None
    split_backward: bool
    stages: Stages | None = None
    recompute: bool = False
    executor: Literal["program", "mpmd", "auto"] = "program"

    def table(self, batch: Slots) -> Schedule:
        """The schedule for a batch.

        Raises:
          MeshparError: the batch has no rows to split.
        """
        P, M, V = batch.mesh.axis_sizes[self.axis], self._count(batch), self.chunks
        if self.schedule == "auto":
            return auto(P, M, V)
        return generate(self.schedule, P, M, V, split_backward=self.split_backward)

    def _count(self, batch: Slots) -> int:
        """The number of microbatches; where rows do not come out even the last ones are smaller."""
        rows = {(s.shape[0], s.layout.dims[0]) for s in batch.leaves if s.shape}
        sizes = {n for n, _ in rows}
        axes = {axis for _, dim in rows for axis in dim}
        cut = math.prod(batch.mesh.axis_sizes[axis] for axis in axes)
        (n,) = sizes if len(sizes) == 1 else (0,)
        if not n:
            empty = sizes == {0}
            raise MeshparError(
                "the batch has no rows."
                if empty
                else "the leaves of the batch have no common number of rows.",
                rows=", ".join(f"{s.name or 'batch'} {s.shape}" for s in batch.leaves),
                because="microbatches are rows of the batch, dim 0 of every leaf that has dims",
                instead="leave the step out"
                if empty
                else "leaves with one number of rows, or without dims for what all rows share",
            )
        own = -(-n // cut)  # rows of the largest part
        size = self.rows or -(-own // (self.microbatches or 1))
        return -(-own // size)


def pipeline_of(
    strategy: Strategy, mesh: ProcessMesh, model: Any, ranks: Mapping[str, int]
) -> Pipeline | None:
    """What `Strategy.pipeline` asks for, checked; `None` if it is not enabled.

    Args:
      strategy: the options.
      mesh: the mesh of the whole pipeline.
      model: the user's model, of whatever form.
      ranks: the parameters that lie on the mesh of one rank, and the rank.

    Raises:
      MeshError: the mesh has no axis for the ranks, or one of another size.
      ValueError: an unknown schedule, sizes that do not fit each other, or stages that are given
        in two ways.
      TypeError: class names, of a model that is no nnx module.
      NotImplementedError: the executor "mpmd" over several processes.
    """
    asked = strategy.pipeline
    if not asked.enable:
        return None
    axis = asked.axis
    if axis not in mesh.axis_sizes:
        raise MeshError(
            f"Strategy.pipeline.axis is {axis!r}, which is no axis of the mesh.",
            mesh=mesh,
            instead='a mesh such as ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])',
        )
    size = mesh.axis_sizes[axis]
    if "pp_degree" in asked.changed() and asked.pp_degree != size:
        raise MeshError(
            f"Strategy.pipeline.pp_degree is {asked.pp_degree}, and mesh axis {axis!r} has size "
            f"{size}.",
            mesh=mesh,
        )
    if asked.schedule_mode not in (*NAMES, "auto"):
        raise ValueError(
            f"Strategy.pipeline.schedule_mode = {asked.schedule_mode!r}: it is one of "
            f"{', '.join(NAMES)} or auto"
        )
    if asked.executor not in ("program", "mpmd", "auto"):
        raise ValueError(
            f"Strategy.pipeline.executor = {asked.executor!r}: it is 'program', 'mpmd' or 'auto'"
        )
    if asked.executor == "mpmd":
        check_one_process(mesh, "Strategy.pipeline.executor = 'mpmd'")
    splits = read_splits(asked, model)
    if splits is not None and ranks:
        raise ValueError(
            f"Strategy.pipeline: {next(iter(ranks))!r} lies on the mesh of one rank, which says "
            "where stages are, and so does split_spec or vpp_seg_method; give one of them"
        )
    changed = asked.changed()
    if "accumulate_steps" in changed and "micro_batch_size" in changed:
        raise ValueError(
            "Strategy.pipeline: accumulate_steps is the number of microbatches and "
            "micro_batch_size their size on a device; set one of them, the batch tells the other"
        )
    by_size = "micro_batch_size" in changed
    twofold = asked.schedule_mode in ("ZBVPP", "DualPipeV") and "vpp_degree" not in changed
    pipeline = Pipeline(
        axis,
        asked.schedule_mode,
        2 if twofold else asked.vpp_degree,
        None if by_size else asked.accumulate_steps,
        asked.micro_batch_size if by_size else None,
        asked.split_backward,
        OnRanks(tuple(ranks.items())) if ranks else splits,
        strategy.recompute.enable,
        asked.executor,
    )
    if asked.schedule_mode != "auto":
        generate(asked.schedule_mode, size, 1, pipeline.chunks)  # refuses a wrong vpp_degree
    return pipeline
