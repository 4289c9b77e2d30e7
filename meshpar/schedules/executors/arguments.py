"""The arguments of `mp.pipeline`, checked and put in the form that executors take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshpar._jax import is_tracer
from meshpar.compiler.arguments import asked_layouts, leaf_names
from meshpar.errors import MeshparError, PlacementError
from meshpar.mesh import ProcessMesh
from meshpar.placements.blocks import is_even
from meshpar.placements.layout import Layout
from meshpar.placements.values import layout_of, mesh_of
from meshpar.schedules.executors.local_actions import Placed, Stages
from meshpar.schedules.executors.stage import is_differentiable
from meshpar.schedules.named import generate
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.validation import validate

__all__ = [
    "NAMES",
    "Functions",
    "PipelineError",
    "layouts_of",
    "sizes_of",
    "stages_of",
    "table_for",
]

NAMES: tuple[str, ...] = (
    "stacked_params",
    "first_params",
    "last_params",
    "microbatches",
    "targets",
    "extras",
)
"""The pytrees that a pipeline takes, in order."""

Trees = Mapping[str, Any]
Fn = Callable[..., Any]


class PipelineError(MeshparError):
    """A model, a batch or a schedule that do not make a pipeline."""


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a model in stages, as the user gives them."""

    stage: Fn
    first: Fn | None
    last: Fn | None
    loss: Fn | None


def sizes_of(trees: Trees, mesh: ProcessMesh, axis: str) -> tuple[int, int, int]:
    """The numbers of ranks, of microbatches and of stages on a rank.

    Raises:
      PipelineError: leading dims that differ, or stages that the ranks do not share evenly.
    """
    P = mesh.get_dim_size(axis)
    S = _leading(trees, ("stacked_params",), "stages")
    M = _leading(trees, ("microbatches", "targets", "extras"), "microbatches")
    if S % P:
        raise PipelineError(
            "pipeline(stacked_params): the ranks cannot share the stages evenly.",
            stages=f"{S}, the leading dim of stacked_params",
            ranks=f"{P}, mesh axis {axis!r} of {mesh}",
            because=f"{S} % {P} = {S % P}",
            instead=f"put several layers into a stage, or stack {-(-S // P) * P} stages",
        )
    return P, M, S // P


def table_for(schedule: Schedule | str, sizes: tuple[int, int, int]) -> Schedule:
    """The table that is asked for, by name or as it is.

    Raises:
      PipelineError: a table for another number of ranks, stages or microbatches.
      ValueError: an unknown name, or one that is for other numbers of stages on a rank.
    """
    if isinstance(schedule, str):
        return generate(schedule, *sizes)
    P, M, V = sizes
    if sizes != (schedule.P, schedule.M, schedule.V):
        raise PipelineError(
            f"pipeline(schedule): {schedule.title} is for another pipeline.",
            because=f"{P} ranks, {M} microbatches and {P * V} stages are P={P}, M={M}, V={V}",
            instead=f'schedule="{schedule.name}", which makes it for these sizes',
        )
    validate(schedule)
    return schedule


def layouts_of(
    trees: Trees, asked: Mapping[str, Any], mesh: ProcessMesh, axis: str
) -> dict[str, list[Layout]]:
    """The layout of every leaf: as asked, as it lies, else replicated but over `axis`.

    Raises:
      PlacementError: placements that do not fit.
    """
    unknown = set(asked) - set(NAMES)
    if unknown:
        raise PlacementError(
            f"pipeline(in_placements): no argument is called {', '.join(sorted(unknown))}.",
            instead=f"a dict with some of {', '.join(NAMES)}",
        )
    out: dict[str, list[Layout]] = {}
    for name in NAMES:
        leaves = jax.tree.leaves(trees[name])
        found = asked_layouts(
            asked.get(name), trees[name], mesh, f"in_placements[{name!r}]", [x.ndim for x in leaves]
        )
        out[name] = [
            layout or _lies(leaf, mesh) for layout, leaf in zip(found, leaves, strict=True)
        ]
        for leaf, layout, text in zip(
            leaves, out[name], leaf_names(trees[name], name), strict=True
        ):
            _check_layout(leaf, layout, text, name, mesh, axis)
    return out


