"""ZeRO stages cut what they say, save what they promise, and change no number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import meshpar as mp
from meshpar.models import MLP, MLPConfig, cross_entropy
from meshpar.placements.layout import Layout
from meshpar.training.stages import cut_over

STAGES = {1: mp.ShardingStage1, 2: mp.ShardingStage2, 3: mp.ShardingStage3}


def bytes_per_device(value):
    (size,) = {shard.data.nbytes for shard in value.addressable_shards}
    return size


def total(state, kind):
    return sum(bytes_per_device(v) for name, v in state.items() if kind(name))


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dims, expected",
    [
        ((8, 8), ((), ()), (("dp",), ())),
        ((3, 8), ((), ()), ((), ("dp",))),
        ((7, 3), ((), ()), ((), ())),
        ((8, 8), (("tp",), ()), (("tp", "dp"), ())),
        ((4, 8), (("tp",), ()), (("tp",), ("dp",))),  # 4 rows are not 2 x 4 blocks
        ((8, 8), ((), ("dp",)), ((), ("dp",))),  # cut over it already
        ((), (), ()),
        ((0, 8), ((), ()), ((), ("dp",))),
    ],
)
def test_the_first_dim_that_the_axis_divides_is_cut(shape, dims, expected):
    assert cut_over("dp", shape, Layout(dims), {"dp": 4, "tp": 2}) == Layout(expected)


@settings(deadline=None, print_blob=True)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    size=st.integers(1, 4),
    cut=st.integers(0, 2),
)
def test_a_cut_adds_at_most_one_axis_and_stays_even(shape, size, cut):
    layout = Layout.replicated(len(shape))
    if cut < len(shape) and shape[cut] % 2 == 0:
        layout = layout.with_dim(cut, ("tp",))
    sizes = {"dp": size, "tp": 2}
    after = cut_over("dp", shape, layout, sizes)
    for dim, axes in enumerate(after.dims):
        assert axes[: len(layout.dims[dim])] == layout.dims[dim]
        assert shape[dim] % np.prod([sizes[axis] for axis in axes], dtype=int) == 0
    possible = any(
        n and n % (size * np.prod([sizes[a] for a in axes], dtype=int)) == 0
        for n, axes in zip(shape, layout.dims, strict=True)
    )
    assert ("dp" in after.shard_axes) == possible


# --- C20: equal losses ----------------------------------------------------------------------------

# Eight layers; one kernel is (7, 3), which nothing divides, and the last is the first.
DIMS = (8, 16, 7, 3, 16, 16, 16, 8, 16)
X = np.random.default_rng(0).normal(size=(10, 16, 8)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 16, (10, 16), np.int32)


@functools.cache
def single_device(accumulation):
    """Ten steps by flax and optax alone."""
    model = MLP(MLPConfig(dims=DIMS, tied=True), rngs=nnx.Rngs(0))
    tx = optax.adam(1e-2)
    if accumulation > 1:
        tx = optax.MultiSteps(tx, accumulation)
    graph, params = nnx.split(model)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(nnx.merge(graph, p)(x), y))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for x, y in zip(X, Y, strict=True):
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("axes", [{"dp": 8}, {"dp": 4, "tp": 2}], ids=["dp8", "dp4tp2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_one_device(mesh_of_shape, stage, axes, accumulation):
    mesh = mesh_of_shape(**axes)
    model = MLP(MLPConfig(dims=DIMS, tied=True), rngs=nnx.Rngs(0))
    if "tp" in axes:
        for layer, dim in ((0, 1), (4, 0)):
            kernel = model.layers[layer].kernel
            kernel.set_value(
                mp.shard_tensor(kernel.get_value(), mesh, [mp.Replicate(), mp.Shard(dim)])
            )
    shard_fn = STAGES[stage]("dp", mesh) if stage else None
    optimizer = mp.shard_optimizer(optax.adam(1e-2), shard_fn, accumulation)
    with mesh:
        dm = mp.to_static(model, loss=cross_entropy, optimizer=optimizer)
    dm.train()
    losses = [float(dm(x, y)) for x, y in zip(X, Y, strict=True)]
    assert_allclose(losses, single_device(accumulation), rtol=1e-5)
    assert dm.compile_counts["train"] == 1


# --- C21: bytes -----------------------------------------------------------------------------------


def by_strategy(stage, mesh):
    config = {"enable": True, "stage": stage} if stage else {}
    return mp.Strategy({"sharding": config}), optax.adam(1e-3)


def by_optimizer(stage, mesh):
    shard_fn = STAGES[stage]("dp", mesh) if stage else None
    return None, mp.shard_optimizer(optax.adam(1e-3), shard_fn, 2)


@pytest.mark.parametrize("way", [by_strategy, by_optimizer])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_per_device_are_an_eighth(mesh_of_shape, stage, way):
    mesh = mesh_of_shape(dp=8)
    strategy, optimizer = way(stage, mesh)
    model = nnx.Linear(1024, 1024, use_bias=False, rngs=nnx.Rngs(0))
    with mesh:
        dm = mp.to_static(
            model, strategy, loss=lambda y, labels: (y * labels).mean(), optimizer=optimizer
        )
    dm.train()
    x = np.ones((8, 1024), np.float32)
    dm(x, x)
    whole = 4 * 1024 * 1024
    state = dm.state_dict()
    moments = total(state, lambda name: ".mu." in name or ".nu." in name)
    assert moments == 2 * whole // (8 if stage else 1)
    assert total(state, lambda name: name == "kernel") == whole // (8 if stage == 3 else 1)
    if way is by_optimizer:
        accumulated = total(state, lambda name: "acc_grads" in name)
        assert accumulated == whole // (8 if stage else 1)
    # What the program holds between steps is what it takes as arguments.
    arguments = dm.memory_analysis().argument_size_in_bytes
    assert abs(arguments - total(state, lambda name: True) - 2 * x.nbytes // 8) < 1024


def test_stage_2_cuts_gradients_before_the_update(mesh_of_shape):
    """One constraint more for each parameter; what XLA makes of it is the backend's affair."""
    constraints = {}
    for stage in (1, 2):
        strategy, optimizer = by_strategy(stage, mesh_of_shape(dp=8))
        with mesh_of_shape(dp=8):
            dm = mp.to_static(
                nnx.Linear(16, 8, rngs=nnx.Rngs(0)),
                strategy,
                loss=lambda y, labels: (y * labels).mean(),
                optimizer=optimizer,
                partitioner="xla",
            )
        dm.train()
        text = dm.lower(np.ones((8, 16), np.float32), np.ones((8, 8), np.float32)).as_text()
        constraints[stage] = text.count("sdy.sharding_constraint")
    assert constraints[2] == constraints[1] + 2


