"""Where a batch lies, what is refused, and losses over the whole batch whatever its cuts."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import meshpar as mp
from meshpar.models import cross_entropy


def linear(mesh, *, apply=None, loss=None, strategy=None, **options):
    """`apply(params, batch)` with one weight, in mode "eval"."""
    with mesh:
        dm = mp.to_static(
            (apply or (lambda w, batch: w * batch["ids"]), jnp.ones(())),
            strategy,
            loss=loss or (lambda outputs, batch: outputs.mean()),
            optimizer=optax.sgd(1.0),
            **options,
        )
    dm.eval()
    return dm


# --- C36: a batch that does not divide ------------------------------------------------------------


def test_a_leaf_that_does_not_divide_is_named(mesh_of_shape):
    dm = linear(mesh_of_shape(dp=4, tp=2))
    batch = {"ids": np.zeros((6, 5), np.float32), "mask": np.zeros((8, 5), np.float32)}
    with pytest.raises(mp.PlacementError) as error:
        dm(batch)
    text = str(error.value)
    assert text.startswith("DistModel in mode 'eval': 'ids', of shape (6, 5), cannot be cut evenly")
    assert "dim 0 has 6 rows, mesh axis 'dp' of size 4" in text and "6 % 4 = 2" in text
    for hint in ("pad", "drop rows to get 4 or 8", "replicate", "shard_dataloader"):
        assert hint in text
    assert error.value.__suppress_context__ and "meshpar/" not in text


def test_one_row_over_eight_devices(mesh_of_shape):
    dm = linear(mesh_of_shape(dp=8))
    with pytest.raises(mp.PlacementError, match=r"of shape \(1, 5\)(.|\n)*1 % 8 = 1(.|\n)*get 8,"):
        dm({"ids": np.zeros((1, 5), np.float32)})


def test_positional_arguments_are_named_as_the_model_names_them(mesh_of_shape):
    with mesh_of_shape(dp=8):
        dm = mp.to_static(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), loss=lambda y, labels: y.mean())
    dm.eval()
    with pytest.raises(mp.PlacementError, match=r"'inputs', of shape \(3, 2\)"):
        dm(np.zeros((3, 2), np.float32), np.zeros(8))
    with pytest.raises(mp.PlacementError, match=r"'labels', of shape \(3,\)"):
        dm(np.zeros((8, 2), np.float32), np.zeros(3))


def test_a_batch_on_another_mesh_and_one_that_is_no_array(mesh_of_shape):
    dm = linear(mesh_of_shape(dp=2))
    elsewhere = mp.shard_tensor(np.zeros((8, 2)), mesh_of_shape(dp=4), [mp.Shard(0)])
    with pytest.raises(mp.MeshError, match="'ids' lies on another mesh than the model"):
        dm({"ids": elsewhere})
    with pytest.raises(TypeError, match="'ids' is a str, not an array"):
        dm({"ids": "words"})


# --- the order of what decides --------------------------------------------------------------------


def placements(dm, *args):
    return [mp.placements_of(leaf) for leaf in jax.tree.leaves(dm.place_batch(*args))]


def test_the_default_cuts_dim_0_over_the_data_axes(mesh_of_shape):
    mesh = mesh_of_shape(dp=2, fsdp=2, tp=2)
    batch = {"ids": np.zeros((8, 2), np.float32), "scale": np.float32(1)}
    cut = [mp.Shard(0), mp.Shard(0), mp.Replicate()]
    assert placements(linear(mesh), batch) == [cut, [mp.Replicate()] * 3]
    strategy = mp.Strategy({"data_axes": ("tp",)})
    cut = [mp.Replicate(), mp.Replicate(), mp.Shard(0)]
    assert placements(linear(mesh, strategy=strategy), batch)[0] == cut


def test_placed_before_spec_before_loader_before_default(mesh_of_shape):
    mesh = mesh_of_shape(dp=2, tp=2)

    class Loader:
        def batch_placements(self, name, ndim):
            return [mp.Replicate(), mp.Shard(0)] if name in ("ids", "spec") else None

    x = np.zeros((4, 4), np.float32)
    placed = mp.shard_tensor(x, mesh, [mp.Shard(1), mp.Shard(0)])
    spec = {"spec": [mp.Shard(1)], "placed": [mp.Shard(1)]}
    dm = linear(mesh, loader=Loader(), input_spec=[spec])
    assert placements(dm, {"ids": x, "other": x, "placed": placed, "spec": x}) == [
        [mp.Replicate(), mp.Shard(0)],
        [mp.Shard(0), mp.Replicate()],
        [mp.Shard(1), mp.Shard(0)],
        [mp.Shard(1), mp.Replicate()],
    ]


def test_specs_of_every_form(mesh_of_shape):
    mesh = mesh_of_shape(dp=2)
    x = np.zeros((4, 4), np.float32)
    sharding = jax.sharding.NamedSharding(mesh.jax_mesh, jax.sharding.PartitionSpec(None, "dp"))
    aval = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=sharding)
    for spec, expected in [
        ([mp.Shard(1)], mp.Shard(1)),
        (sharding, mp.Shard(1)),
        (aval, mp.Shard(1)),
        (mp.Layout(((), ("dp",))), mp.Shard(1)),
        (None, mp.Shard(0)),
    ]:
        assert placements(linear(mesh, input_spec=[spec]), {"ids": x}) == [[expected]]
    with pytest.raises(mp.PlacementError, match="no mesh axis 'tp'"):
        linear(mesh, input_spec=[mp.Layout(((), ("tp",)))])({"ids": x})
    with pytest.raises(TypeError, match="input_spec"):
        linear(mesh, input_spec=[5])({"ids": x})
    with pytest.raises(TypeError, match="input_spec"):
        linear(mesh, input_spec=5)


def test_input_spec_tells_inputs_from_labels(mesh_of_shape):
    class Product(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x, y):
            return x * self.w.get_value(), y * self.w.get_value()

    def loss(first, second, label, weight):
        return (weight * (first + second - label) ** 2).mean()

    with mesh_of_shape(dp=2):
        dm = mp.to_static(Product(), loss=loss, input_spec=([None, None], [None, [mp.Shard(0)]]))
    dm.eval()
    x = np.arange(4, dtype=np.float32)
    assert_allclose(dm(x, x + 1, x + 2, x), np.mean(x * (x + x + 1 - x - 2) ** 2))


def test_a_mesh_without_data_axes_replicates_with_one_warning(mesh_of_shape):
    batch = {"ids": np.zeros((3, 2), np.float32), "more": np.zeros((5,), np.float32)}
    dm = linear(mesh_of_shape(tp=2))
    with pytest.warns(mp.ReplicatedBatchWarning, match="'ids' and the rest.*has no axis") as caught:
        dm(batch)
        dm(batch)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear(mesh_of_shape(tp=2), strategy=mp.Strategy({"data_axes": ()}))(batch)


# --- whole-batch meaning --------------------------------------------------------------------------


def test_weighted_mean_divides_by_the_weights_of_all(mesh_of_shape):  # C12
    class_weights = jnp.array([1.0, 10.0])

    def loss(losses, batch):
        weights = class_weights[batch["targets"]]
        return (weights * losses).sum() / weights.sum()

    dm = linear(mesh_of_shape(dp=2), loss=loss)
    batch = {"ids": np.float32([1, 1, 1, 2]), "targets": np.int32([0, 0, 0, 1])}
    assert_allclose(dm(batch), 23 / 13, rtol=1e-6)
    dm.train()
    dm(batch)
    assert_allclose(dm.state_dict()["params"], 1 - 23 / 13, rtol=1e-5)


@pytest.mark.parametrize("ignored", [[0], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_ignored_labels_do_not_count_wherever_they_lie(mesh_of_shape, ignored):  # C12, C19 (v)
    logits = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    labels = np.arange(8, dtype=np.int32) % 3
    labels[ignored] = -1

    def loss(logits, batch):
        return cross_entropy(logits, batch["labels"], ignore_index=-1)

    kept = [i for i in range(8) if i not in ignored]
    nats = -jax.nn.log_softmax(logits)[np.arange(8), labels]
    dm = linear(mesh_of_shape(dp=2), loss=loss)
    dm.train()
    value = dm({"ids": logits, "labels": labels})
    assert_allclose(value, nats[jnp.array(kept)].mean() if kept else 0.0, rtol=1e-6)
    assert np.isfinite(dm.state_dict()["params"])


def test_token_weights_of_a_batch_and_of_data_parallelism(mesh_of_shape):  # C19 (i), (iii)
    batch = {
        "ids": np.float32([[1, 1, 1, 0], [5, 0, 0, 0]]),
        "mask": np.float32([[1, 1, 1, 0], [1, 0, 0, 0]]),
    }

    def loss(losses, batch):
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    weights = []
    for mesh in (mesh_of_shape(dp=1), mesh_of_shape(dp=2)):
        dm = linear(mesh, loss=loss)
        dm.train()
        assert_allclose(dm(batch), 2.0, rtol=1e-6)
        weights.append(float(dm.state_dict()["params"]))
    assert_allclose(weights, [-1.0, -1.0], rtol=1e-6)  # 1 - d(2 w)/dw


# --- uneven batches -------------------------------------------------------------------------------


def test_an_uneven_placed_batch_counts_its_true_rows(mesh_of_shape):
    mesh = mesh_of_shape(dp=4)
    values = np.arange(10, dtype=np.float32)[:, None] + 1
    x = mp.shard_tensor(values, mesh, [mp.Shard(0)])
    assert isinstance(x, mp.DistTensor)
    dm = linear(mesh)
    assert_allclose(dm({"ids": x}), values.mean(), rtol=1e-6)
    dm.train()
    dm({"ids": x})
    assert_allclose(dm.state_dict()["params"], 1 - values.mean(), rtol=1e-6)
    dm.predict()
    assert_array_equal(dm({"ids": x}), values * (1 - values.mean()))


def test_a_pending_reduction_is_reduced(mesh_of_shape):
    mesh = mesh_of_shape(dp=2)
    dm = linear(mesh)
    pending = mp.dtensor_from_local(
        [np.ones((4, 1), np.float32), np.full((4, 1), 2, np.float32)], mesh, [mp.Partial()]
    )
    assert_allclose(dm({"ids": pending}), 3.0)


@pytest.mark.parametrize("rows", [8, 10])
def test_batch_statistics_are_those_of_the_whole_batch(mesh_of_shape, rows):  # C13
    mesh = mesh_of_shape(dp=4)
    values = np.arange(rows, dtype=np.float32)[:, None]
    with mesh:
        model = nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
        dm = mp.to_static(
            model, loss=lambda y, labels: (y * labels).sum(), optimizer=optax.sgd(0.0)
        )
    dm.train()
    x = mp.shard_tensor(values, mesh, [mp.Shard(0)])
    dm(x, x)
    state = dm.state_dict("param")
    assert_allclose(state["mean"], [0.1 * values.mean()], rtol=1e-6)
    assert_allclose(state["var"], [0.9 + 0.1 * values.var()], rtol=1e-6)
    for name in ("mean", "var"):
        shards = [np.asarray(shard.data) for shard in state[name].addressable_shards]
        assert len(shards) == 4 and all((shard == shards[0]).all() for shard in shards)
