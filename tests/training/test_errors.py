"""What `to_static` refuses, and the two orders of its arguments."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp

LINEAR = (lambda w, x: (x @ w).mean(), jnp.ones((2, 2)))
DP2 = mp.ProcessMesh([0, 1], ["dp"])
X = np.ones((2, 2), np.float32)


def test_no_mesh():
    assert mp.get_mesh() is None
    with pytest.raises(mp.MeshError, match=r"there is no mesh(.|\n)*mp.set_mesh"):
        mp.to_static(LINEAR)


def test_two_meshes_are_named_with_a_leaf_each():  # C37
    params = {
        "first": mp.shard_tensor(X, DP2, [mp.Shard(0)]),
        "second": mp.shard_tensor(X, mp.ProcessMesh([0, 1], ["tp"]), [mp.Shard(0)]),
    }
    with pytest.raises(mp.MeshError, match=r"to_static.*lies on two meshes") as error:
        mp.to_static((LINEAR[0], params))
    assert "first" in str(error.value) and "second" in str(error.value)
    assert "dp" in str(error.value) and "tp" in str(error.value)


def test_the_optimizers_mesh_must_be_the_models():
    params = mp.shard_tensor(X, DP2, [mp.Shard(0)])
    other = mp.ProcessMesh([0, 1, 2, 3], ["dp"])
    optimizer = mp.shard_optimizer(optax.sgd(1.0), mp.ShardingStage1("dp", other))
    with pytest.raises(mp.MeshError, match=r"two meshes(.|\n)*the optimizer's ShardingStage1"):
        mp.to_static((LINEAR[0], params), optimizer=optimizer)


def test_the_parameters_mesh_comes_before_the_default_one():
    with mp.ProcessMesh([0, 1, 2, 3], ["dp"]):
        dm = mp.to_static((LINEAR[0], mp.shard_tensor(X, DP2, [mp.Shard(0)])))
        assert dm.mesh == DP2
        assert mp.to_static(LINEAR).mesh.size == 4


def test_the_optimizers_mesh_serves_a_model_without_one():
    optimizer = mp.shard_optimizer(optax.sgd(1.0), mp.ShardingStage1(0, DP2))
    assert mp.to_static(LINEAR, optimizer=optimizer).mesh == DP2


class Empty(nnx.Module):
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    "args, options, error, words",
    [
        ((Empty(),), {}, ValueError, "Empty has no parameters"),
        (((LINEAR[0], {}),), {}, ValueError, "has no parameters"),
        ((LINEAR[0],), {}, TypeError, "model is a function; it takes an nnx.Module"),
        ((5,), {}, TypeError, "model is a int; it takes"),
        ((LINEAR,), {"strategy": {}}, TypeError, "a dict is no Strategy"),
        ((LINEAR, {"sharding": {}}), {}, TypeError, "a dict is no loader of batches"),
        (
            (LINEAR, mp.Strategy({"data_axes": "dp"})),
            {},
            TypeError,
            r"takes a tuple of axes, such as \('dp',\)",
        ),
        ((LINEAR,), {"optimizer": "adam"}, TypeError, "a str is no optax transformation"),
        ((LINEAR, mp.Strategy()), {"strategy": mp.Strategy()}, TypeError, "strategy is given both"),
        ((LINEAR, 1, 2, 3, 4, 5, 6), {}, TypeError, "7 positional arguments"),
        (
            (nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))),),
            {},
            ValueError,
            "'bias' of Linear is a shape without a value; mp.create_sharded",
        ),
    ],
)
def test_what_is_refused(args, options, error, words):
    with DP2, pytest.raises(error, match=words):
        mp.to_static(*args, **options)


def test_paddles_positional_order_is_understood():
    def loss(outputs, batch):
        return outputs

    tx, loader, strategy = optax.sgd(0.5), [X], mp.Strategy({"data_axes": ("dp",)})
    results = []
    with DP2:
        for dm in (
            mp.to_static(LINEAR, loader, loss, tx, strategy),
            mp.to_static(LINEAR, strategy, loss=loss, optimizer=tx, loader=loader),
            mp.to_static(LINEAR, loader, loss, optimizer=tx, strategy=strategy),
            mp.to_static(LINEAR, None, optimizer=tx),
        ):
            dm.train()
            results.append((float(dm(X)), float(dm(X))))
    assert len(set(results)) == 1 and results[0][0] == 2.0


def test_building_takes_no_batch_from_the_loader():
    def batches():
        raise AssertionError("a batch was taken")
        yield

    with DP2:
        mp.to_static(LINEAR, batches(), None, optax.sgd(0.5), None)


def test_a_step_that_changes_the_states_shape_says_so():
    class Grows(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))
            self.seen = nnx.BatchStat(jnp.zeros(1))

        def __call__(self, x):
            self.seen.set_value(jnp.zeros(x.shape))
            return (self.w.get_value() * x).mean()

    class Adds(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            self.cache = nnx.Cache(x)
            return (self.w.get_value() * x).mean()

    for model, words in (
        (Grows(), r"'seen' changes its shape in a step, from \(1,\) to \(2, 2\)"),
        (Adds(), "Adds: the forward pass creates or removes the state cache"),
    ):
        with DP2:
            dm = mp.to_static(model, optimizer=optax.sgd(0.1))
        dm.train()
        with pytest.raises(ValueError, match=words):
            dm(X)
