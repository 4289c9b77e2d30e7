"""The `mpmd` executor: the host runs a table action by action, each as a program of one rank.

JAX dispatches programs asynchronously and every device runs those it was given in order, so ranks
wait for the values they take and for nothing else: a step takes the asynchronous makespan, where
`program` takes the lockstep one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import storage_spec
from meshpar.placements.layout import Layout
from meshpar.schedules.actions import Action
from meshpar.schedules.executors.between_ranks import everywhere, joined, laid_out, on_rank, split
from meshpar.schedules.executors.in_time import by_microbatch
from meshpar.schedules.executors.rank_programs import RankPrograms
from meshpar.schedules.executors.signatures import Blocks, Kind, Signatures
from meshpar.schedules.executors.stash import Stash
from meshpar.schedules.executors.step import Arrays, Gradients, PipelineStep, Result

__all__ = ["PipelineByRank", "check_one_process", "is_one_process"]

AHEAD = 8
"""How many actions of a rank are dispatched before the oldest has ended: enough to hide the host's
time, few enough for values not to pile up, and for XLA on CPU, which ends the process when some 100
programs with collectives are queued."""


class PipelineByRank:
    """A step run from the host, as programs of its ranks.

    Args:
      step: what is run.

    Raises:
      NotImplementedError: some devices of the mesh belong to other processes.
    """

    def __init__(self, step: PipelineStep) -> None:
        check_one_process(step.mesh, "pipeline(executor='mpmd')")
        self.step = step
        self.signatures = Signatures(step)
        ranks = range(step.schedule.P)
        self.ranks = [RankPrograms(step, self.signatures, rank) for rank in ranks]
        first, last = step.schedule.places[0], step.schedule.places[-1]
        self._first, self._last = first[0], last[0]

    def __call__(self, arrays: Arrays) -> tuple[list[Any], Gradients]:
        """One step: the result of each microbatch, stacked, and the gradients.

        Args:
          arrays: concrete ones; they are moved to where they are needed if they lie elsewhere.
            Where microbatches are parts of a batch, the storage of the layouts of the step.

        Where they are parts, a result is the storage of its layout too.
        """
        totals = [programs.start(self._totals_of(r)) for r, programs in enumerate(self.ranks)]
        run = _Run(self, self._values(arrays), totals)
        for rank, action in self._actions():
            run.do(rank, action)
        done = [p.finish(sums) for p, sums in zip(self.ranks, totals, strict=True)]
        results, *gradients = [
            [self._result(name, k, r, done) for k, r in enumerate(group)]
            for name, group in self.step.results.items()
        ]
        return results, Gradients(*gradients)

    # --- inside -----------------------------------------------------------------------------------

    def _actions(self) -> Iterator[tuple[int, Action]]:
        """All actions in the order of their dispatch: tick by tick."""
        for cells in zip(*self.step.schedule.table, strict=True):
            for rank, cell in enumerate(cells):
                yield from ((rank, action) for action in cell)

    def _totals_of(self, rank: int) -> list[str]:
        """The results that a rank adds to."""
        owners = {"result": self._last, "last": self._last, "first": self._first}
        owners |= {"own": rank, "given": self._first}
        results = self.step.results
        return [n for n in results if owners[n] == rank and (results[n] or n != "given")]

    def _sharding(self, layout: Layout) -> NamedSharding:
        return NamedSharding(self.step.mesh.jax_mesh, storage_spec(layout, self.step.sizes))

    def _values(self, arrays: Arrays) -> list[Blocks]:
        """The values of each rank that are there from the beginning."""
        step, layouts = self.step, self.signatures.layouts
        out: list[Blocks] = [{"own": []} for _ in self.ranks]
        for x, y in zip(arrays.own, layouts("own"), strict=True):
            parts = split(x, self._sharding(y), [p.sharding(y) for p in self.ranks])
            for values, part in zip(out, parts, strict=True):
                values["own"].append(part)
        batch = [arrays.microbatches, arrays.targets, arrays.extras]
        if step.in_parts:
            batch = self._by_microbatch(*batch)
        stored = step.by_microbatch
        groups = {
            "first": (arrays.first, step.first, [self._first]),
            "last": (arrays.last, step.last, [self._last]),
            "microbatches": (batch[0], stored[0], [self._first]),
            "targets": (batch[1], stored[1], [self._last]),
            "extras": (batch[2], stored[2], range(len(self.ranks))),
        }
        for name, (leaves, stored, ranks) in groups.items():
            whole = [
                self._gathered(x, y) if step.axis in y.shard_axes else x
                for x, y in zip(leaves, stored, strict=True)
            ]
            for rank in ranks:
                shardings = [self.ranks[rank].sharding(y) for y in layouts(name)]
                pairs = zip(whole, shardings, strict=True)
                out[rank][name] = [on_rank(x, sharding) for x, sharding in pairs]
        return out

    @cached_property
    def _by_microbatch(self) -> Callable[..., list[list[Any]]]:
        """The program that gives a batch a dim of microbatches."""
        step, stages = self.step, self.step.stages
        placed = (stages.microbatch, stages.target, stages.extras)

        def local(*groups: Sequence[Any]) -> list[list[Any]]:
            return [
                [by_microbatch(x, y, step.schedule.M) for x, y in zip(xs, p.layouts, strict=True)]
                for xs, p in zip(groups, placed, strict=True)
            ]

        inputs, outputs = (
            [[storage_spec(y, step.sizes) for y in layouts] for layouts in groups]
            for groups in (step.batch, step.by_microbatch)
        )
        run = jax.shard_map(
            local,
            mesh=step.mesh.jax_mesh,
            in_specs=tuple(inputs),
            out_specs=outputs,
            check_vma=False,
        )
        return jax.jit(run)

    def _gathered(self, x: Any, stored: Layout) -> jax.Array:
        """Parameters that are cut over the ranks, whole on each of them."""
        x = jax.device_put(x, self._sharding(stored))
        return laid_out(self._sharding(_without(stored, self.step.axis)))(x)

    def _result(self, name: str, k: int, result: Result, done: list[Blocks]) -> jax.Array:
        """A result on the whole mesh, from the ranks that have it."""
        sharding = self._sharding(result.wanted)
        if name == "own":
            return joined([values["own"][k] for values in done], result.shape, sharding)
        (x,) = [values[name][k] for values in done if name in values]
        copied = self._sharding(_without(result.wanted, self.step.axis))
        return everywhere(x, copied, sharding)


class _Run:
    """The actions of one step.

    Args:
      executor: what runs them.
      values: those of each rank that are there from the beginning.
      totals: those of each rank, which the actions add to in place.
    """

    def __init__(
        self, executor: PipelineByRank, values: list[Blocks], totals: list[Blocks]
    ) -> None:
        self._ranks, self._signatures = executor.ranks, executor.signatures
        self._values, self._totals = values, totals
        schedule = executor.step.schedule
        self._stages, self._places = schedule.stages, schedule.places
        self._stashes = [Stash(self._signatures) for _ in self._ranks]
        self._tokens: list[deque[jax.Array]] = [deque() for _ in self._ranks]
        x = self._signatures.layouts("sent")
        self._shardings = [[programs.sharding(y) for y in x] for programs in self._ranks]

    def do(self, rank: int, action: Action) -> None:
        """Dispatches an action, and the transfer of what it makes."""
        stage = self._stages[rank][action.chunk]
        kind = Kind(action.op, stage == 0, stage == len(self._places) - 1)
        programs, stash, totals = self._ranks[rank], self._stashes[rank], self._totals[rank]
        there = self._values[rank]
        values = {n: there[n] for n in self._signatures.takes(kind) if n in there}
        values["kept"] = stash.taken(kind, action)
        sums = {name: totals[name] for name in self._signatures.totals(kind)}
        chunk, microbatch = (programs.numbers[k] for k in (action.chunk, action.microbatch))
        sums, made, token = programs.action(kind)(sums, values, chunk, microbatch)
        del values
        totals |= sums
        stash.after(kind, action, made.pop("kept"))
        if "sent" in made:
            self._send(rank, stage, kind, action.microbatch, made.pop("sent"))
        self._bound(rank, token)

    def _send(
        self, rank: int, stage: int, kind: Kind, microbatch: int, arrays: list[jax.Array]
    ) -> None:
        """Moves what an action made to the rank that takes it."""
        forward = kind.op == "F"
        step = (0 if kind.last else 1) if forward else -1
        target, chunk = self._places[stage + step]
        if target != rank:
            arrays = jax.device_put(arrays, self._shardings[target])
        name = "x" if forward and not kind.last else "g"
        self._stashes[target].put(name, chunk, microbatch, arrays)

    def _bound(self, rank: int, token: jax.Array) -> None:
        """Waits until the rank has no more than some actions before it."""
        tokens = self._tokens[rank]
        tokens.append(token)
        if len(tokens) > AHEAD:
            tokens.popleft().block_until_ready()


def is_one_process(mesh: ProcessMesh) -> bool:
    """Whether this process has all devices of a mesh."""
    return _processes(mesh) == {jax.process_index()}


def check_one_process(mesh: ProcessMesh, asked: str) -> None:
    """Refuses a mesh with devices of other processes.

    Args:
      mesh: the mesh.
      asked: what asks for this executor.

    Raises:
      NotImplementedError: there are some.
    """
    if not is_one_process(mesh):
        raise NotImplementedError(
            f"{asked} over several processes: the mesh has devices of processes "
            f"{sorted(_processes(mesh) | {jax.process_index()})}, and one host drives all ranks. "
            "executor='program' runs over any number of processes"
        )


def _processes(mesh: ProcessMesh) -> set[int]:
    return {device.process_index for device in mesh.jax_mesh.devices.flat}


def _without(layout: Layout, axis: str) -> Layout:
    return Layout(tuple(tuple(a for a in dim if a != axis) for dim in layout.dims))
