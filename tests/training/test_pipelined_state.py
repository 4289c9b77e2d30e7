"""A pipelined model's annotations, recomputation, accumulation, and its state on other meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from tests.training.small_pipeline import (
    Net,
    PlacedNet,
    batch,
    expected,
    losses,
    piped,
    placements,
    single,
)


class Annotated(PlacedNet):
    """Placements inside the layers, by this package and by jax, on the whole mesh."""

    def __init__(self, mesh, scanned):
        super().__init__(mesh, {"up": -1}, scanned)

    def layer(self, layer, x):
        h = mp.shard_tensor(
            jnp.tanh(layer.up(x)), self.mesh, placements(self.mesh, {"dp": 0, "tp": 1})
        )
        spec = jax.sharding.PartitionSpec("dp", "tp")
        sharding = jax.sharding.NamedSharding(self.mesh.jax_mesh, spec)
        return x + layer.down(jax.lax.with_sharding_constraint(h, sharding))


@pytest.mark.parametrize(
    "scanned, rows, options", [(True, 12, {"schedule_mode": "ZBH1"}), (False, 10, {})]
)
def test_annotations_inside_the_layers(scanned, rows, options):
    mesh = mp.ProcessMesh.create({"pp": 2, "dp": 2, "tp": 2})
    wanted = losses(single(Net(layers=4)), rows)
    dm = piped(Annotated(mesh, scanned), mesh, **options)
    np.testing.assert_allclose(losses(dm, rows), wanted, rtol=1e-5)


def test_what_is_annotated_over_the_ranks_is_refused():
    mesh = mp.ProcessMesh.create({"pp": 2})

    class Cut(Net):
        def __call__(self, x):
            return mp.shard_tensor(super().__call__(x), mesh, [mp.Shard(0)])

    dm = piped(Cut(), mesh)
    dm.train()
    with pytest.raises(NotImplementedError, match=r"'pp' at test_pipelined_state.py"):
        dm(*batch())


@pytest.mark.parametrize("axes", [{"pp": 4}, {"pp": 2, "dp": 2}], ids=str)
def test_recomputation_keeps_inputs_only(axes):
    dm = piped(Net(), axes, groups={"recompute": {"enable": True}}, schedule_mode="ZBH1")
    np.testing.assert_allclose(losses(dm), expected(), rtol=1e-5)


def test_recomputation_takes_less_memory():
    temporaries = []
    for on in (False, True):
        dm = piped(Net(8, True), {"pp": 2}, groups={"recompute": {"enable": on}})
        dm.train()
        temporaries.append(dm.memory_analysis(*(jnp.zeros((4096, 4)),) * 2).temp_size_in_bytes)
    assert temporaries[1] < 0.8 * temporaries[0]


def test_recomputation_without_a_pipeline():
    strategy = mp.Strategy({"recompute": {"enable": True}})
    with mp.ProcessMesh([0], ["dp"]), pytest.raises(NotImplementedError, match=r"nnx\.remat"):
        mp.to_static(Net(), strategy)


def test_accumulated_and_clipped_gradients():
    def tx():
        clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
        return mp.shard_optimizer(clipped, None, 2)

    wanted = losses(single(Net(), tx=tx()), steps=5)
    dm = piped(Net(), {"pp": 2, "dp": 2}, tx=tx(), schedule_mode="VPP", vpp_degree=2)
    np.testing.assert_allclose(losses(dm, steps=5), wanted, rtol=1e-5)


def tensor_parallel():
    mesh = mp.ProcessMesh.create({"dp": 2, "tp": 2})
    model = Net()
    for layer in model.layers:
        layer.up.kernel = mp.shard_tensor(layer.up.kernel, mesh, placements(mesh, {"tp": 1}))
    with mesh:
        return mp.to_static(
            model, loss=lambda y, t: ((y - t) ** 2).mean(), optimizer=optax.adam(1e-2)
        )


@pytest.mark.parametrize("to_pipeline", [False, True])
def test_checkpoints_load_on_another_mesh(tmp_path, to_pipeline):
    """Three steps, saved and loaded after the first: with a pipeline on one side only."""
    first, second = piped(Net(), {"pp": 4}), tensor_parallel()
    if to_pipeline:
        first, second = second, first
    got = losses(first, steps=1)
    mp.save_state_dict(first.state_dict(), tmp_path / "saved")
    state = second.state_dict()
    mp.load_state_dict(state, tmp_path / "saved")
    second.set_state_dict(state)
    got += losses(second, steps=2)
    np.testing.assert_allclose(got, expected(), rtol=1e-5)


def test_a_frozen_parameter_stays():
    def label(path, _):
        return "keep" if "first" in jax.tree_util.keystr(path) else "train"

    def tx():
        kinds = {"keep": optax.set_to_zero(), "train": optax.adam(1e-2)}
        return optax.multi_transform(kinds, lambda p: jax.tree_util.tree_map_with_path(label, p))

    dm = piped(Net(), {"pp": 2}, tx=tx(), schedule_mode="ZBH1")
    np.testing.assert_allclose(losses(dm), losses(single(Net(), tx=tx())), rtol=1e-5)
    before = Net().first.kernel.get_value()
    np.testing.assert_array_equal(np.asarray(dm.state_dict()["first.kernel"]), before)