def stages_of(
    functions: Functions,
    trees: Trees,
    layouts: Mapping[str, list[Layout]],
    axis: str,
    *,
    recompute: bool,
) -> Stages:
    """The model on one microbatch, checked by tracing shapes.

    Raises:
      PipelineError: a stage whose output is not like its input, an input that is not of floats, or
        a loss that is not a scalar.
    """
    for name, fn in (("first", functions.first), ("last", functions.last)):
        if fn is None and jax.tree.leaves(trees[f"{name}_params"]):
            raise PipelineError(
                f"pipeline({name}_params): nothing takes them.",
                instead=f"{name}_fn=..., which does",
            )
    one = {
        name: Placed(_without_lead(trees[name]), tuple(Layout(y.dims[1:]) for y in layouts[name]))
        for name in ("stacked_params", "microbatches", "targets", "extras")
    }
    ends = {
        name: Placed(_structs(trees[name]), tuple(_without_axis(y, axis) for y in layouts[name]))
        for name in ("first_params", "last_params")
    }
    has_extras = bool(one["extras"].leaves)

    def stage(own: Any, x: Any, extras: Any) -> Any:
        return functions.stage(own, x, extras) if has_extras else functions.stage(own, x)

    def last(params: Any, y: Any, target: Any) -> Any:
        out = y if functions.last is None else functions.last(params, y)
        return out if functions.loss is None else functions.loss(out, target)

    stages = Stages(
        stage,
        one["stacked_params"],
        one["extras"],
        functions.first,
        ends["first_params"],
        one["microbatches"],
        last,
        ends["last_params"],
        one["targets"],
        recompute,
    )
    _check_shapes(stages, scalar=functions.loss is not None)
    return stages


def _check_shapes(stages: Stages, *, scalar: bool) -> None:
    x = stages.microbatch.tree
    if stages.first is not None:
        x = _shape_of("first_fn", stages.first, stages.first_params.tree, x)
    wrong = [leaf for leaf in jax.tree.leaves(x) if not is_differentiable(leaf)]
    if wrong:
        raise PipelineError(
            f"pipeline: the first stage's input is {_shown(x)}.",
            because="stages pass floats, which have gradients, from one to the next",
            instead="first_fn=lambda params, tokens: params[tokens] turns tokens into floats; what "
            "every stage needs besides goes into extras",
        )
    y = _shape_of("stage_fn", stages.stage, stages.own.tree, x, stages.extras.tree)
    if _shown(y) != _shown(x):
        raise PipelineError(
            "pipeline(stage_fn): a stage's output is not like its input.",
            input=_shown(x),
            output=_shown(y),
            where="every stage and microbatch: stage_fn is traced once for all of them",
            because="the output of every stage is the input of the next, of the same function",
            instead="what changes shape or dtype goes into first_fn or last_fn",
        )
    last = "loss_fn" if scalar else "last_fn"
    result = _shape_of(last, stages.last, stages.last_params.tree, y, stages.target.tree)
    if scalar and [leaf.shape for leaf in jax.tree.leaves(result)] != [()]:
        raise PipelineError(
            f"pipeline(loss_fn): it returns {_shown(result)} for a microbatch, not a scalar.",
            instead="loss_fn=lambda out, target: ((out - target) ** 2).mean()",
        )


def _shape_of(name: str, fn: Fn, *args: Any) -> Any:
    """The structs that a function returns.

    Raises:
      PipelineError: its shapes depend on values, so they would change between microbatches.
    """
    try:
        return jax.eval_shape(fn, *args)
    except _OF_VALUES as error:
        raise PipelineError(
            f"pipeline({name}): a shape, an index or a branch in it depends on the values of a "
            "microbatch.",
            takes=_shown(args[1]),
            found=str(error).partition("\n")[0],
            because="every stage and microbatch runs what is traced once, so all have one shape",
            instead="jnp.where(mask, y, 0.0) on the whole shape, the mask among extras or targets",
        ) from error


_OF_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    IndexError,  # x[:n] and x[mask] of traced n and mask
)


