"""`Strategy`: the options of `to_static`, in groups, with Paddle's fields and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from meshpar.training.options import Options, default_of
from meshpar.training.strategy_groups import (
    AMPConfig,
    DatasetConfig,
    DPOptimizationConfig,
    FusedLinearPromotionConfig,
    FusedPassesConfig,
    GradientMergeConfig,
    MPOptimizationConfig,
    PipelineConfig,
    QATConfig,
    RecomputeConfig,
    ShardingConfig,
    SPOptimizationConfig,
    TuningConfig,
)

__all__ = ["Strategy", "check_acts"]


@dataclass(slots=True, init=False, repr=False)
class Strategy(Options):
    """The options of `to_static`.

    What acts: `sharding.enable`, `.stage`, `.degree` (ZeRO); `data_axes`; and of `pipeline`
    `enable`, `axis`, `executor`, `schedule_mode`, `accumulate_steps` or `micro_batch_size`,
    `pp_degree`, `vpp_degree`, `vpp_seg_method`, `split_spec`, `split_backward`, and with it
    `recompute.enable`.
    The other fields are there with Paddle's defaults, and `to_static` raises `NotImplementedError`
    for one that is set.

    With `pipeline` the model's run of equal layers is found in its program and shared out, in
    order, over the ranks along the mesh axis `pipeline.axis`; what comes before them runs on the
    first stage's rank, what comes after and the loss on the last one's. Stages are given by
    `split_spec`, a dict from names of modules to `SplitPoint` with one point less than stages; or
    the name of a list of modules, shared out evenly; or `vpp_seg_method="layer:Name"`, the modules
    of a class likewise; or by the layers' parameters, placed on the mesh of a rank,
    `mesh.get_mesh_with_dim("pp")[rank]` of the default mesh; else evenly. A stage may have no
    layers; a point before the first layer or after the last counts as that end of the run. Two
    stages need no equal layers: without them they are halves of equal cost. `schedule_mode` is a
    name of `schedules.NAMES` or "auto". `accumulate_steps` is the number of microbatches into which
    the batch is cut, `micro_batch_size` the most rows of one on each device; the last microbatches
    may be smaller. A step equals the step without a pipeline, random numbers and means over the
    whole batch included. Every parameter lies cut over the axis where its dims allow; scanned
    layers lie where they are used, unrolled ones move to their rank once a step. With
    `recompute.enable` a stage keeps its input only, and runs again in the backward pass.
    `executor` is that of `mp.pipeline`: "program", "mpmd", or "auto".

    Args:
      config: field -> value, and group -> dict of its fields.

    Raises:
      ValueError: `config` is not a dict, or has a key that is no field.
      TypeError: a value of another type than the field's.

    Example:
      >>> strategy = Strategy({"sharding": {"enable": True, "stage": 2}})
      >>> strategy.sharding.stage = 3
      >>> strategy
      Strategy({'sharding': {'enable': True, 'stage': 3}})

    Follows `paddle.distributed.Strategy` (3.3.1). Deviations: unknown keys raise instead of being
    ignored; the groups that Paddle hides (`recompute`, `dp_optimization`, ...) are public;
    `data_axes` is ours: the mesh axes that cut dim 0 of the batch, by default those of dp, fsdp
    and sharding that the mesh has.
    """

    auto_mode: str = "semi"
    gradient_scale: bool = True
    gradient_scale_using_allreduce_avg: bool = False
    use_cache: bool = True
    return_numpy: bool = True
    all_ranks: bool = False
    split_data: bool = True
    seed: int | None = None
    reinit: bool = False
    full_graph: bool = True
    data_axes: tuple[str, ...] | None = None
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    amp: AMPConfig = field(default_factory=AMPConfig)
    gradient_merge: GradientMergeConfig = field(default_factory=GradientMergeConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    qat: QATConfig = field(default_factory=QATConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    fused_linear_promotion: FusedLinearPromotionConfig = field(
        default_factory=FusedLinearPromotionConfig
    )
    fused_passes: FusedPassesConfig = field(default_factory=FusedPassesConfig)
    dp_optimization: DPOptimizationConfig = field(default_factory=DPOptimizationConfig)
    mp_optimization: MPOptimizationConfig = field(default_factory=MPOptimizationConfig)
    sp_optimization: SPOptimizationConfig = field(default_factory=SPOptimizationConfig)

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        config = {} if config is None else config
        if not isinstance(config, Mapping):
            raise ValueError(
                f"Strategy(config): config is a {type(config).__name__}; it must be a dict such as "
                '{"sharding": {"enable": True, "stage": 2}}'
            )
        known = {f.name: f for f in fields(self)}
        for name, f in known.items():
            object.__setattr__(self, name, default_of(f))
        for name, value in config.items():
            _check_key(name, known, "Strategy(config)")
            group = getattr(self, name)
            if not isinstance(group, Options):
                setattr(self, name, value)
                continue
            if not isinstance(value, Mapping):
                raise ValueError(f"Strategy(config): {name!r} is a group and takes a dict of it")
            for key, inner in value.items():
                _check_key(key, group.to_dict(), f"Strategy(config), group {name!r}")
                setattr(group, key, inner)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Strategy:
        """The strategy with the given fields and groups set."""
        return cls(config)

    def to_dict(self) -> dict[str, Any]:
        """Every field and group, groups as dicts."""
        return {
            f.name: value.to_dict() if isinstance(value, Options) else value
            for f in fields(self)
            for value in [getattr(self, f.name)]
        }

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, by group."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Options):
                if value.changed():
                    out[f.name] = value.changed()
            elif value != f.default:
                out[f.name] = value
        return out

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(getattr(self, name, None), Options):
            raise AttributeError(
                f"Strategy.{name} is a group and cannot be assigned; set its fields, as in "
                f"strategy.{name}.{fields(getattr(self, name))[0].name} = ..."
            )
        # super() without arguments does not work in a slotted dataclass
        Options.__setattr__(self, name, value)

    def __repr__(self) -> str:
        changed = self.changed()
        return f"Strategy({changed})" if changed else "Strategy()"


_ACTING = {
    "data_axes",
    "pipeline.accumulate_steps",
    "pipeline.axis",
    "pipeline.enable",
    "pipeline.executor",
    "pipeline.micro_batch_size",
    "pipeline.pp_degree",
    "pipeline.schedule_mode",
    "pipeline.split_backward",
    "pipeline.split_spec",
    "pipeline.vpp_degree",
    "pipeline.vpp_seg_method",
    "recompute.enable",
    "sharding.enable",
    "sharding.stage",
    "sharding.degree",
}


def check_acts(strategy: Strategy) -> None:
    """Raises for a field that is set and has no effect.

    Raises:
      NotImplementedError: names the field.
      ValueError: a field of `sharding` or `pipeline` is set and its `enable` is not, or no such
        stage.
    """
    for name, value in strategy.changed().items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, setting in inner:
            path = f"{name}.{key}" if key else name
            if path not in _ACTING:
                raise NotImplementedError(
                    f"Strategy.{path} = {setting!r} does not act yet; what acts: "
                    + ", ".join(sorted(_ACTING))
                )
    if strategy.recompute.enable and not strategy.pipeline.enable:
        raise NotImplementedError(
            "Strategy.recompute.enable without Strategy.pipeline.enable does not act yet; "
            "jax.remat or flax.nnx.remat around a layer recomputes it"
        )
    sharding = strategy.sharding
    for name, group in (("sharding", sharding), ("pipeline", strategy.pipeline)):
        if not group.enable and group.changed():
            key, setting = next(iter(group.changed().items()))
            raise ValueError(
                f"Strategy.{name}.{key} = {setting!r} has no effect without "
                f"Strategy.{name}.enable = True"
            )
    if sharding.stage not in (1, 2, 3):
        raise ValueError(
            f"Strategy.sharding.stage = {sharding.stage}: the stages are 1 (optimizer state), "
            "2 (gradients too) and 3 (parameters too)"
        )


def _check_key(name: str, known: Mapping[str, object], where: str) -> None:
    if name not in known:
        raise ValueError(f"{where}: no field {name!r}; the fields are {', '.join(known)}")
