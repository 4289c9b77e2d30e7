"""The sharding rules, as a table and as laws over every parameter of every model."""

import re

import pytest
from flax import nnx

from meshpar.models.decoder import Decoder, DecoderConfig
from meshpar.models.encoder import Encoder, EncoderConfig
from meshpar.models.gpt2 import GPT2, GPT2Config
from meshpar.models.mlp import MLP, MLPConfig
from meshpar.models.resnet import ResNet, ResNetConfig
from meshpar.models.sharding import ParamRule, axes_for, rules_for


def decoder(scan_layers):
    config = DecoderConfig(
        vocab_size=32,
        num_layers=2,
        model_dim=8,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        hidden_dim=16,
        max_seq_len=8,
        scan_layers=scan_layers,
    )
    return Decoder(config, rngs=nnx.Rngs(0))


def gpt2(scan_layers):
    config = GPT2Config(
        vocab_size=32,
        num_layers=2,
        model_dim=8,
        num_heads=2,
        max_seq_len=8,
        scan_layers=scan_layers,
    )
    return GPT2(config, rngs=nnx.Rngs(0))


def encoder(scan_layers):
    config = EncoderConfig(
        vocab_size=32,
        num_layers=2,
        model_dim=8,
        num_heads=2,
        hidden_dim=16,
        max_seq_len=8,
        scan_layers=scan_layers,
    )
    return Encoder(config, rngs=nnx.Rngs(0))


MODELS = {
    "decoder": (lambda: decoder(False), False),
    "decoder scanned": (lambda: decoder(True), True),
    "gpt2": (lambda: gpt2(False), False),
    "gpt2 scanned": (lambda: gpt2(True), True),
    "encoder": (lambda: encoder(False), False),
    "encoder scanned": (lambda: encoder(True), True),
    "mlp": (lambda: MLP(MLPConfig(dims=(8,) * 5), rngs=nnx.Rngs(0)), False),
    "resnet": (lambda: ResNet(ResNetConfig(stages=(1, 1)), rngs=nnx.Rngs(0)), False),
}

TABLE = [
    # model, path, axes; (None, ...) in front for scanned layers
    ("decoder", "embed.embedding", ("tp", "fsdp")),
    ("decoder", "head.kernel", ("fsdp", "tp")),
    ("decoder", "final_norm.scale", (None,)),
    ("decoder", "layers.0.attention_norm.scale", (None,)),
    ("decoder", "layers.0.attention.q.kernel", ("fsdp", "tp")),
    ("decoder", "layers.1.attention.k.kernel", ("fsdp", "tp")),
    ("decoder", "layers.1.attention.v.kernel", ("fsdp", "tp")),
    ("decoder", "layers.1.attention.o.kernel", ("tp", "fsdp")),
    ("decoder", "layers.1.mlp.gate.kernel", ("fsdp", "tp")),
    ("decoder", "layers.1.mlp.up.kernel", ("fsdp", "tp")),
    ("decoder", "layers.1.mlp.down.kernel", ("tp", "fsdp")),
    ("decoder scanned", "embed.embedding", ("tp", "fsdp")),
    ("decoder scanned", "layers.mlp_norm.scale", (None, None)),
    ("decoder scanned", "layers.attention.q.kernel", (None, "fsdp", "tp")),
    ("decoder scanned", "layers.mlp.down.kernel", (None, "tp", "fsdp")),
    ("gpt2", "positions.embedding", (None, "fsdp")),
    ("gpt2", "final_norm.bias", (None,)),
    ("gpt2", "layers.0.attention.q.bias", ("tp",)),
    ("gpt2", "layers.0.attention.o.bias", (None,)),
    ("gpt2", "layers.0.mlp.up.bias", ("tp",)),
    ("gpt2", "layers.0.mlp.down.bias", (None,)),
    ("gpt2 scanned", "layers.mlp.up.bias", (None, "tp")),
    ("encoder", "segments.embedding", (None, "fsdp")),
    ("encoder", "embed.embedding", ("tp", "fsdp")),
    ("encoder", "layers.0.attention.k.kernel", ("fsdp", "tp")),
    ("encoder", "layers.1.mlp_norm.bias", (None,)),
    ("encoder scanned", "layers.mlp.down.kernel", (None, "tp", "fsdp")),
    ("mlp", "layers.0.kernel", ("fsdp", "tp")),
    ("mlp", "layers.0.bias", ("tp",)),
    ("mlp", "layers.1.kernel", ("tp", "fsdp")),
    ("mlp", "layers.1.bias", (None,)),
    ("resnet", "stem.kernel", (None, None, None, "fsdp")),
    ("resnet", "blocks.0.conv1.kernel", (None, None, "fsdp", "tp")),
    ("resnet", "blocks.0.norm1.scale", ("tp",)),
    ("resnet", "blocks.0.conv2.kernel", (None, None, "tp", "fsdp")),
    ("resnet", "blocks.0.norm2.scale", (None,)),
    ("resnet", "head.kernel", ("fsdp", None)),
]


