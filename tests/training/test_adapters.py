"""linen modules, pure functions and unusual nnx modules train like one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from numpy.testing import assert_allclose, assert_array_equal

import meshpar as mp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 16, 8)).astype(np.float32)
Y = RNG.normal(size=(4, 16, 2)).astype(np.float32)


def mse(outputs, labels):
    return ((outputs - labels) ** 2).mean()


class Net(linen.Module):
    """Dropout and batch norm: both kinds of state that a linen module has."""

    @linen.compact
    def __call__(self, x, train: bool):
        # No bias: batch norm cancels it, and Adam would blow its rounding noise up to full steps.
        x = linen.Dense(16, use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.25, deterministic=not train)(jax.nn.relu(x))
        return linen.Dense(2)(x)


class Plain(linen.Module):
    """Without a switch."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(x)


class Deterministic(linen.Module):
    """The other spelling of the switch."""

    @linen.compact
    def __call__(self, x, deterministic: bool = True):
        return linen.Dropout(0.5, deterministic=deterministic)(linen.Dense(2)(x))


def linen_on_one_device(variables, key):
    """Four steps by linen and optax alone."""
    tx = optax.adam(1e-2)
    params, stats = variables["params"], variables["batch_stats"]
    state, losses = tx.init(params), []
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):

        def loss(params, x=x, y=y, stats=stats, i=i):
            out, changed = Net().apply(
                {"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(key, i)},
            )  # fmt: skip
            return mse(out, y), changed["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, {"params": params, "batch_stats": stats}


def test_a_linen_module_with_dropout_and_batch_norm(mesh_of_shape):
    mesh = mesh_of_shape(dp=4, tp=2)
    variables, key = Net().init(jax.random.key(0), X[0], train=False), jax.random.key(7)
    placed = jax.tree.map(lambda x: x, variables)
    placed["params"]["Dense_0"]["kernel"] = mp.shard_tensor(
        variables["params"]["Dense_0"]["kernel"], mesh, [mp.Replicate(), mp.Shard(1)]
    )
    dm = mp.to_static((Net(), placed, {"dropout": key}), loss=mse, optimizer=optax.adam(1e-2))
    dm.train()
    losses = [float(dm(x, y)) for x, y in zip(X, Y, strict=True)]
    expected, after = linen_on_one_device(variables, key)
    assert_allclose(losses, expected, rtol=1e-5)
    module, held = dm.model
    assert isinstance(module, Net)
    assert_allclose(held["batch_stats"]["BatchNorm_0"]["mean"],
                    after["batch_stats"]["BatchNorm_0"]["mean"], rtol=1e-5, atol=1e-7)  # fmt: skip
    dm.predict()
    assert_allclose(dm(X[0]), Net().apply(after, X[0], train=False), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"dm.model\[1\] holds the current ones"):
        dm.sync()


def test_linen_switches_and_default_keys(mesh_of_shape):
    with mesh_of_shape(dp=2):
        model = Deterministic()
        variables = model.init(jax.random.key(0), X[0])
        dm = mp.to_static((model, variables), loss=mse, optimizer=optax.sgd(0.0))
        plain = mp.to_static((Plain(), Plain().init(jax.random.key(0), X[0])), loss=mse)
    dm.train()
    first, second = float(dm(X[0], Y[0])), float(dm(X[0], Y[0]))
    assert first != second  # another mask
    dm.eval()
    assert float(dm(X[0], Y[0])) == float(dm(X[0], Y[0]))
    plain.eval()
    assert np.isfinite(float(plain(X[0], Y[0])))


def test_a_pure_function_with_a_dict_batch(mesh_of_shape):
    mesh = mesh_of_shape(dp=2, tp=2)
    w = RNG.normal(size=(8, 2)).astype(np.float32)

    def apply(params, batch):
        return {"y": batch["x"] @ params["w"]}

    def loss(outputs, batch):
        return mse(outputs["y"], batch["y"])

    params = {"w": mp.shard_tensor(w, mesh, [mp.Replicate(), mp.Shard(0)])}
    dm = mp.to_static((apply, params), loss=loss, optimizer=optax.sgd(0.1))
    dm.train()
    losses = [float(dm({"x": x, "y": y})) for x, y in zip(X, Y, strict=True)]
    expected, value = [], jnp.asarray(w)
    for x, y in zip(X, Y, strict=True):
        step = jax.value_and_grad(lambda w, x=x, y=y: mse(x @ w, y))
        got, grad = step(value)
        value = value - 0.1 * grad
        expected.append(float(got))
    assert_allclose(losses, expected, rtol=1e-5)
    function, held = dm.model
    assert function is apply
    assert_allclose(held["w"], value, rtol=1e-5)
    dm.predict()
    assert_allclose(dm({"x": X[0], "y": Y[0]})["y"], X[0] @ value, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_intermediates_are_dropped_and_frozen_variables_stay(mesh_of_shape):
    class Frozen(nnx.Variable):
        pass

    class Sows(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 2, rngs=rngs)
            self.scale = Frozen(jnp.full((), 2.0))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return self.linear(x) * self.scale.get_value()

    model = Sows(nnx.Rngs(0))
    model(X[0])  # leaves an intermediate in the user's module
    with mesh_of_shape(dp=2):
        dm = mp.to_static(model, loss=mse, optimizer=optax.sgd(0.1))
    dm.train()
    first = float(dm(X[0], Y[0]))
    assert float(dm(X[0], Y[0])) < first
    state = dm.state_dict()
    assert not any("seen" in name for name in state)
    assert_array_equal(state["scale"], 2.0)
    assert len(model.seen.get_value()) == 1


def test_arrays_on_explicit_axes(mesh_of_shape):
    explicit = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = jax.sharding.PartitionSpec
    w = RNG.normal(size=(8, 2)).astype(np.float32)
    placed = jax.device_put(w, jax.sharding.NamedSharding(explicit, spec("tp")))
    batch = jax.device_put(X[0], jax.sharding.NamedSharding(explicit, spec("dp")))
    dm = mp.to_static(
        (lambda w, x: (x @ w) ** 2, placed), loss=lambda y, x: y.mean(), optimizer=optax.sgd(0.1)
    )
    assert dm.mesh == mesh_of_shape(dp=4, tp=2)
    dm.train()
    assert_allclose(dm(batch), ((X[0] @ w) ** 2).mean(), rtol=1e-5)
    assert mp.placements_of(dm.state_dict()["params"]) == [mp.Replicate(), mp.Shard(0)]
    assert_array_equal(placed, w)


def test_an_optimizer_that_looks_at_the_loss(mesh_of_shape):
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5, accumulation_size=1)
    tx = optax.chain(optax.sgd(0.0), plateau)
    with mesh_of_shape(dp=2):
        dm = mp.to_static((lambda w, x: (x * w).mean(), jnp.ones(())), optimizer=tx)
    dm.train()
    for _ in range(4):
        dm(X[0])
    scale = next(v for name, v in dm.state_dict("opt").items() if name.endswith(".scale"))
    assert float(scale) < 1
