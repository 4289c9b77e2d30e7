"""Stages where the user says: at modules, by class, or by parameters on the mesh of a rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshpar as mp
from meshpar import schedules
from meshpar.compiler.program import program_of
from meshpar.schedules.executors.layers import LayerError
from meshpar.training.paths import named_leaves
from meshpar.training.split_point import read_splits
from meshpar.training.stage_counts import OnRanks, shared_out
from meshpar.training.strategy_groups import PipelineConfig
from tests.training.small_pipeline import Net, batch, expected, loss, losses, piped

BEGINNING, END = mp.SplitPoint.BEGINNING, mp.SplitPoint.END


def counts(model, stages, ranks=None, schedule="1F1B", P=2, V=1):
    """How many layers each stage has, without compiling anything."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    x, y = batch()

    def of_leaves(leaves, x, y):
        return loss(nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x), y)

    program = program_of(jax.make_jaxpr(of_leaves)(leaves, x, y))
    names = [name for name, _ in named_leaves(state)]
    if ranks is None:
        stages = read_splits(PipelineConfig.from_dict(stages), model)
    else:
        stages = OnRanks(
            tuple((n, r) for n in names for at, r in ranks.items() if n.startswith(at))
        )
    table = schedules.generate(schedule, P, 3, V)
    params, rest = program.inputs[: len(leaves)], program.inputs[len(leaves) :]
    layers, found = shared_out(stages, names, table, program, params, rest)
    assert sum(found) == layers.count
    return list(found)


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(
    "spec, P, found",
    [
        ({"layers.1": END}, 2, [2, 3]),
        ({"layers.1": BEGINNING}, 2, [1, 4]),
        ({"first": END}, 2, [0, 5]),
        ({"head": BEGINNING}, 2, [5, 0]),
        ({"first": END, "layers.0": END, "layers.3": END}, 4, [0, 1, 3, 1]),
        ("layers", 2, [3, 2]),
        (["layers"], 4, [2, 1, 1, 1]),
    ],
    ids=str,
)
def test_modules_say_how_many_layers_a_stage_has(spec, P, found, scanned):
    assert counts(Net(scanned=scanned), {"split_spec": spec}, P=P) == found


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("name, V, found", [("1F1B", 1, [3, 2]), ("VPP", 2, [2, 1, 1, 1])])
def test_classes_are_shared_out(name, V, found, scanned):
    stages = {"vpp_seg_method": "layer:block"}
    assert counts(Net(scanned=scanned), stages, schedule=name, V=V) == found


@pytest.mark.parametrize(
    "ranks, name, P, V, found",
    [
        ((0, 0, 1, 1, 1), "1F1B", 2, 1, [2, 3]),
        ((0, 1, 3, 3, 3), "1F1B", 4, 1, [1, 1, 0, 3]),
        ((0, 1, 1, 0, 1), "VPP", 2, 2, [1, 2, 1, 1]),
        ((0, 1, 1, 0, 0), "ZBVPP", 2, 2, [1, 1, 1, 2]),
    ],
    ids=str,
)
def test_ranks_say_how_many_layers_a_stage_has(ranks, name, P, V, found):
    of = {f"layers.{k}.": rank for k, rank in enumerate(ranks)}
    assert counts(Net(), None, of, schedule=name, P=P, V=V) == found


@pytest.mark.parametrize(
    "spec, P, message",
    [
        ({"layers.9": END}, 4, r"1 split points for 4 stages[\s\S]*4 stages meet at 3 points"),
        ({"layer.1": END}, 2, r"no module 'layer.1'[\s\S]*'layers.1'"),
        ("block", 2, r"no module 'block.0'[\s\S]*first, head, layers"),
        (
            dict.fromkeys(["layers.3", "layers.1", "layers.2"], END),
            4,
            r"'layers.1' after 'layers.3'",
        ),
        (
            dict.fromkeys(["layers.0", "layers.1.up", "layers.2"], END),
            4,
            r"'layers.1.up' is a part of a layer[\s\S]*layers.1.down",
        ),
        ("layers", 8, r"5 modules for 8 stages"),
    ],
    ids=str,
)
def test_modules_that_do_not_fit(spec, P, message):
    with pytest.raises(LayerError, match=message):
        counts(Net(), {"split_spec": spec}, P=P)


@pytest.mark.parametrize(
    "ranks, name, V, message",
    [
        ({"layers.0.": 0}, "1F1B", 1, r"layer 1 lies on no rank"),
        ({"layers.0.up": 0, "layers.0.down": 1}, "1F1B", 1, r"layer 0 lies on several ranks"),
        ({f"layers.{k}.": (1, 0)[k > 1] for k in range(5)}, "1F1B", 1, r"on ranks 1, 1, 0, 0, 0"),
        ({f"layers.{k}.": k > 1 for k in range(5)}, "VPP", 2, r"on ranks 0, 1, 0, 1, of VPP"),
        (
            {"first": 1, **{f"layers.{k}.": k > 1 for k in range(5)}},
            "VPP",
            1,
            r"used before the layers, on rank 0",
        ),
    ],
    ids=str,
)
def test_ranks_that_do_not_fit(ranks, name, V, message):
    with pytest.raises(LayerError, match=message):
        counts(Net(), None, {k: int(r) for k, r in ranks.items()}, schedule=name, V=V)


