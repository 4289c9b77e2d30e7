"""`mp.check` of a training step: equal to one device, or the operation that is not."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar.rules.registry import RULES
from meshpar.rules.rule import einsum


class Net(nnx.Module):
    """Dropout, an uneven width, and a sort, which is easily done wrong."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(10, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.sort(self.dropout(nnx.gelu(self.up(x))), axis=0))


@pytest.fixture
def step(mesh_of_shape):
    mesh = mesh_of_shape(dp=2, tp=4)
    net = Net(nnx.Rngs(params=0, dropout=1))
    net.up.kernel = mp.shard_tensor(net.up.kernel, mesh, [mp.Replicate(), mp.Shard(1)])
    net.down.kernel = mp.shard_tensor(net.down.kernel, mesh, [mp.Replicate(), mp.Shard(0)])
    strategy = mp.Strategy({"sharding": {"enable": True, "stage": 1}})

    def loss(y, labels):
        return jnp.mean((y - labels) ** 2)

    dm = mp.to_static(net, strategy, loss=loss, optimizer=optax.adam(1e-2))
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 8)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    dm.train()
    return dm, batch


def test_a_training_step_equals_one_device(step):
    dm, batch = step
    before = {name: np.asarray(x) for name, x in dm.state_dict("opt").items()}
    assert mp.check(dm, *batch) is None
    after = dm.state_dict("opt")
    assert all(np.array_equal(x, np.asarray(after[name])) for name, x in before.items())
    dm.eval()
    assert mp.check(dm, *batch) is None


def test_a_wrong_rule_is_found_in_a_training_step(step, monkeypatch):
    dm, batch = step

    def elementwise(*xs, **_):
        each = ",".join(["ij"] * len(xs))
        return einsum(f"{each}->{each}", xs)

    monkeypatch.setitem(RULES, "sort", elementwise)
    found = mp.check(dm, *batch)
    assert found is not None
    assert found.operation == "sort"
    assert "test_check.py" in found.where