@pytest.fixture(scope="module")
def models():
    """{name: (model, scanned, {path: ndim})}, created without arrays."""
    built = {}
    for name, (make, scanned) in MODELS.items():
        model = nnx.eval_shape(make)
        state = nnx.state(model, (nnx.Param, nnx.BatchStat))
        paths = {".".join(map(str, path)): len(x.shape) for path, x in nnx.to_flat_state(state)}
        built[name] = (model, scanned, paths)
    return built


@pytest.mark.parametrize("name, path, expected", TABLE, ids=str)
def test_axes_of_parameters(models, name, path, expected):
    model, scanned, paths = models[name]
    assert axes_for(path, paths[path], rules_for(model), scanned=scanned) == expected


@pytest.mark.parametrize("name", MODELS)
def test_every_rule_is_used_and_every_matrix_has_one(models, name):
    model, scanned, paths = models[name]
    for rule in rules_for(model):
        assert any(re.fullmatch(rule.pattern, path) for path in paths), rule
    for path, ndim in paths.items():
        axes = axes_for(path, ndim, rules_for(model), scanned=scanned)
        assert len(axes) == ndim
        named = [axis for axis in axes if axis is not None]
        assert len(set(named)) == len(named)
        if path.endswith(("kernel", "embedding")):
            assert named, path


def test_column_parallel_outputs_meet_row_parallel_inputs(models):
    # Equal axes on the dim that two matrices share: no collective between them.
    for name, (into, out_of) in {
        "decoder": ("layers.0.mlp.up.kernel", "layers.0.mlp.down.kernel"),
        "gpt2": ("layers.0.attention.v.kernel", "layers.0.attention.o.kernel"),
        "mlp": ("layers.2.kernel", "layers.3.kernel"),
        "resnet": ("blocks.1.conv1.kernel", "blocks.1.conv2.kernel"),
    }.items():
        model, _, paths = models[name]
        columns, rows = (
            axes_for(path, paths[path], rules_for(model), scanned=False) for path in (into, out_of)
        )
        assert columns[-1] == rows[-2] == "tp"


def test_rules_paste_back():
    rule = ParamRule(r"head\.kernel", ((1, "tp"),))
    assert eval(repr(rule), {"ParamRule": ParamRule}) == rule


def test_two_matching_rules_are_refused():
    rules = (ParamRule(r"head\..*", ((0, "tp"),)), ParamRule(r".*kernel", ((1, "tp"),)))
    with pytest.raises(ValueError, match=r"'head.kernel'.*2 rules match.*narrow"):
        axes_for("head.kernel", 2, rules, scanned=False)


@pytest.mark.parametrize("scanned, dims", [(False, 2), (True, 1)])
def test_a_dim_that_is_not_there_is_refused(scanned, dims):
    rules = (ParamRule(r"layers\.w", ((2, "tp"),)),)
    with pytest.raises(ValueError, match=rf"splits dim 2, but the parameter has {dims} dims"):
        axes_for("layers.w", 2, rules, scanned=scanned)


def test_other_models_are_told_to_bring_their_rules():
    with pytest.raises(TypeError, match=r"no rules for Linear, only for Decoder.*ParamRule"):
        rules_for(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
