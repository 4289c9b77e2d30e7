"""`create_sharded` makes the values that the ordinary module has, where they belong."""

import jax
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

import meshpar as mp


def build_on(mesh, features=8):
    def build():
        layer = nnx.Linear(4, features, rngs=nnx.Rngs(0))
        layer.kernel = mp.shard_tensor(layer.kernel, mesh, [mp.Replicate(), mp.Shard(1)])
        layer.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        return layer

    return build


@pytest.mark.parametrize("features", [8, 7])
def test_values_are_bit_equal_and_lie_where_they_belong(mesh_of_shape, features):
    mesh = mesh_of_shape(dp=2, tp=4)
    layer = mp.create_sharded(build_on(mesh, features))
    plain = nnx.Linear(4, features, rngs=nnx.Rngs(0))
    kernel = layer.kernel.get_value()
    assert_array_equal(np.asarray(kernel), plain.kernel.get_value())
    assert mp.placements_of(kernel) == [mp.Replicate(), mp.Shard(1)]
    assert mp.placements_of(layer.bias.get_value()) == [mp.Replicate()] * 2
    assert isinstance(kernel, mp.DistTensor) == (features == 7)
    storage = kernel.storage if features == 7 else kernel
    assert {s.data.shape for s in storage.addressable_shards} == {(4, 2)}
    words = jax.random.key_data(layer.dropout.rngs.key.get_value())
    assert_array_equal(
        words, jax.random.key_data(nnx.Dropout(0.5, rngs=nnx.Rngs(1)).rngs.key.get_value())
    )


def test_which_mesh(mesh_of_shape):
    mesh, other = mesh_of_shape(dp=2, tp=4), mesh_of_shape(dp=4)
    with pytest.raises(mp.MeshError, match="values lie on different meshes"):
        mp.create_sharded(build_on(mesh), other)
    with pytest.raises(mp.MeshError, match="there is no mesh"):
        mp.create_sharded(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with other:
        layer = mp.create_sharded(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert mp.mesh_of(layer.kernel.get_value()) == other


def test_what_it_makes_trains(mesh_of_shape):
    mesh = mesh_of_shape(dp=2, tp=4)
    dm = mp.to_static(
        mp.create_sharded(build_on(mesh, 7)), loss=lambda y, labels: (y - labels).mean()
    )
    dm.eval()
    x = np.ones((2, 4), np.float32)
    y = nnx.Linear(4, 7, rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(dm(x, np.zeros((2, 7), np.float32)), y.mean(), rtol=1e-5)
