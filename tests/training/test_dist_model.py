"""`DistModel`: modes, state, donation, and one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import meshpar as mp
from meshpar.models import MLP, MLPConfig, cross_entropy

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 8)).astype(np.float32), RNG.integers(0, 8, 16, np.int32)


def mlp(**options):
    return MLP(MLPConfig(dims=(8, 16, 8), **options), rngs=nnx.Rngs(0))


@pytest.fixture
def mesh(mesh_of_shape):
    return mesh_of_shape(dp=4, tp=2)


def column_parallel(model, mesh):
    model.layers[0].kernel = mp.shard_tensor(
        model.layers[0].kernel, mesh, [mp.Replicate(), mp.Shard(1)]
    )
    return model


def static(model, mesh, strategy=None, **options):
    options = {"loss": cross_entropy, "optimizer": optax.adam(1e-2)} | options
    with mesh:
        return mp.to_static(model, strategy, **options)


def copies(model):
    return jax.tree.map(np.asarray, nnx.state(model, nnx.Param))


# --- modes ----------------------------------------------------------------------------------------


def test_a_call_before_a_mode_raises(mesh):
    with pytest.raises(ValueError, match=r"choose a mode before the first call: train\(\)"):
        static(mlp(), mesh)(X, Y)


def test_training_without_an_optimizer_raises(mesh):
    with pytest.raises(ValueError, match="no optimizer; give one"):
        static(mlp(), mesh, optimizer=None).train()


@pytest.mark.parametrize(
    "mode, args", [("train", (X,)), ("train", (X, Y, Y)), ("predict", (X, Y)), ("eval", ())]
)
def test_a_wrong_number_of_arguments_raises(mesh, mode, args):
    dm = static(mlp(), mesh)
    getattr(dm, mode)()
    words = rf"mode '{mode}': {len(args)} argument\(s\) for the input\(s\) \(x\) of MLP"
    with pytest.raises(ValueError, match=words):
        dm(*args)


def test_a_loss_that_is_no_scalar_raises(mesh):
    dm = static(mlp(), mesh, loss=lambda logits, labels: logits)
    dm.train()
    with pytest.raises(ValueError, match=r"loss returns of shape \(16, 8\)"):
        dm(X, Y)
    dm = static(mlp(), mesh, loss=None)
    dm.eval()
    with pytest.raises(ValueError, match=r"the model returns of shape .* give loss="):
        dm(X)


def test_eval_and_predict_equal_the_module_and_change_nothing(mesh):
    model = mlp(dropout=0.5)
    dm = static(column_parallel(model, mesh), mesh)
    before = {name: np.asarray(v) for name, v in plain(dm.state_dict()).items()}
    model.eval()
    dm.eval()
    assert_allclose(dm(X, Y), cross_entropy(model(X), Y), rtol=1e-6)
    dm.predict()
    assert_allclose(dm(X), model(X), rtol=1e-5, atol=1e-6)
    for name, value in plain(dm.state_dict()).items():
        assert_array_equal(value, before[name], err_msg=name)


def plain(state):
    return {k: v for k, v in state.items() if not jnp.issubdtype(v.dtype, jax.dtypes.prng_key)}


# --- the user's model -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", [lambda model, mesh: model, column_parallel])
def test_the_users_model_is_never_touched(mesh, place):
    model = place(mlp(dropout=0.1), mesh)
    before = copies(model)
    dm = static(model, mesh)
    dm.train()
    for _ in range(3):
        dm(X, Y)
    jax.tree.map(assert_array_equal, copies(model), before)
    assert not model.dropout.deterministic and int(model.dropout.rngs.count.get_value()) == 0
    assert model(X).shape == (16, 8)


def test_the_state_shares_no_buffer_with_the_users_arrays(mesh):
    model = column_parallel(mlp(), mesh)
    dm = static(model, mesh)
    mine = {pointer for x in jax.tree.leaves(nnx.state(model)) for pointer in pointers(x)}
    state = {pointer for part in dm._state for x in part for pointer in pointers(x)}
    assert mine and state and not mine & state


def pointers(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def test_model_holds_the_current_state_and_outlives_the_next_step(mesh):
    dm = static(column_parallel(mlp(), mesh), mesh)
    dm.train()
    dm(X, Y)
    model, value = dm.model, dm.state_dict()["layers.0.kernel"]
    assert_array_equal(model.layers[0].kernel.get_value(), value)
    held = np.asarray(value)
    dm(X, Y)
    assert_array_equal(value, held)
    assert np.abs(np.asarray(dm.model.layers[0].kernel.get_value()) - held).max() > 0
    assert model(X).shape == (16, 8)


def test_without_anybody_looking_the_state_is_donated(mesh):
    dm = static(mlp(), mesh)
    dm.train()
    dm(X, Y)
    old = dm._state.params[0]
    dm(X, Y)
    assert old.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old)


def test_sync_writes_into_the_users_module(mesh):
    model = column_parallel(mlp(dropout=0.1), mesh)
    dm = static(model, mesh)
    dm.train()
    for _ in range(2):
        dm(X, Y)
    dm.sync()
    for name, value in plain(dm.state_dict("param")).items():
        if name.startswith("layers.0.kernel"):
            assert_array_equal(model.layers[0].kernel.get_value(), value)
    assert int(model.dropout.rngs.count.get_value()) == 2
    held = copies(model)
    dm(X, Y)
    jax.tree.map(assert_array_equal, copies(model), held)


# --- state dict -----------------------------------------------------------------------------------


def test_state_dict_has_parameters_and_moments_by_name(mesh):
    dm = static(mlp(dropout=0.1), mesh)
    param, opt = dm.state_dict("param"), dm.state_dict("opt")
    assert set(dm.state_dict()) == set(param) | set(opt)
    assert {"layers.0.kernel", "layers.1.bias", "dropout.rngs.count"} <= set(param)
    assert {"opt.0.mu.layers.0.kernel", "opt.0.nu.layers.1.bias", "opt.0.count"} <= set(opt)
    with pytest.raises(ValueError, match=r"mode='both'.*'param', 'opt' and 'all'"):
        dm.state_dict("both")


def test_a_loaded_state_goes_on_where_it_was_and_compiles_nothing(mesh, mesh_of_shape):
    dm = static(column_parallel(mlp(dropout=0.3), mesh), mesh)
    dm.train()
    for _ in range(2):
        dm(X, Y)
    saved = dm.state_dict()
    expected = [float(dm(X, Y)) for _ in range(3)]
    dm.set_state_dict(saved)
    assert [float(dm(X, Y)) for _ in range(3)] == expected
    dm.eval()
    dm(X, Y)
    assert dm.compile_counts == {"train": 1, "eval": 1, "predict": 0}
    other = static(mlp(dropout=0.3), mesh_of_shape(dp=8))  # another mesh, other placements
    other.set_state_dict(saved)
    other.train()
    assert_allclose([float(other(X, Y)) for _ in range(3)], expected, rtol=1e-5)
    assert other.compile_counts["train"] == 1
    for name, value in plain(saved).items():
        assert np.isfinite(np.asarray(value)).all(), name  # not donated


def test_numpy_values_load_and_strange_ones_raise(mesh):
    dm = static(mlp(), mesh)
    dm.set_state_dict({"layers.0.bias": np.arange(16.0)})
    assert_array_equal(dm.state_dict()["layers.0.bias"], np.arange(16, dtype=np.float32))
    with pytest.raises(ValueError, match=r"has no 'layers.9.bias'; its names are .*layers.0.bias"):
        dm.set_state_dict({"layers.9.bias": np.zeros(16)})
    with pytest.raises(mp.PlacementError, match=r"'layers.0.bias' has another shape") as error:
        dm.set_state_dict({"layers.0.bias": np.zeros(3)})
    assert "(3,)" in str(error.value) and "(16,)" in str(error.value)


# --- C34: one compilation -------------------------------------------------------------------------


def test_one_compilation_for_a_run_and_one_more_for_a_new_shape(mesh):
    dm = static(mlp(), mesh)
    dm.train()
    dm(X, Y)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )
    for _ in range(4):
        dm(X, Y)
    assert compiled == []
    with pytest.warns(mp.RecompileWarning, match=r"for a batch of x \(8, 8\).*was x \(16, 8\)"):
        dm(X[:8], Y[:8])
    assert len(compiled) == 1
    dm(X, Y)
    dm(X[:8], Y[:8])
    assert dm.compile_counts["train"] == 2 and len(compiled) == 1
    jax.monitoring.clear_event_listeners()


def test_a_counter_in_python_and_weak_types_do_not_recompile(mesh):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    dm = static(mlp(), mesh, optimizer=tx)
    dm.train()
    for _ in range(3):
        dm(X, Y)
    assert dm.compile_counts["train"] == 1


# --- C35: shared arrays ---------------------------------------------------------------------------


def test_tied_parameters_are_one_buffer_and_train_as_on_one_device(mesh):
    def build():
        config = MLPConfig(dims=(8, 16, 3, 8, 16), tied=True)
        return MLP(config, rngs=nnx.Rngs(0))

    labels = RNG.integers(0, 16, 16, np.int32)
    runs = []
    for where in (mp.ProcessMesh([0], ["dp"]), mesh):
        dm = static(build(), where)
        dm.train()
        runs.append([float(dm(X, labels)) for _ in range(3)])
        names = [name for name in dm.state_dict("param") if name.endswith("kernel")]
        assert names == ["layers.0.kernel", "layers.1.kernel", "layers.2.kernel"]
        model = dm.model
        assert model.layers[0].kernel is model.layers[3].kernel
    assert_allclose(runs[1], runs[0], rtol=1e-5)


def test_a_state_and_a_batch_that_share_arrays(mesh):
    """Two leaves of one array, and a batch that is a leaf of the state."""
    shared = jax.device_put(np.eye(8, dtype=np.float32), jax.sharding.NamedSharding(
        mesh.jax_mesh, jax.sharding.PartitionSpec()
    ))  # fmt: skip

    def apply(params, batch):
        return batch @ params["w"] @ params["average"]

    def losses(place):
        params = {"w": shared, "average": shared}
        dm = static((apply, params), place, loss=lambda y, x: ((y - 1) ** 2).mean())
        dm.train()
        return [float(dm(shared if place is mesh else np.eye(8, dtype=np.float32)))
                for _ in range(3)]  # fmt: skip

    assert_allclose(losses(mesh), single_device_losses(apply), rtol=1e-5)
    assert_array_equal(shared, np.eye(8))


def single_device_losses(apply):
    x, tx = jnp.eye(8), optax.adam(1e-2)
    params = {"w": x, "average": x}
    state, losses = tx.init(params), []
    for _ in range(3):
        loss, grads = jax.value_and_grad(lambda p: ((apply(p, x) - 1) ** 2).mean())(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


# --- programs -------------------------------------------------------------------------------------


def test_programs_can_be_read(mesh):
    dm = static(column_parallel(mlp(), mesh), mesh)
    dm.train()
    with pytest.raises(ValueError, match="mode 'train' has not run yet"):
        dm.compiled_text()
    spec = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(Y.shape, Y.dtype)
    assert "all-reduce" in dm.compiled_text(*spec)
    dm(X, Y)
    assert dm.compile_counts["train"] == 1  # reading compiled it
    assert dm.compiled_text() == dm.dist_main_program() == dm.dist_main_program("train")
    assert "stablehlo" in dm.serial_main_program() and "stablehlo" in dm.lower().as_text()
    assert dm.memory_analysis().argument_size_in_bytes > 0
    assert dm.collectives().axes() == {"dp", "tp"}
    with pytest.raises(ValueError, match="mode='fit': the modes are"):
        dm.dist_main_program("fit")
    with pytest.raises(ValueError, match="mode 'eval' has not run yet"):
        dm.dist_main_program("eval")


def test_steps_in_flight_are_bounded(mesh):
    dm = static(mlp(), mesh)
    dm.train()
    for _ in range(40):
        loss = dm(X, Y)
        assert len(dm._in_flight) <= 16
    dm.wait()
    assert not dm._in_flight and loss.is_ready()


def test_results_are_the_callers_to_donate_and_done_ones_are_forgotten(mesh):
    dm = static(mlp(), mesh)
    dm.predict()
    for _ in range(3):
        jax.block_until_ready(dm(X)).delete()
        assert len(dm._in_flight) <= 1
    dm.wait()


# --- C39: cells that run twice --------------------------------------------------------------------


def test_running_a_cell_again_gives_equal_results_and_leaves_no_mesh(mesh_of_shape):
    def cell(mesh):
        with mesh:
            dm = static(mlp(dropout=0.2), mesh)
            dm.train()
            assert repr(dm) == f"DistModel(MLP, ProcessMesh(dp={mesh.size}), mode='train')"
            losses = [float(dm(X, Y)) for _ in range(2)]
            assert_allclose(jnp.arange(3.0) * 2, [0.0, 2.0, 4.0])  # ordinary code
        return losses

    first = cell(mesh_of_shape(dp=8))
    assert cell(mesh_of_shape(dp=8)) == first
    assert_allclose(cell(mesh_of_shape(dp=2)), first, rtol=1e-5)
    assert mp.get_mesh() is None
