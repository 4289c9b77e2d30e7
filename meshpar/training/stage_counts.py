"""How many layers each stage has, from what the user said about modules or parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from meshpar.compiler.program import Program
from meshpar.schedules import Schedule
from meshpar.schedules.executors.evaluate import depending_on, values_of
from meshpar.schedules.executors.layer_order import even_counts
from meshpar.schedules.executors.layers import LayerError, Layers, find_layers
from meshpar.schedules.executors.two_pieces import cut_in_two
from meshpar.schedules.stages import rank_of_stage
from meshpar.training.named_layers import NamedLayers, is_under
from meshpar.training.split_point import AtModules, OverModules, SplitPoint

__all__ = ["OnRanks", "Stages", "shared_out"]


@dataclass(frozen=True, slots=True)
class OnRanks:
    """Parameters that lie on the mesh of one rank.

    Args:
      ranks: name of a parameter, and the rank.
    """

    ranks: tuple[tuple[str, int], ...]


Stages = AtModules | OverModules | OnRanks
"""What the user said about stages."""


def shared_out(
    stages: Stages,
    names: Sequence[str],
    schedule: Schedule,
    program: Program,
    params: Sequence[int],
    batch: Sequence[int],
) -> tuple[Layers, Sequence[int]]:
    """The layers of a model, and how many each stage has.

    Args:
      stages: what the user said.
      names: the names of the trained inputs.
      schedule: the table.
      program: the forward pass of a model, to its loss or its outputs.
      params: the inputs that are trained.
      batch: the inputs that are the batch.

    Raises:
      LayerError: it does not fit the model's layers.
    """
    named = dict(zip(params, names, strict=True))
    try:
        layers = find_layers(program, params, batch, 1)
        known = NamedLayers.of(layers, program, named)
        return layers, _counts(stages, known, schedule)
    except LayerError:
        layers = _in_two(stages, program, params, batch, named, schedule)
        if layers is None:
            raise
        return layers, (0, 0)


def _counts(stages: Stages, known: NamedLayers, schedule: Schedule) -> Sequence[int]:
    if isinstance(stages, OnRanks):
        return _by_rank(dict(stages.ranks), known, schedule)
    count = schedule.P * schedule.V
    if isinstance(stages, AtModules):
        return _at(stages, known, count)
    modules = [*known.matching(stages.prefixes)]
    for name in stages.names:
        stacked = known.stacked and known.bounds(name) == (0, known.count)
        modules += [f"{name}.{k}" for k in range(known.count)] if stacked else [name]
    ranges = sorted(known.bounds(name) for name in modules)
    if len(ranges) < count:
        raise LayerError(
            f"{len(ranges)} modules for {count} stages.",
            because=f"{stages.asked} names {', '.join(modules[:8])}",
            instead="fewer ranks or a smaller vpp_degree, or more modules",
        )
    ends = [0]
    for many in even_counts(len(ranges), count):
        ends.append(ends[-1] + many)
    bounds = [ranges[end - 1][1] for end in ends[1:-1]]
    return [hi - lo for lo, hi in pairwise([0, *bounds, known.count])]


def _at(stages: AtModules, known: NamedLayers, count: int) -> Sequence[int]:
    if len(stages.points) != count - 1:
        names = ", ".join(name for name, _ in stages.points) or "none"
        raise LayerError(
            f"{len(stages.points)} split points for {count} stages.",
            because=f"{count} stages meet at {count - 1} points; split_spec has {names}",
            instead=f"split_spec with {count - 1} modules, or the name of a list of layers",
        )
    bounds = [known.bounds(name)[side is SplitPoint.END] for name, side in stages.points]
    back = next((k for k, (lo, hi) in enumerate(pairwise(bounds)) if lo > hi), None)
    if back is not None:
        (first, _), (second, _) = stages.points[back : back + 2]
        raise LayerError(
            f"split_spec names {second!r} after {first!r}, which runs later.",
            instead="the split points in the order in which the model runs",
        )
    return [hi - lo for lo, hi in pairwise([0, *bounds, known.count])]


# --- by rank --------------------------------------------------------------------------------------


def _by_rank(ranks: Mapping[str, int], known: NamedLayers, schedule: Schedule) -> Sequence[int]:
    """Layers in runs on one rank, matched with the stages in order, which are in runs too."""
    if known.stacked:
        raise LayerError(
            "scanned layers lie on the meshes of single ranks.",
            because="their parameters are arrays of all layers",
            instead="place them on the whole mesh: stages are then shared out evenly, or by "
            'split_spec={"layers.1": mp.SplitPoint.END}',
        )
    places = [_rank_of(k, own, ranks) for k, own in enumerate(known.own)]
    _check_ends(known, ranks, places, schedule)
    runs = [(rank, len(list(run))) for rank, run in groupby(places)]
    stages = rank_of_stage(schedule.stages)
    counts: list[int] = []
    for rank, run in groupby(stages):
        width = len(list(run))
        many = runs.pop(0)[1] if runs and runs[0][0] == rank else 0
        counts += even_counts(many, width)
    if runs or (schedule.V > 1 and 0 in counts):
        raise LayerError(
            "the ranks of the layers are not those of the stages.",
            layers=f"on ranks {', '.join(map(str, places))}",
            stages=f"on ranks {', '.join(map(str, stages))}, of {schedule.name} with "
            f"{schedule.V} stages on a rank",
            instead="layers on mesh.get_mesh_with_dim(axis)[rank] in the order of the stages",
        )
    return counts


def _rank_of(layer: int, own: frozenset[str], ranks: Mapping[str, int]) -> int:
    found = {ranks[name]: name for name in sorted(own) if name in ranks}
    if len(found) == 1:
        return next(iter(found))
    shown = ", ".join(f"{name} on rank {rank}" for rank, name in sorted(found.items()))
    raise LayerError(
        f"layer {layer} lies on {'several ranks' if found else 'no rank'}.",
        parameters=shown or ", ".join(sorted(own)[:3]),
        because="a layer is computed on one rank, and other layers of the model say theirs",
        instead="all parameters of a layer on mesh.get_mesh_with_dim(axis)[rank] of one rank",
    )


def _check_ends(
    known: NamedLayers, ranks: Mapping[str, int], places: Sequence[int], schedule: Schedule
) -> None:
    """What comes before the layers runs on the first stage's rank, what comes after on the last's.

    A parameter that both take, such as a tied embedding, may lie on either.
    """
    stages = rank_of_stage(schedule.stages)
    for name in sorted(ranks.keys() & (known.before | known.after)):
        at = [stages[0]] if name in known.before else []
        at += [stages[-1]] if name in known.after else []
        if ranks[name] not in at:
            raise LayerError(
                f"{name!r} lies on rank {ranks[name]}.",
                because=f"it is used {'before' if name in known.before else 'after'} the layers, "
                f"on rank {at[0]}; the layers lie on ranks {', '.join(map(str, places))}",
                instead=f"shard_tensor(..., mesh.get_mesh_with_dim(axis)[{at[0]}], ...)",
            )


# --- two stages without layers --------------------------------------------------------------------


def _in_two(
    stages: Stages,
    program: Program,
    params: Sequence[int],
    batch: Sequence[int],
    names: Mapping[int, str],
    schedule: Schedule,
) -> Layers | None:
    """Two stages need no layers: any place where one array goes on will do."""
    if schedule.P * schedule.V != 2:
        return None
    if isinstance(stages, AtModules):
        if len(stages.points) != 1:
            return None
        ((module, side),) = stages.points
        mine, after = {v for v, n in names.items() if is_under(n, module)}, side is SplitPoint.END
        others = set[int]()
    elif isinstance(stages, OnRanks):
        first, second = rank_of_stage(schedule.stages)
        ranks = dict(stages.ranks)
        mine, after = {v for v, n in names.items() if ranks.get(n) == first}, True
        others = {v for v, n in names.items() if ranks.get(n) == second}
        if not others:
            return None
    else:
        return None
    positions = _uses(program, mine, batch)
    if not positions or any(p < positions[-1] for p in _uses(program, others, batch)):
        return None
    at = positions[-1] if after else positions[0]
    return cut_in_two(program, params, batch, at, after=after)


def _uses(program: Program, mine: set[int], batch: Sequence[int]) -> list[int]:
    """The positions of the operations on activations that take some parameters."""
    of_batch = depending_on(program, batch)
    weights = depending_on(program, mine) - of_batch
    return [
        position
        for position, node in enumerate(program.nodes)
        if not weights.isdisjoint(values_of(node.ins)) and not of_batch.isdisjoint(node.outs)
    ]
