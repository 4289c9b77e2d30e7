"""Embeddings whose rows are cut, and random values that do not know where they lie."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

import meshpar as mp

R, S0, S1 = mp.Replicate(), mp.Shard(0), mp.Shard(1)


def gradient_in_a_step(apply, params, inputs):
    """The gradient of the sum of the outputs, as a step of `to_static` sees it."""
    dm = mp.to_static(
        (apply, params),
        mp.Strategy({"data_axes": ()}),
        loss=lambda outputs, batch: outputs.sum(),
        optimizer=optax.sgd(1.0),
    )
    dm.train()
    dm(inputs)
    return np.asarray(params) - np.asarray(dm.state_dict()["params"])


@pytest.mark.parametrize("vocabulary, padding", [(10, 7), (11, 7), (10, -3), (11, -4)])
def test_an_embedding_with_a_padding_row_on_cut_rows(vocabulary, padding):
    ids = np.array([[1, 7, 2], [9, 7, 2]], np.int32)  # 7 and 2: both on either half, 2 twice
    table = np.random.default_rng(0).integers(-8, 8, (vocabulary, 4)).astype(np.float32)

    def embed(table, ids):
        rows = table[ids]
        return jnp.where((ids == padding % vocabulary)[..., None], 0.0, rows)

    mesh = mp.ProcessMesh([0, 1], ["tp"])
    placed = mp.shard_tensor(table, mesh, [S0])
    with mesh:
        dm = mp.to_static((embed, placed), mp.Strategy({"data_axes": ()}))
    dm.predict()
    assert_array_equal(dm(ids), np.where((ids == 7)[..., None], 0, table[ids]))
    gradient = gradient_in_a_step(embed, placed, ids)
    expected = np.zeros_like(table)
    expected[[1, 9, 2]] = np.array([1, 1, 2])[:, None]
    assert_array_equal(gradient, expected)


@pytest.mark.parametrize("placements", [[S0, R], [S0, S1], [R, R]], ids=str)
def test_dropout_masks_are_those_of_one_device(placements):
    mesh = mp.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])

    class Mask(nnx.Module):
        """Its gradient is the mask: twice 1 where a value is kept."""

        def __init__(self, rngs):
            self.params = nnx.Param(jnp.zeros((64, 64)))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.params.get_value()) * x

    def masks(mesh, placements):
        module = mp.shard_layer(Mask(nnx.Rngs(dropout=3)), mesh)
        module.params = mp.shard_tensor(module.params, mesh, placements)
        dm = mp.to_static(
            module,
            mp.Strategy({"data_axes": ()}),
            loss=lambda outputs, labels: outputs.sum() + labels,
            optimizer=optax.sgd(0.5),
        )
        dm.train()
        for _ in range(2):
            before = np.asarray(dm.state_dict()["params"])
            dm(np.float32(1), np.float32(0))
            value = dm.state_dict()["params"]
            yield before - np.asarray(value), value

    (mask, value), (following, _) = masks(mesh, placements)
    one = mp.ProcessMesh([0], ["one"])
    assert_array_equal(mask, next(masks(one, [R]))[0])
    assert set(np.unique(mask)) == {0, 1}
    assert abs(mask.mean() - 0.5) < 3 * 0.5 / 64
    assert not np.array_equal(mask, following)
    pieces = {}
    for shard in value.addressable_shards:
        pieces.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    for held in pieces.values():
        assert all(np.array_equal(held[0], other) for other in held)
    for lhs, rhs in itertools.combinations([held[0] for held in pieces.values()], 2):
        assert not np.array_equal(lhs, rhs)


@pytest.mark.parametrize(
    "shape, placements",
    [((2,), [S0]), ((4,), [S0]), ((8,), [S0]), ((4, 2), [S0, S1])],
    ids=str,
)
def test_random_values_do_not_depend_on_placement(shape, placements):
    def values(mesh, placements):
        def build():
            layer = nnx.Linear(496, 4, rngs=nnx.Rngs(0))
            layer.kernel = mp.shard_tensor(layer.kernel, mesh, placements)
            return layer

        key = jax.random.key(1)
        draws = [
            mp.dtensor_from_fn(draw, mesh, placements, key, (496, 4))
            for draw in (jax.random.normal, jax.random.uniform)
        ]
        order = mp.dtensor_from_fn(jax.random.permutation, mesh, placements[:1], key, 496)
        kernel = mp.create_sharded(build, mesh).kernel.get_value()
        return [*draws, order, kernel]

    mesh = mp.ProcessMesh(np.arange(int(np.prod(shape))).reshape(shape))
    one = mp.ProcessMesh([0])
    for lhs, rhs in zip(values(mesh, placements), values(one, [R]), strict=True):
        assert len({str(shard.index) for shard in lhs.addressable_shards}) > 1  # it is cut
        assert_array_equal(np.asarray(lhs), np.asarray(rhs))
