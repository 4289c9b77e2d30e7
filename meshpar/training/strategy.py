"""`Strategy`: the options of `to_static`, in groups, with Paddle's fields and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from meshpar.training.options import Options

__all__ = ["ShardingConfig", "Strategy", "check_acts"]


def _list(*values: object) -> list[Any]:
    return field(default_factory=lambda: list(values))


@dataclass(slots=True, repr=False)
class ShardingConfig(Options):
    """ZeRO: which part of the training state is cut over the data axis."""

    enable: bool = False
    stage: int = 1  # 1 optimizer state; 2 gradients too; 3 parameters too
    degree: int = 8  # another number than the default must be the size of the axis
    enable_overlap: bool = False
    param_comm_stream_num: int = 1
    grad_comm_stream_num: int = 1
    param_bucket_size_numel: int = 1
    grad_bucket_size_numel: int = 1
    enable_hierarchical_comm: bool = False
    partition_algor: str = "greedy_even"
    enable_tuning: bool = False
    tuning_range: list[Any] = _list()
    release_gradients: bool = False
    comm_buffer_size_MB: int = 256  # Paddle's spelling
    enable_tensor_fusion: bool = False
    save_unbalanced_param: bool = True


@dataclass(slots=True, repr=False)
class RecomputeConfig(Options):
    """Recomputation of activations in the backward pass."""

    enable: bool = False
    checkpoints: list[Any] = _list()
    no_recompute_segments: list[Any] = _list()
    sr: int = 0
    refined_ops_patterns: list[Any] = _list()
    enable_tuning: bool = False


@dataclass(slots=True, repr=False)
class AMPConfig(Options):
    """Mixed precision."""

    enable: bool = False
    dtype: str = "float16"
    level: str = "o1"
    init_loss_scaling: float = 32768.0
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8
    use_dynamic_loss_scaling: bool = True
    custom_white_list: list[Any] = _list()
    custom_black_list: list[Any] = _list()
    custom_black_varnames: list[Any] = _list()
    use_fp16_guard: bool = False
    use_bf16_guard: bool = False
    use_master_grad: bool = False
    use_promote: bool = True


@dataclass(slots=True, repr=False)
class GradientMergeConfig(Options):
    """Gradients of several steps in one update."""

    enable: bool = False
    k_steps: int = 1
    avg: bool = True


@dataclass(slots=True, repr=False)
class PipelineConfig(Options):
    """Pipeline parallelism."""

    enable: bool = False
    schedule_mode: str = "1F1B"
    pp_degree: int = 1
    vpp_degree: int = 1
    vpp_seg_method: str = ""
    micro_batch_size: int = 1
    accumulate_steps: int = 1
    generation_batch_size: int = 1
    enable_send_recv_overlap: bool = False
    job_schedule_profiler_start: int = -1
    job_schedule_profiler_stop: int = -1
    program_runtimes: list[Any] = _list(61, 72, 71, 34, 3)
    memory_limit_times: int = -1
    split_backward: bool = False
    auto_parallel_sync_shared_params: bool = False


@dataclass(slots=True, repr=False)
class QATConfig(Options):
    """Quantisation-aware training."""

    enable: bool = False
    channel_wise_abs_max: bool = True
    weight_bits: int = 8
    activation_bits: int = 8
    not_quant_pattern: list[Any] = _list("skip_quant")
    algo: str | None = None
    onnx_format: bool = True


@dataclass(slots=True, repr=False)
class TuningConfig(Options):
    """Profile-based tuning."""

    enable: bool = False
    profile_start_step: int = 1
    profile_end_step: int = 1
    run_after_tuning: bool = True
    debug: bool = False


@dataclass(slots=True, repr=False)
class DatasetConfig(Options):
    """Shards of the data set."""

    enable: bool = False
    num_shards: int = 1


@dataclass(slots=True, repr=False)
class FusedLinearPromotionConfig(Options):
    """Earlier fusion of linear operations."""

    enable: bool = False


@dataclass(slots=True, repr=False)
class FusedPassesConfig(Options):
    """Fusions; the fields of both of Paddle's `Strategy` classes."""

    enable: bool = False
    gemm_epilogue: bool = False
    dropout_add: bool = False
    fused_passes_list: list[Any] = _list()


@dataclass(slots=True, repr=False)
class DPOptimizationConfig(Options):
    """Buckets and overlap of data parallelism's reductions."""

    enable: bool = False
    fuse_all_reduce_ops: bool = True
    fuse_grad_size_in_MB: int = 32  # Paddle's spelling
    overlap_comm_cacl: bool = True  # Paddle's spelling
    gradient_sync_after_accumulate: bool = False


@dataclass(slots=True, repr=False)
class MPOptimizationConfig(Options):
    """Rewrites of tensor parallelism."""

    allreduce_matmul_grad_overlapping: bool = False
    replace_with_c_embedding: bool = False
    replace_with_parallel_cross_entropy: bool = False


@dataclass(slots=True, repr=False)
class SPOptimizationConfig(Options):
    """Rewrites of sequence parallelism."""

    enable: bool = True


@dataclass(slots=True, init=False, repr=False)
class Strategy(Options):
    """The options of `to_static`.

    What acts: `sharding.enable`, `.stage`, `.degree` (ZeRO) and `data_axes`. The other fields are
    there with Paddle's defaults, and `to_static` raises `NotImplementedError` for one that is set.

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
            default = f.default_factory() if callable(f.default_factory) else f.default
            object.__setattr__(self, name, default)
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
    "sharding.enable",
    "sharding.stage",
    "sharding.degree",
}


def check_acts(strategy: Strategy) -> None:
    """Raises for a field that is set and has no effect.

    Raises:
      NotImplementedError: names the field.
      ValueError: a field of `sharding` is set and `sharding.enable` is not, or no such stage.
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
    sharding = strategy.sharding
    if not sharding.enable and sharding.changed():
        key, setting = next(iter(sharding.changed().items()))
        raise ValueError(
            f"Strategy.sharding.{key} = {setting!r} has no effect without "
            "Strategy.sharding.enable = True"
        )
    if sharding.stage not in (1, 2, 3):
        raise ValueError(
            f"Strategy.sharding.stage = {sharding.stage}: the stages are 1 (optimizer state), "
            "2 (gradients too) and 3 (parameters too)"
        )


def _check_key(name: str, known: Mapping[str, object], where: str) -> None:
    if name not in known:
        raise ValueError(f"{where}: no field {name!r}; the fields are {', '.join(known)}")
