"""`Strategy` has Paddle's fields and defaults, and nothing in it is silently ignored."""

from dataclasses import fields

import jax.numpy as jnp
import optax
import pytest

import meshpar as mp
from meshpar.training.options import Options

# Group -> field -> default, of paddle.distributed 3.3.1: both of its Strategy classes together.
PADDLE = {
    "sharding": {
        "enable": False, "stage": 1, "degree": 8, "enable_overlap": False,
        "param_comm_stream_num": 1, "grad_comm_stream_num": 1, "param_bucket_size_numel": 1,
        "grad_bucket_size_numel": 1, "enable_hierarchical_comm": False,
        "partition_algor": "greedy_even", "enable_tuning": False, "tuning_range": [],
        "release_gradients": False, "comm_buffer_size_MB": 256, "enable_tensor_fusion": False,
        "save_unbalanced_param": True,
    },
    "recompute": {
        "enable": False, "checkpoints": [], "no_recompute_segments": [], "sr": 0,
        "refined_ops_patterns": [], "enable_tuning": False,
    },
    "amp": {
        "enable": False, "dtype": "float16", "level": "o1", "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2, "incr_ratio": 2.0,
        "decr_ratio": 0.8, "use_dynamic_loss_scaling": True, "custom_white_list": [],
        "custom_black_list": [], "custom_black_varnames": [], "use_fp16_guard": False,
        "use_bf16_guard": False, "use_master_grad": False, "use_promote": True,
    },
    "gradient_merge": {"enable": False, "k_steps": 1, "avg": True},
    "pipeline": {
        "enable": False, "schedule_mode": "1F1B", "pp_degree": 1, "vpp_degree": 1,
        "vpp_seg_method": "", "micro_batch_size": 1, "accumulate_steps": 1,
        "generation_batch_size": 1, "enable_send_recv_overlap": False,
        "job_schedule_profiler_start": -1, "job_schedule_profiler_stop": -1,
        "program_runtimes": [61, 72, 71, 34, 3], "memory_limit_times": -1,
        "split_backward": False, "auto_parallel_sync_shared_params": False,
    },
    "qat": {
        "enable": False, "channel_wise_abs_max": True, "weight_bits": 8, "activation_bits": 8,
        "not_quant_pattern": ["skip_quant"], "algo": None, "onnx_format": True,
    },
    "tuning": {
        "enable": False, "profile_start_step": 1, "profile_end_step": 1,
        "run_after_tuning": True, "debug": False,
    },
    "dataset": {"enable": False, "num_shards": 1},
    "fused_linear_promotion": {"enable": False},
    "fused_passes": {
        "enable": False, "gemm_epilogue": False, "dropout_add": False, "fused_passes_list": [],
    },
    "dp_optimization": {
        "enable": False, "fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": 32,
        "overlap_comm_cacl": True, "gradient_sync_after_accumulate": False,
    },
    "mp_optimization": {
        "allreduce_matmul_grad_overlapping": False, "replace_with_c_embedding": False,
        "replace_with_parallel_cross_entropy": False,
    },
    "sp_optimization": {"enable": True},
}  # fmt: skip
BASE = {
    "auto_mode": "semi", "gradient_scale": True, "gradient_scale_using_allreduce_avg": False,
    "use_cache": True, "return_numpy": True, "all_ranks": False, "split_data": True, "seed": None,
    "reinit": False, "full_graph": True,
}  # fmt: skip
OURS = {"data_axes": None}
ACTING = (
    {"data_axes", "recompute.enable"}
    | {f"sharding.{n}" for n in ("enable", "stage", "degree")}
    | {
        f"pipeline.{name}"
        for name in [
            "accumulate_steps",
            "axis",
            "enable",
            "executor",
            "micro_batch_size",
            "pp_degree",
            "schedule_mode",
            "split_backward",
            "split_spec",
            "vpp_degree",
            "vpp_seg_method",
        ]
    }
)


def test_fields_and_defaults_are_paddles():
    ours = {"axis": "pp", "executor": "program", "split_spec": None}
    pipeline = {"pipeline": PADDLE["pipeline"] | ours}
    assert mp.Strategy().to_dict() == BASE | OURS | PADDLE | pipeline


