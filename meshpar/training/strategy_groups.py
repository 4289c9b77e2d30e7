"""The groups of a `Strategy`, with Paddle's fields and defaults; `strategy` says what acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshpar.training.options import Options

__all__ = [
    "AMPConfig",
    "DPOptimizationConfig",
    "DatasetConfig",
    "FusedLinearPromotionConfig",
    "FusedPassesConfig",
    "GradientMergeConfig",
    "MPOptimizationConfig",
    "PipelineConfig",
    "QATConfig",
    "RecomputeConfig",
    "SPOptimizationConfig",
    "ShardingConfig",
    "TuningConfig",
]


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
    tuning_range: list[Any] = field(default_factory=list)
    release_gradients: bool = False
    comm_buffer_size_MB: int = 256  # Paddle's spelling
    enable_tensor_fusion: bool = False
    save_unbalanced_param: bool = True


@dataclass(slots=True, repr=False)
class RecomputeConfig(Options):
    """Recomputation of activations in the backward pass."""

    enable: bool = False
    checkpoints: list[Any] = field(default_factory=list)
    no_recompute_segments: list[Any] = field(default_factory=list)
    sr: int = 0
    refined_ops_patterns: list[Any] = field(default_factory=list)
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
    custom_white_list: list[Any] = field(default_factory=list)
    custom_black_list: list[Any] = field(default_factory=list)
    custom_black_varnames: list[Any] = field(default_factory=list)
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
    """Pipeline parallelism.

    Three fields are ours: `axis`, the mesh axis along which the ranks lie; `split_spec`, which
    Paddle has in the `pp_config` of `parallelize`; and `executor`, as of `mp.pipeline`: "program"
    (one program), "mpmd" (a program for each action of each rank, driven by the host of a single
    process) or "auto", which is "mpmd" for training where that is estimated to take less time.
    """

    enable: bool = False
    axis: str = "pp"
    executor: str = "program"
    split_spec: Any = None  # dict from names of modules to SplitPoint, or a name or list of names
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
    program_runtimes: list[Any] = field(default_factory=lambda: [61, 72, 71, 34, 3])
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
    not_quant_pattern: list[Any] = field(default_factory=lambda: ["skip_quant"])
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
    fused_passes_list: list[Any] = field(default_factory=list)


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
