"""`Strategy.pipeline` trains like one device, whatever the schedule, the mesh and the microbatches."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar import models, schedules
from meshpar.schedules.executors.layers import LayerError

STEPS, ROWS, LENGTH, VOCABULARY = 5, 48, 4, 16
MESHES = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp8": {"pp": 8},
    "pp2 tp2 dp2": {"pp": 2, "tp": 2, "dp": 2},
    "pp4 dp2 zero1": {"pp": 4, "dp": 2},
}
# Schedule, mesh, microbatches, model, layers, scanned. The schedules themselves meet every number of
# ranks and microbatches in tests/schedules/executors.
COVERING = [
    ("FThenB", "pp4", 3, "llama", 5, True),
    ("1F1B", "pp2", 4, "gpt2", 2, False),
    ("ZBH1", "pp2 tp2 dp2", 3, "gpt2", 5, True),
    ("VPP", "pp2", 1, "llama", 5, True),
    ("auto", "pp4 dp2 zero1", 8, "llama", 5, True),
]
TWOFOLD = ("VPP", "InterleavedZB", "ZBVPP", "DualPipeV")  # two stages on a rank
ALL = [  # one layer in a stage, which compiles quickest
    (name, mesh, M, model, MESHES[mesh]["pp"] * (1 + (name in TWOFOLD)), scanned)
    for name, mesh, M, model, scanned in itertools.product(
        (*schedules.NAMES, "auto"), MESHES, (1, 3, 4, 8), ("llama", "gpt2"), (False, True)
    )
]


def build(model, layers, scanned, dropout=0.1):
    if model == "gpt2":
        config = models.GPT2Config(
            vocab_size=VOCABULARY,
            num_layers=layers,
            model_dim=8,
            num_heads=2,
            max_seq_len=LENGTH,
            dropout=dropout,
            scan_layers=scanned,
        )
        return models.GPT2(config, rngs=nnx.Rngs(params=0, dropout=1))
    config = models.DecoderConfig(
        vocab_size=VOCABULARY,
        num_layers=layers,
        model_dim=8,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        hidden_dim=16,
        max_seq_len=LENGTH,
        scan_layers=scanned,
    )
    return models.Decoder(config, rngs=nnx.Rngs(0))


def tokens(seed, rows=ROWS):
    return jax.random.randint(jax.random.key(seed), (rows, LENGTH), 0, VOCABULARY)


def masked(logits, labels):
    """A mean over the labels that count, which the batch alone decides."""
    counts = labels > 2
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * counts).sum() / counts.sum()


def tx():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def history(dm):
    """The losses of 5 steps."""
    dm.train()
    return np.array([float(dm(tokens(i), tokens(i + 1))) for i in range(STEPS)])


def one_device(model, layers, scanned, loss=masked):
    with mp.ProcessMesh([0], ["dp"]):
        return mp.to_static(build(model, layers, scanned), loss=loss, optimizer=tx())


@functools.cache
def expected(model, layers, scanned):
    return history(one_device(model, layers, scanned))


def piped(model, axes, loss=masked, zero=0, partitioner="meshpar", **options):
    mesh = mp.ProcessMesh.create(axes)
    config = {"pipeline": {"enable": True, **options}}
    if zero:
        config["sharding"] = {"enable": True, "stage": zero}
    with mesh:
        if "tp" in axes:
            mp.shard_by_rules(model, mesh)
        return mp.to_static(
            model, mp.Strategy(config), loss=loss, optimizer=tx(), partitioner=partitioner
        )


def check(name, mesh, M, model, layers, scanned, **options):
    options |= {"schedule_mode": name, "accumulate_steps": M}
    partitioner = "xla" if mesh == "pp2" else "meshpar"
    if name in TWOFOLD:
        options["vpp_degree"] = 2
    dm = piped(
        build(model, layers, scanned),
        MESHES[mesh],
        zero=int("zero1" in mesh),
        partitioner=partitioner,
        **options,
    )
    np.testing.assert_allclose(history(dm), expected(model, layers, scanned), rtol=1e-5)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_five_steps_equal_those_of_one_device(case):
    check(*case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL, ids=str)
def test_five_steps_equal_those_of_one_device_everywhere(case):
    check(*case)


def test_evaluation_and_prediction_run_forward_only():
    single, dm = (
        one_device("llama", 2, True),
        piped(build("llama", 2, True), {"pp": 2, "dp": 2}, accumulate_steps=4),
    )
    results = []
    for each in (single, dm):
        each.eval()
        loss = float(each(tokens(0), tokens(1)))
        each.predict()
        results.append((loss, np.asarray(each(tokens(0)))))
    (loss, outputs), (got, got_outputs) = results
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    np.testing.assert_allclose(got_outputs, outputs, atol=1e-5 * np.abs(outputs).max())


def test_parameters_and_moments_lie_cut_over_the_ranks():
    dm = piped(build("llama", 4, False), {"pp": 4}, accumulate_steps=4)
    state = dm.state_dict()
    whole = sum(x.nbytes for x in state.values())
    here = sum(x.addressable_shards[0].data.nbytes for x in state.values())
    assert here <= whole / 4 * 1.1


def test_a_quotient_of_what_the_model_computes():
    """As `(sum, count)` it equals one device; as one number it is refused."""

    def parts(logits, labels):
        counts = jax.nn.sigmoid(logits[..., 0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (losses * jax.lax.stop_gradient(counts)).sum(), counts.sum()

    def quotient(logits, labels):
        total, count = parts(logits, labels)
        return total / count

    single = one_device("llama", 2, True, parts)
    single.train()
    dm = piped(build("llama", 2, True), {"pp": 2}, loss=parts, accumulate_steps=3)
    dm.train()
    for i in range(2):
        batch = tokens(i), tokens(i + 1)
        np.testing.assert_allclose(float(dm(*batch)), float(single(*batch)), rtol=1e-5)
    dm = piped(build("llama", 2, True), {"pp": 2}, loss=quotient, accumulate_steps=3)
    dm.train()
    with pytest.raises(NotImplementedError, match=r"\(sum, count\)"):
        dm(tokens(0), tokens(1))


def test_more_stages_than_layers():
    dm = piped(build("llama", 2, True), {"pp": 4}, accumulate_steps=2)
    dm.train()
    with pytest.raises(LayerError, match="2 equal layers for 4 stages"):
        dm(tokens(0), tokens(1))


def test_state_that_activations_decide():
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return self.norm(x)

    dm = piped(
        Normed(nnx.Rngs(0)), {"pp": 2}, loss=lambda y, t: ((y - t) ** 2).mean(), accumulate_steps=2
    )
    dm.train()
    with pytest.raises(NotImplementedError, match="running statistics"):
        dm(jnp.ones((4, 4)), jnp.ones((4, 4)))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"axis": "stages"}, mp.MeshError, "stages"),
        ({"pp_degree": 4}, mp.MeshError, "pp_degree is 4"),
        ({"schedule_mode": "2F2B"}, ValueError, "FThenB"),
        ({"schedule_mode": "1F1B", "vpp_degree": 2}, ValueError, "VPP"),
        ({"accumulate_steps": 2, "micro_batch_size": 2}, ValueError, "set one"),
        ({"generation_batch_size": 2}, NotImplementedError, "generation_batch_size"),
    ],
)
def test_options_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        piped(build("llama", 2, True), {"pp": 2}, **options)


def test_options_without_enable():
    strategy = mp.Strategy({"pipeline": {"accumulate_steps": 2}})
    with mp.ProcessMesh([0], ["pp"]), pytest.raises(ValueError, match="enable = True"):
        mp.to_static(build("llama", 2, True), strategy)