def _leading(trees: Trees, names: tuple[str, ...], what: str) -> int:
    """The leading dim that all leaves share."""
    sizes = {
        text: np.shape(leaf)[0] if np.ndim(leaf) else None
        for name in names
        for text, leaf in zip(
            leaf_names(trees[name], name), jax.tree.leaves(trees[name]), strict=True
        )
    }
    if len(set(sizes.values())) != 1 or None in sizes.values() or 0 in sizes.values():
        shown = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        if set(sizes.values()) == {0}:
            raise PipelineError(f"pipeline({', '.join(names)}): there are no {what}.", sizes=shown)
        listed = next((name for name in names if _is_list(trees[name])), None)
        raise PipelineError(
            f"pipeline({', '.join(names)}): dim 0 is not the same number of {what} everywhere.",
            sizes=shown or "there are no arrays",
            **({} if listed is None else _of_list(listed, trees[listed], what)),
            instead=f"stack {what} along a new dim 0, as jnp.stack(...) does"
            if listed is None
            else f"jax.tree.map(lambda *each: jnp.stack(each), *{listed})",
        )
    (size,) = set(sizes.values())
    assert size is not None, "arrays without dims were refused"
    return size


def _is_list(tree: Any) -> bool:
    """Whether a pytree is a list of things of one structure, such as one for each microbatch."""
    if not isinstance(tree, (list, tuple)) or not tree:
        return False
    return len({jax.tree.structure(one) for one in tree}) == 1


def _of_list(name: str, tree: Sequence[Any], what: str) -> dict[str, str]:
    """What to say of a list, if its items are meant to be the microbatches or the stages."""
    one = what.removesuffix("es") if what.endswith("ches") else what.removesuffix("s")
    first = _shown(tree[0])
    other = next((k for k, each in enumerate(tree) if _shown(each) != first), None)
    said = {"because": f"{name} is a list of {len(tree)}, and {what} are one array"}
    if other is not None:
        said["shapes"] = f"{one} 0 is {first}, {one} {other} is {_shown(tree[other])}"
        said["because"] = (
            f"all {what} run what is traced once, so they have one shape; pad those that are "
            "smaller, and mask the padding"
        )
    return said


def _lies(leaf: Any, mesh: ProcessMesh) -> Layout:
    known = None
    if not is_tracer(leaf) and mesh_of(leaf) == mesh:
        known = layout_of(leaf)
    return known or Layout.replicated(leaf.ndim)


def _check_layout(
    leaf: Any, layout: Layout, text: str, name: str, mesh: ProcessMesh, axis: str
) -> None:
    ends = name in ("first_params", "last_params")
    allowed = {(), (axis,)} if name == "stacked_params" else {()}
    if not ends:
        lead = layout.dims[0] if layout.ndim else ()
        if lead not in allowed or axis in [a for dim in layout.dims[1:] for a in dim]:
            raise PlacementError(
                f"pipeline({text}): {layout.placements(mesh)} on {mesh}.",
                because=f"dim 0 counts {'stages' if len(allowed) == 2 else 'microbatches'}, and "
                f"mesh axis {axis!r} holds stages: no other axis cuts dim 0, nor {axis!r} another",
                instead=f"in_placements={{{name!r}: [...]}} that cuts the dims after the first",
            )
    if layout.partial or not is_even(tuple(leaf.shape), layout, mesh.axis_sizes):
        raise PlacementError(
            f"pipeline({text}): {layout.placements(mesh)} on {mesh} for shape {tuple(leaf.shape)}.",
            because="parameters and microbatches of a pipeline have no pending reductions, and "
            "dims that the axes divide",
            instead="mp.reshard it to placements that do, such as Replicate()",
        )


def _without_axis(layout: Layout, axis: str) -> Layout:
    return Layout(tuple(tuple(a for a in dim if a != axis) for dim in layout.dims))


def _without_lead(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def _structs(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _shown(tree: Any) -> str:
    leaves, structure = jax.tree.flatten(tree)
    shapes = [f"{x.dtype}{list(x.shape)}" for x in leaves]
    return shapes[0] if len(shapes) == 1 else f"{structure} of {', '.join(shapes)}"