# --- C18: the global norm -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes, placements",
    [
        ({"dp": 4}, [mp.Replicate()]),
        ({"tp": 4}, [mp.Shard(0)]),
        ({"dp": 2, "tp": 2}, [mp.Replicate(), mp.Shard(0)]),
        ({"tp": 3}, [mp.Shard(0)]),  # 8 rows over 3: padding must not count
    ],
)
@pytest.mark.parametrize("stage", [0, 2])
def test_global_norm_counts_each_parameter_once(mesh_of_shape, axes, placements, stage):
    mesh = mesh_of_shape(**axes)
    params = {
        "W": mp.shard_tensor(np.zeros((8, 4), np.float32), mesh, placements),
        "b": mp.shard_tensor(np.zeros(2, np.float32), mesh, []),
    }

    def apply(params, batch):  # the gradients are ones for W and [3, 4] for b
        return batch.mean() * (params["W"].sum() + (params["b"] * jnp.array([3.0, 4.0])).sum())

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    if stage:
        tx = mp.shard_optimizer(tx, STAGES[stage](mesh.dim_names[0]))
    dm = mp.to_static((apply, params), mp.Strategy({"data_axes": ()}), optimizer=tx)
    dm.train()
    dm(np.ones(4, np.float32))
    norm = np.sqrt(32 + 25)
    state = dm.state_dict("param")
    assert_allclose(np.asarray(state["W"]), np.full((8, 4), -1 / norm), rtol=1e-6)
    assert_allclose(np.asarray(state["b"]), np.array([-3, -4]) / norm, rtol=1e-6)


# --- optax and errors -----------------------------------------------------------------------------


def test_a_sharded_optimizer_is_an_optax_transformation():
    tx, params = optax.adam(1e-1), {"w": jnp.ones(3)}
    sharded = mp.shard_optimizer(tx, mp.ShardingStage1("dp"))
    ours, state = sharded.update(params, sharded.init(params), params)
    theirs, _ = tx.update(params, tx.init(params), params)
    assert_allclose(ours["w"], theirs["w"])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


def test_moments_of_masked_and_factored_optimizers_lie_as_their_parameters(mesh_of_shape):
    mesh = mesh_of_shape(dp=2, tp=2)
    params = {
        "frozen": mp.shard_tensor(np.ones((4, 4), np.float32), mesh, [mp.Replicate(), mp.Shard(0)]),
        "w": mp.shard_tensor(np.ones((4, 4), np.float32), mesh, [mp.Replicate(), mp.Shard(1)]),
    }
    tx = optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
        {"frozen": "freeze", "w": "train"},
    )
    dm = mp.to_static(
        (lambda p, x: (x @ p["w"] @ p["frozen"]).mean(), params),
        mp.Strategy({"sharding": {"enable": True}}),
        optimizer=tx,
    )
    dm.train()
    dm(np.ones((4, 4), np.float32))
    opt = dm.state_dict("opt")
    mu = next(v for name, v in opt.items() if name.endswith(".mu.w"))
    assert mp.placements_of(mu) == [mp.Shard(0), mp.Shard(1)]
    assert_allclose(dm.state_dict()["frozen"], np.ones((4, 4)))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: mp.shard_optimizer("adam"), TypeError, "a str is no optax"),
        (lambda: mp.shard_optimizer(optax.sgd(1.0), 3), TypeError, "3 is not None, ShardingStage1"),
        (lambda: mp.shard_optimizer(optax.sgd(1.0), None, 0), ValueError, "steps=0"),
        (
            lambda: mp.ShardingStage1("tp", mp.ProcessMesh([0], ["dp"])),
            mp.MeshError,
            "'tp' is not an axis of the mesh",
        ),
    ],
)
def test_what_cannot_be_sharded_raises(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_two_different_stages_raise(mesh_of_shape):
    mesh = mesh_of_shape(dp=2)
    optimizer = mp.shard_optimizer(optax.sgd(1.0), mp.ShardingStage2("dp"))
    strategy = mp.Strategy({"sharding": {"enable": True, "stage": 1}})
    with mesh, pytest.raises(ValueError, match=r"stage is 1 and .*ShardingStage2"):
        mp.to_static((lambda w, x: w * x, jnp.ones(())), strategy, optimizer=optimizer)


@pytest.mark.parametrize("stage", STAGES.values())
def test_a_stage_prints_as_what_makes_it(mesh_of_shape, stage):
    shown = stage("dp", mesh_of_shape(dp=2))
    names = {stage.__name__: stage, "ProcessMesh": mp.ProcessMesh}
    assert eval(repr(shown), names) == shown