def test_groups_take_values_from_a_dict_and_by_attribute():
    strategy = mp.Strategy({"sharding": {"enable": True, "stage": 2}, "seed": 3})
    strategy.sharding.stage = 3
    assert (strategy.sharding.enable, strategy.sharding.stage, strategy.seed) == (True, 3, 3)
    assert strategy.sharding.get("stage") == 3 and strategy.sharding.get("nothing", 7) == 7
    assert mp.Strategy.from_dict(strategy.to_dict()).to_dict() == strategy.to_dict()
    assert eval(repr(strategy), {"Strategy": mp.Strategy}) == strategy
    assert mp.Strategy() == mp.Strategy() != strategy


def test_two_strategies_share_no_list():
    first, second = mp.Strategy(), mp.Strategy()
    first.recompute.checkpoints.append("x")
    assert second.recompute.checkpoints == []


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: mp.Strategy([1]), ValueError, "config is a list"),
        (lambda: mp.Strategy({"shrding": {}}), ValueError, "no field 'shrding'"),
        (lambda: mp.Strategy({"sharding": {"stag": 1}}), ValueError, "'sharding': no field 'stag'"),
        (lambda: mp.Strategy({"sharding": 1}), ValueError, "'sharding' is a group"),
        (lambda: mp.Strategy({"sharding": {"stage": "1"}}), TypeError, "stage = '1'"),
        (lambda: setattr(mp.Strategy(), "amp", None), AttributeError, "Strategy.amp is a group"),
        (lambda: setattr(mp.Strategy(), "nope", 1), AttributeError, "no field 'nope'"),
        (lambda: setattr(mp.Strategy().amp, "nope", 1), AttributeError, "no field 'nope'"),
    ],
)
def test_what_is_no_field_raises(make, error, words):
    with pytest.raises(error, match=words):
        make()


def other(value):
    """A value of the same type that is not the default."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list():
            return [*value, "x"]
        case _:
            return 5


INERT = [
    (f"{group}.{name}" if group else name, group, name, default)
    for group, named in [*PADDLE.items(), ("", BASE)]
    for name, default in named.items()
    if (f"{group}.{name}" if group else name) not in ACTING
]


def static(strategy, mesh=None):
    with mesh or mp.ProcessMesh([0], ["dp"]):
        return mp.to_static(
            (lambda w, x: (x @ w).mean(), jnp.ones((2, 2))), strategy, optimizer=optax.sgd(0.1)
        )


@pytest.mark.parametrize("path, group, name, default", INERT, ids=[row[0] for row in INERT])
def test_a_field_that_does_not_act_raises_and_is_named(path, group, name, default):
    strategy = mp.Strategy()
    setattr(getattr(strategy, group) if group else strategy, name, other(default))
    with pytest.raises(NotImplementedError, match=rf"Strategy\.{path} = "):
        static(strategy)


def test_every_field_is_either_inert_or_acts():
    paths = set()
    for field in fields(mp.Strategy):
        value = getattr(mp.Strategy(), field.name)
        inner = fields(value) if isinstance(value, Options) else []
        paths |= {f"{field.name}.{f.name}" for f in inner} or {field.name}
    assert paths == {row[0] for row in INERT} | ACTING


@pytest.mark.parametrize(
    "config, error, words",
    [
        ({"sharding": {"stage": 2}}, ValueError, "no effect without Strategy.sharding.enable"),
        ({"sharding": {"enable": True, "stage": 4}}, ValueError, "stage = 4: the stages are 1"),
        ({"sharding": {"enable": True, "degree": 4}}, mp.MeshError, "degree is 4.*'dp' has size 2"),
        ({"data_axes": ("tp",)}, mp.MeshError, "names 'tp', which is no axis"),
    ],
)
def test_settings_that_contradict_raise(config, error, words):
    with pytest.raises(error, match=words):
        static(mp.Strategy(config), mp.ProcessMesh([0, 1], ["dp"]))


def test_sharding_needs_an_axis_of_a_known_name():
    with pytest.raises(mp.MeshError, match="needs a mesh axis named sharding, fsdp, dp"):
        static(mp.Strategy({"sharding": {"enable": True}}), mp.ProcessMesh([0, 1], ["x"]))


def test_sharding_prefers_the_axis_that_is_named_for_it():
    mesh = mp.ProcessMesh([[0, 1], [2, 3]], ["dp", "sharding"])
    dm = static(mp.Strategy({"sharding": {"enable": True, "stage": 3, "degree": 2}}), mesh)
    assert mp.placements_of(dm.state_dict()["params"]) == [mp.Replicate(), mp.Shard(0)]