def test_ranks_of_scanned_layers():
    with pytest.raises(LayerError, match="arrays of all layers"):
        counts(Net(scanned=True), None, {"layers": 0}, P=4)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"vpp_seg_method": "even"}, ValueError, "'layer:'"),
        ({"vpp_seg_method": "layer:Nothing"}, ValueError, "Block, Linear"),
        ({"vpp_seg_method": "layer:("}, ValueError, "layer:"),
        ({"vpp_seg_method": "layer:Block", "split_spec": "layers"}, ValueError, "one of them"),
        ({"split_spec": {"layers.1": "END"}}, ValueError, "SplitPoint"),
        ({"split_spec": 3}, ValueError, "SplitPoint"),
        ({"split_spec": []}, ValueError, "SplitPoint"),
    ],
)
def test_options_that_say_no_stages(options, error, message):
    with pytest.raises(error, match=message):
        piped(Net(), {"pp": 2}, **options)


def test_classes_of_a_model_that_has_none():
    with pytest.raises(TypeError, match=r"nnx\.Module"):
        piped((lambda params, x: x @ params, jnp.ones((4, 4))), {"pp": 2}, vpp_seg_method="layer:X")


# --- training -------------------------------------------------------------------------------------


def test_stages_of_unequal_length_train_like_one_device():
    spec = {"layers.0": END, "layers.1": END, "head": BEGINNING}
    dm = piped(Net(), {"pp": 4}, split_spec=spec, schedule_mode="ZBH1")
    np.testing.assert_allclose(losses(dm), expected(), rtol=1e-5)


class Two(nnx.Module):
    """Nothing in it is equal."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc1 = nnx.Linear(4, 8, rngs=rngs)
        self.fc2 = nnx.Linear(8, 6, rngs=rngs)
        self.fc3 = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.fc3(jax.nn.relu(self.fc2(jnp.tanh(self.fc1(x)))))


@pytest.mark.parametrize(
    "name, spec", [("1F1B", {"fc2": END}), ("ZBH1", {"fc2": BEGINNING}), ("FThenB", None)]
)
def test_two_stages_need_no_equal_layers(name, spec):
    dm = piped(Two(), {"pp": 2}, split_spec=spec, schedule_mode=name)
    np.testing.assert_allclose(losses(dm), expected(Two), rtol=1e-5)


class Placed(Net):
    """Semi-automatic code: parameters on a rank's mesh, activations moved from one to the next."""

    def __init__(self, mesh, ranks, ends=False):
        super().__init__()
        self.mesh, self.ranks = mesh, ranks
        modules = list(zip(self.layers, ranks, strict=True))
        modules += [(self.first, ranks[0]), (self.head, ranks[-1])] if ends else []
        for module, rank in modules:
            mp.shard_layer(module, mesh.get_mesh_with_dim("pp")[rank], by_column)

    def __call__(self, x):
        x = self.first(x)
        for k, layer in enumerate(self.layers):
            part = self.mesh.get_mesh_with_dim("pp")[self.ranks[k]]
            if k and self.ranks[k] != self.ranks[k - 1]:
                x = mp.reshard(x, part, placements(part, dp=0))
            h = mp.shard_tensor(jnp.tanh(layer.up(x)), part, placements(part, dp=0, tp=1))
            x = x + layer.down(h)
        return self.head(x)


def by_column(name, module, mesh):
    if isinstance(module, nnx.Linear):
        module.kernel = mp.shard_tensor(module.kernel, mesh, placements(mesh, tp=1))


def placements(mesh, **cut):
    return [mp.Shard(cut[a]) if a in cut else mp.Replicate() for a in mesh.dim_names]


@pytest.mark.parametrize(
    "axes, ranks, ends, options",
    [
        ({"pp": 2, "dp": 2, "tp": 2}, (0, 0, 1, 1, 1), True, {}),
        ({"dp": 2, "pp": 2}, (0, 1, 0, 1, 1), False, {"schedule_mode": "VPP", "vpp_degree": 2}),
        ({"pp": 4}, (0, 0, 1, 2, 3), True, {"schedule_mode": "ZBH1"}),
    ],
    ids=str,
)
def test_layers_on_the_meshes_of_ranks_train_like_one_device(axes, ranks, ends, options):
    mesh = mp.ProcessMesh.create(axes)
    with mesh:
        dm = piped(Placed(mesh, ranks, ends), mesh, **options)
    np.testing.assert_allclose(losses(dm), expected(), rtol=1e-5)


def test_without_a_pipeline_two_meshes_are_refused():
    mesh = mp.ProcessMesh.create({"pp": 2})
    with mesh, pytest.raises(mp.MeshError, match=r"Strategy.pipeline"):
        mp.to_static(Placed(mesh, (0, 0, 1, 1, 1)), loss=loss)


def test_stages_that_are_given_twice():
    mesh = mp.ProcessMesh.create({"pp": 2})
    with mesh, pytest.raises(ValueError, match=r"'layers.0.*give one of them"):
        piped(Placed(mesh, (0, 0, 1, 1, 1)), mesh, split_spec="layers")


def test_values_that_move_where_no_parameter_lies():
    mesh = mp.ProcessMesh.create({"pp": 2})

    class Moving(Net):
        def __call__(self, x):
            x = self.first(x)
            for k, layer in enumerate(self.layers):
                x = mp.reshard(layer(x), mesh.get_mesh_with_dim("pp")[int(k > 2)], [])
            return self.head(x)

    dm = piped(Moving(), mesh)
    dm.train()
    with pytest.raises(mp.MeshError, match=r"rank 1, where no parameter lies[\s\S]*split_spec"):
        dm(*batch())
