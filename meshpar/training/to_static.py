"""`to_static`: a model, a loss and an optimizer become a `DistModel` on a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from meshpar.errors import MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout
from meshpar.training.adapters import Adapter, adapt
from meshpar.training.axes import data_axes, mesh_for, zero_axis
from meshpar.training.batch import BatchPlacer, read_input_spec
from meshpar.training.dist_model import DistModel
from meshpar.training.optimizer_state import create_optimizer_state, optimizer_slots
from meshpar.training.pipeline_options import Pipeline, pipeline_of
from meshpar.training.stages import ShardedOptimizer, ShardingStage, cut_over
from meshpar.training.state import Arrays, Slots, owned_copy, slots_of
from meshpar.training.step import Partitioner, Recipe, State
from meshpar.training.strategy import Strategy, check_acts

__all__ = ["to_static"]


def to_static(
    model: Any,
    *positional: Any,
    strategy: Strategy | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: optax.GradientTransformation | ShardedOptimizer | None = None,
    loader: Any = None,
    input_spec: Any = None,
    partitioner: Partitioner = "meshpar",
) -> DistModel:
    """Compiles training, evaluation and prediction of a model for the mesh that it lies on.

    `to_static(model, strategy, loss=..., optimizer=...)`; Paddle's positional order
    `(model, loader, loss, optimizer, strategy, input_spec)` is understood as well.

    Args:
      model: a flax `nnx.Module`; `(linen.Module, variables)`, optionally with a dict of random
        keys as third; or `(apply, params)` with a function `apply(params, batch)`.
      *positional: the strategy, or Paddle's order from `loader` on.
      strategy: options; see `Strategy` for what acts.
      loss: called as `loss(*outputs, *labels)`, for a function model as `loss(outputs, batch)`;
        returns a scalar, or `(sum, count)`, whose quotient is the loss; the count has no gradient.
        `None`: the model returns its own loss.
      optimizer: an optax transformation, or what `shard_optimizer` made of one.
      loader: may say where its batches belong (`batch_placements`); no batch is taken from it.
      input_spec: where the leaves of a batch belong: one spec per argument, such as `[Shard(0)]`,
        or two lists, of the inputs and of the labels. Without it the last argument is the label.
      partitioner: "meshpar" plans the collectives itself, and `DistModel.plan` shows them; "xla"
        leaves them to XLA's partitioner.

    Returns:
      A `DistModel`, in no mode yet. It holds copies: neither the model nor its arrays change.

      Its mesh is that of the placed parameters, else the default mesh. Parameters lie as they
      are placed, replicated where they are not; optimizer state lies as its parameter; ZeRO stages
      cut them further. A leaf of a batch that is placed stays; else the placement in `input_spec`,
      else the loader's, else `Shard(0)` over `Strategy.data_axes`, else replicated with a warning.

    Raises:
      ValueError: a model without parameters, two different ZeRO stages.
      MeshError: no mesh, two meshes, or an axis that the mesh does not have.
      NotImplementedError: an option of the strategy that does not act.
      TypeError: not a model, a strategy, or an optax transformation.

    Example:
      >>> import jax.numpy as jnp, meshpar as mp
      >>> with mp.ProcessMesh([0], ["dp"]):
      ...     dm = mp.to_static(
      ...         (lambda params, x: x @ params, jnp.ones((4, 1))),
      ...         loss=lambda y, x: (y**2).mean(),
      ...         optimizer=optax.sgd(0.01),
      ...     )
      >>> dm.train()
      >>> dm(jnp.ones((2, 4)))
      Array(16., dtype=float32)

    Follows `paddle.distributed.to_static` (3.3.1).
    """
    named = {
        "strategy": strategy,
        "loss": loss,
        "optimizer": optimizer,
        "loader": loader,
        "input_spec": input_spec,
    }
    if partitioner not in ("meshpar", "xla"):
        raise ValueError(f"to_static(partitioner={partitioner!r}): it is 'meshpar' or 'xla'")
    options = _options(positional, named)
    strategy = Strategy() if options["strategy"] is None else options["strategy"]
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"to_static(strategy): a {type(strategy).__name__} is no Strategy; "
            'Strategy({"sharding": {"enable": True}}) makes one'
        )
    check_acts(strategy)
    tx, stage = _optimizer(options["optimizer"], strategy)
    adapter = adapt(model)
    try:
        mesh, ranks = mesh_for(adapter, stage, strategy)
        axis, number = zero_axis(stage, strategy, mesh)
        pipeline = pipeline_of(strategy, mesh, model, ranks)
        return _assembled(adapter, mesh, strategy, tx, axis, number, options, partitioner, pipeline)
    except MeshparError as error:
        raise error.within("to_static(model)", model=adapter.name) from None


def _assembled(
    adapter: Adapter,
    mesh: ProcessMesh,
    strategy: Strategy,
    tx: optax.GradientTransformation | None,
    axis: str | None,
    stage: int,
    options: dict[str, Any],
    partitioner: Partitioner,
    pipeline: Pipeline | None,
) -> DistModel:
    def cut(shape: tuple[int, ...], layout: Layout) -> Layout:
        return layout if axis is None else cut_over(axis, shape, layout, mesh.axis_sizes)

    def taken(tree: Any, slots: Slots) -> Arrays:
        leaves = zip(jax.tree.leaves(tree), slots.leaves, strict=True)
        return tuple(owned_copy(leaf, slot.layout, mesh) for leaf, slot in leaves)

    params, rest = slots_of(adapter.params, mesh), slots_of(adapter.rest, mesh)
    _check_names(params, rest)
    if pipeline is not None:
        by_rank = (
            cut_over(pipeline.axis, slot.shape, slot.layout, mesh.axis_sizes)
            for slot in params.leaves
        )
        params = params.with_layouts(by_rank)
    cuts = params.with_layouts(cut(slot.shape, slot.layout) for slot in params.leaves)
    params = cuts if stage >= 3 else params
    stored, opt, opt_arrays = taken(adapter.params, params), None, ()
    if tx is not None:
        opt = optimizer_slots(tx, params, cut)
        opt_arrays = create_optimizer_state(tx, params, stored, opt)
    spec = read_input_spec(options["input_spec"])
    has_labels = options["loss"] is not None and not adapter.whole_batch
    recipe = Recipe(
        adapter=adapter,
        loss=options["loss"],
        tx=tx,
        params=params,
        rest=rest,
        opt=opt,
        grads=cuts if stage >= 2 else None,
        num_labels=int(has_labels) if spec.num_labels is None else spec.num_labels,
        partitioner=partitioner,
        pipeline=pipeline,
    )
    placer = BatchPlacer(
        mesh,
        data_axes(strategy, mesh),
        spec,
        options["loader"],
        warn=strategy.data_axes is None and pipeline is None,
    )
    return DistModel(recipe, State(stored, taken(adapter.rest, rest), opt_arrays), placer)


def _options(positional: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, whichever of the two positional orders was used."""
    paddle = ("loader", "loss", "optimizer", "strategy", "input_spec")
    ours = len(positional) == 1 and (positional[0] is None or isinstance(positional[0], Strategy))
    order = ("strategy",) if ours else paddle
    if len(positional) > len(order):
        raise TypeError(
            f"to_static: {len(positional) + 1} positional arguments; it takes (model, strategy), "
            f"or Paddle's (model, {', '.join(paddle)})"
        )
    out = dict(named)
    for name, value in zip(order, positional, strict=False):
        if value is not None and out[name] is not None:
            raise TypeError(f"to_static: {name} is given both by position and by name")
        out[name] = value if out[name] is None else out[name]
    if isinstance(out["loader"], Mapping):
        raise TypeError(
            "to_static(loader): a dict is no loader of batches; Strategy({...}) makes a strategy "
            "of one"
        )
    return out


def _optimizer(
    optimizer: Any, strategy: Strategy
) -> tuple[optax.GradientTransformation | None, ShardingStage | None]:
    if optimizer is None:
        return None, None
    if isinstance(optimizer, ShardedOptimizer):
        stage = optimizer.stage
        asked = strategy.sharding
        if stage is not None and asked.enable and asked.stage != stage.stage:
            raise ValueError(
                f"to_static: Strategy.sharding.stage is {asked.stage} and the optimizer was "
                f"sharded by {stage!r}; give one of them"
            )
        return optimizer.transformation, stage
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"to_static(optimizer): a {type(optimizer).__name__} is no optax transformation, such "
            "as optax.adamw(1e-3)"
        )
    return optimizer, None


def _check_names(params: Slots, rest: Slots) -> None:
    names = Counter(slot.name for slot in (*params.leaves, *rest.leaves))
    twice = sorted(name for name, times in names.items() if times > 1)
    if twice:
        raise ValueError(f"to_static(model): two leaves are named {', '.join(twice)}")
