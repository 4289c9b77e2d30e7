"""Programs on one device's blocks: each action of a stage, planned over the axes within a stage.

A stage that is cut over other mesh axes (data, tensor, sequence, ZeRO) is partitioned like any
program, so its collectives are explicit and join the devices of one pipeline rank only. That is
what lets ranks do different actions in one tick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.compiler.annotations import Surroundings
from meshpar.compiler.decide import Decider
from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.emitted import emitted_primitives
from meshpar.compiler.partition import run_local
from meshpar.compiler.planned import Move, PlannedProgram
from meshpar.compiler.program import Constant, Program
from meshpar.compiler.propagate import propagate
from meshpar.placements.blocks import local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.placements.types import ReduceType
from meshpar.schedules.executors.estimate import seconds_of
from meshpar.schedules.executors.in_time import TIME, check_in_time
from meshpar.schedules.executors.rounding import rounded_by_term

__all__ = ["TIME", "LocalProgram", "Within", "block_struct"]


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """A program on blocks.

    Args:
      run: takes and returns blocks.
      inputs: the layouts of what it takes.
      outputs: the layouts of what it returns.
      passed: for each result the position of the argument that it is, if it is one as it came.
      seconds: how long it takes, by the model of the device.
    """

    run: Callable[..., list[Any]]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    passed: tuple[int | None, ...]
    seconds: float


class Within:
    """The axes within a pipeline rank, over which its programs are planned.

    Args:
      sizes: the axes of the mesh but the pipeline's, and `TIME` where microbatches are parts of a
        batch that the programs are traced with.
      model: what things cost.
      outer: the axis of the pipeline's ranks.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        model: DeviceModel,
        outer: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes = dict(sizes)
        around = Surroundings(dict(outer or {}), frozenset({TIME} & set(sizes)))
        self._decider = Decider(sizes, model, around)

    def local(
        self,
        program: Program,
        inputs: Sequence[Layout | None],
        outputs: Sequence[Layout | None],
        *,
        leave_pending: bool = False,
    ) -> LocalProgram:
        """Plans a program.

        Args:
          program: what runs.
          inputs: the layout of each argument; `None` lets the plan choose.
          outputs: the layout of each result; `None` lets the plan choose.
          leave_pending: whether results of a chosen layout may be pending; they are then sums over
            the microbatches, if these are parts of a batch.

        Raises:
          NotImplementedError: the plan sends values around a ring, which XLA on CPU can only do
            where all devices take part; or a microbatch needs values of the others.
        """
        summed = leave_pending or any(TIME in y.partial_axes for y in outputs if y is not None)
        if summed and TIME in self.sizes:
            program = rounded_by_term(program)
        planned = propagate(program, inputs, outputs, self._decider, leave_pending=leave_pending)
        if leave_pending and TIME in self.sizes:
            # What does not depend on the microbatch counts once.
            asked = [
                wanted or _summed(found)
                for wanted, found in zip(outputs, planned.outputs, strict=True)
            ]
            planned = propagate(program, inputs, asked, self._decider)
        _check_no_ring(planned)
        if TIME in self.sizes:
            check_in_time(planned)

        def run(*blocks: Any) -> list[Any]:
            return run_local(planned, *blocks)

        passed = _passed(program, planned)
        seconds = seconds_of(planned, self._decider.model)
        return LocalProgram(run, planned.inputs, planned.outputs, passed, seconds)


def _passed(program: Program, planned: PlannedProgram) -> tuple[int | None, ...]:
    arguments = {
        (value, layout): position
        for position, (value, layout) in enumerate(zip(program.inputs, planned.inputs, strict=True))
    }
    return tuple(
        None if isinstance(ref, Constant) else arguments.get((ref, layout))
        for ref, layout in zip(program.outputs, planned.outputs, strict=True)
    )


def _summed(layout: Layout) -> Layout:
    if TIME in layout.partial_axes or TIME in layout.shard_axes:
        return layout
    return layout.with_partial(TIME, ReduceType.kRedSum)


def block_struct(aval: Any, layout: Layout, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a device's block."""
    return jax.ShapeDtypeStruct(local_shape(tuple(aval.shape), layout, sizes), aval.dtype)


def _check_no_ring(planned: PlannedProgram) -> None:
    for node in planned.nodes:
        for body in node.bodies:
            _check_no_ring(body)
        ring = any(_is_ring(planned, move) for move in node.moves)
        if not ring and node.rule is not None and node.rule.emit is not None:
            ring = any(node.axes.values()) and "ppermute" in emitted_primitives(planned, node)
        if ring:
            _refuse(node.node.name, node.node.where)
    if any(_is_ring(planned, move) for move in planned.moves):
        _refuse("its results", "")


def _refuse(what: str, where: str) -> None:
    at = f" at {where}" if where else ""
    raise NotImplementedError(
        f"pipeline: inside a stage, {what}{at} would send blocks around a ring (ppermute); ranks "
        "that do something else in that tick cannot take part. Give the stage's parameters or its "
        "input a placement that cuts another dim, or sizes that the mesh axis divides"
    )


def _is_ring(planned: PlannedProgram, move: Move) -> bool:
    aval = planned.program.aval(move.value)
    steps = planned_steps(move.src, move.dst, tuple(aval.shape), aval.dtype, planned.sizes)
    return any(step.kind == "ppermute" for step in steps)
