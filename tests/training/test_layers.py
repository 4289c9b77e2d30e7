"""`shard_layer` and `shard_by_rules`: what is called, where variables lie, values unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from numpy.testing import assert_allclose, assert_array_equal

import meshpar as mp
from meshpar import models
from meshpar.models import ParamRule

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = jax.nn.relu(block(x))
        return self.drop(x)


@pytest.fixture
def mesh():
    return mp.ProcessMesh(np.arange(4).reshape(2, 2), ["dp", "tp"])


def by_column(name, module, mesh):
    if isinstance(module, nnx.Linear):
        module.kernel = mp.shard_tensor(module.kernel, mesh, [mp.Replicate(), mp.Shard(1)])


def placements(module):
    return {
        ".".join(map(str, path)): mp.placements_of(v.get_value())
        for path, v in nnx.iter_graph(module)
        if isinstance(v, nnx.Variable)
    }


def values(module):
    return [np.asarray(v) for v in jax.tree.leaves(nnx.state(module, nnx.Param))]


def test_every_module_is_visited_outer_ones_first_and_the_rest_is_replicated(mesh):
    calls = []

    def shard_fn(name, module, given):
        calls.append((name, type(module).__name__))
        assert given is mesh
        by_column(name, module, given)

    net = Net(rngs=nnx.Rngs(0))
    before = values(net)
    assert mp.shard_layer(net, mesh, shard_fn) is net
    assert calls[0] == ("", "Net")
    assert set(calls[1:]) == {
        ("first", "Linear"), ("drop", "Dropout"), ("blocks", "List"), ("blocks.0", "Linear"),
        ("blocks.1", "Linear"),
    }  # fmt: skip
    assert calls.index(("blocks", "List")) < calls.index(("blocks.0", "Linear"))
    for name, placed in placements(net).items():
        cut = mp.Shard(1) if name.endswith("kernel") else mp.Replicate()
        assert placed == [mp.Replicate(), cut], name
    for old, new in zip(before, values(net), strict=True):
        assert_array_equal(old, new)


def test_without_a_function_everything_is_replicated(mesh):
    net = mp.shard_layer(Net(rngs=nnx.Rngs(0)), mesh)
    assert set(map(str, placements(net).values())) == {"[Replicate(), Replicate()]"}


def test_uneven_dims_and_arrays_instead_of_variables(mesh):
    def shard_fn(name, module, mesh):
        if name == "first":
            kernel = module.kernel.get_value()
            module.kernel = mp.shard_tensor(kernel, mesh, [mp.Shard(0), mp.Shard(0)])

    net = Net(rngs=nnx.Rngs(0))
    kernel = net.first.kernel
    mp.shard_layer(net, mesh, shard_fn)
    assert net.first.kernel is kernel  # the variable itself, for whoever else holds it
    assert isinstance(kernel.get_value(), mp.DistTensor)  # 6 rows over 4 devices
    assert kernel.get_value().placements == [mp.Shard(0), mp.Shard(0)]


def test_shared_variables_stay_shared(mesh):
    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

    tied = mp.shard_layer(Tied(), mesh, by_column)
    assert tied.a.kernel is tied.b.kernel
    assert mp.placements_of(tied.a.kernel.get_value()) == [mp.Replicate(), mp.Shard(1)]


def test_hooks_see_inputs_and_outputs_on_every_call(mesh):
    seen = []

    def input_fn(inputs, given):
        seen.append(("in", given))
        assert isinstance(inputs, tuple)
        return [inputs[0] * 2]

    def output_fn(outputs, given):
        seen.append(("out", given))
        return outputs + 1

    plain = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    hooked = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    assert mp.shard_layer(hooked, mesh, by_column, input_fn, output_fn) is hooked
    assert isinstance(hooked, nnx.Linear) and hooked.in_features == 6
    assert_allclose(hooked(X), plain(X * 2) + 1, rtol=1e-5)
    assert seen == [("in", mesh), ("out", mesh)]
    # Copies and nnx's transforms keep the hooks.
    assert_allclose(nnx.merge(*nnx.split(hooked))(X), plain(X * 2) + 1, rtol=1e-5)
    assert_allclose(nnx.jit(lambda module, x: module(x))(hooked, X), plain(X * 2) + 1, rtol=1e-5)


def test_hooks_act_inside_the_module_that_holds_the_layer(mesh):
    net = Net(rngs=nnx.Rngs(0))
    net.eval()
    expected = net(X)
    mp.shard_layer(net.blocks[1], mesh, output_fn=lambda outputs, _: outputs * 2)
    assert_allclose(net(X), expected * 2, rtol=1e-5)
    assert type(net.blocks[0]) is nnx.Linear


def test_hooks_may_annotate_in_to_static(mesh):
    def cut_rows(inputs, mesh):
        return tuple(mp.reshard(x, mesh, [mp.Shard(0)]) for x in inputs)

    plain = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    net = mp.shard_layer(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), mesh, by_column, cut_rows)
    dm = mp.to_static(net)
    dm.predict()
    assert_allclose(dm(X), plain(X), rtol=1e-5)


def test_create_sharded_makes_values_where_shard_layer_puts_them(mesh):
    def build():
        return mp.shard_layer(Net(rngs=nnx.Rngs(0)), mesh, by_column)

    made, eager = mp.create_sharded(build), build()
    assert placements(made) == placements(eager)
    for lhs, rhs in zip(values(made), values(eager), strict=True):
        assert_array_equal(lhs, rhs)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_rules_of_a_reference_model(mesh, scan_layers):
    config = models.DecoderConfig(
        vocab_size=16, num_layers=2, model_dim=8, num_heads=2, num_kv_heads=2, head_dim=4,
        hidden_dim=16, max_seq_len=8, scan_layers=scan_layers,
    )  # fmt: skip
    model = mp.create_sharded(
        lambda: mp.shard_by_rules(models.Decoder(config, rngs=nnx.Rngs(0)), mesh), mesh
    )
    for name, placed in placements(model).items():
        lead = int(scan_layers and name.startswith("layers."))
        if name.endswith(("q.kernel", "up.kernel", "head.kernel")):
            assert placed == [mp.Replicate(), mp.Shard(lead + 1)], name
        elif name.endswith(("o.kernel", "down.kernel", "embedding")):
            assert placed == [mp.Replicate(), mp.Shard(lead)], name
        elif name.endswith("scale"):
            assert placed == [mp.Replicate()] * 2, name
    plain = models.Decoder(config, rngs=nnx.Rngs(0))
    for lhs, rhs in zip(values(model), values(plain), strict=True):
        assert_allclose(lhs, rhs, rtol=1e-6)  # jitted and eager normal() differ in the last bit


def test_rules_of_ones_own(mesh):
    rules = (ParamRule(r"blocks\.\d+\.kernel", ((0, "fsdp"), (1, "dp"))),)
    placed = placements(mp.shard_by_rules(Net(rngs=nnx.Rngs(0)), mesh, rules))
    assert placed["blocks.1.kernel"] == [mp.Shard(1), mp.Replicate()]
    assert placed["first.kernel"] == [mp.Replicate()] * 2


@pytest.mark.parametrize("call", [mp.shard_layer, mp.shard_by_rules])
def test_mistakes_are_named(mesh, call):
    net = Net(rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"{call.__name__}\(process_mesh\): a list is no mesh"):
        call(net, [0, 1])
    with pytest.raises(TypeError, match=rf"{call.__name__}\(layer\): a Dense is no flax nnx"):
        call(linen.Dense(4), mesh)


def test_rules_that_do_not_fit_are_named(mesh):
    with pytest.raises(TypeError, match="no rules for Net"):
        mp.shard_by_rules(Net(rngs=nnx.Rngs(0)), mesh)
    with pytest.raises(ValueError, match="splits dim 2"):
        mp.shard_by_rules(Net(rngs=nnx.Rngs(0)), mesh, (ParamRule(r"first\.kernel", ((2, "tp"),)),))


def test_jnp_values_of_a_hooked_layer_have_gradients(mesh):
    hooked = mp.shard_layer(
        nnx.Linear(6, 8, rngs=nnx.Rngs(0)), mesh, output_fn=lambda outputs, _: outputs * 3
    )
    plain = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    of = nnx.grad(lambda module: jnp.sum(module(X)))
    assert_allclose(of(hooked).kernel.get_value(), 3 * of(plain).kernel.get_value(), rtol=1e-5)
