"""Checkpoints: any mesh and placements to any other, plain entries, training that goes on."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

import meshpar as mp
from meshpar.models import cross_entropy

R, S0, S1 = mp.Replicate(), mp.Shard(0), mp.Shard(1)


def mesh_of(*shape):
    names = ["dp", "tp", "pp"][: len(shape)]
    return mp.ProcessMesh(np.arange(int(np.prod(shape))).reshape(shape), names)


def ones_like(value, mesh, placements):
    return mp.shard_tensor(np.ones_like(value), mesh, placements)


# --- values -------------------------------------------------------------------------------------

# A vocabulary of 11 rows divides by no mesh here; 6 columns do by some.
SOURCES = [
    ((2, 4), [R, R]),
    ((2, 4), [S0, S1]),
    ((4, 2), [S0, S0]),
    ((8,), [S0]),
    ((3,), [S1]),
    ((2, 2), [mp.Partial(), S1]),
]
TARGETS = [
    ((1,), [R]),
    ((4,), [S0]),
    ((2, 2, 2), [S1, S0, R]),
    ((2, 3), [S0, S0]),
    ((2, 2), [S0, mp.Partial()]),
    ((2, 2), [mp.Partial("max"), R]),
]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_values_come_back_on_any_mesh_in_any_placements(tmp_path, source):
    value = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)
    mp.save_state_dict({"w": mp.shard_tensor(value, mesh_of(*source[0]), source[1])}, tmp_path)
    for shape, placements in TARGETS:
        mesh = mesh_of(*shape)
        state = {"w": ones_like(value, mesh, placements)}
        kind = type(state["w"])
        mp.load_state_dict(state, tmp_path)
        assert_array_equal(np.asarray(state["w"]), value)
        assert isinstance(state["w"], kind)
        assert mp.placements_of(state["w"]) == placements and mp.mesh_of(state["w"]) == mesh


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]
)
def test_dtypes_and_shapes_are_kept_exactly(tmp_path, dtype):
    mesh = mesh_of(2, 2)
    shapes = [(), (1,), (5, 3), (0, 3), (4, 0), (2, 3, 4)]
    rng = np.random.default_rng(1)
    values = {
        str(i): rng.normal(size=shape).astype(dtype) if dtype != "bfloat16"
        else rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        for i, shape in enumerate(shapes)
    }  # fmt: skip

    def lie(value):
        return mp.shard_tensor(value, mesh, [S0, R] if np.ndim(value) else [])

    mp.save_state_dict({name: lie(value) for name, value in values.items()}, tmp_path)
    state = {name: lie(np.zeros_like(value)) for name, value in values.items()}
    mp.load_state_dict(state, tmp_path)
    for name, value in values.items():
        assert state[name].dtype == value.dtype
        assert np.asarray(state[name]).tobytes() == value.tobytes(), name
        assert mp.placements_of(state[name]) == mp.placements_of(lie(value))


def test_plain_entries_keys_and_pytrees(tmp_path):
    mesh = mesh_of(4)
    tx = optax.adamw(optax.linear_schedule(0.0, 1.0, 10))
    opt = tx.init({"w": jnp.arange(4.0)})
    keys = {
        "key": jax.random.key(3),
        "keys": mp.shard_tensor(jax.random.split(jax.random.key(4), 8), mesh, [S0]),
        "rbg": jax.random.key(5, impl="rbg"),
    }
    plain = {"step": 12, "loss": 0.1, "bad": float("inf"), "name": "run 1", "done": False}
    mp.save_state_dict({"opt": opt, **keys, **plain, "host": np.arange(3)}, tmp_path)
    zeros = {name: type(value)() for name, value in plain.items()}
    others = {name: jax.random.wrap_key_data(
        jnp.zeros_like(jax.random.key_data(key)), impl=jax.random.key_impl(key)
    ) for name, key in keys.items()}  # fmt: skip
    state = {"opt": jax.tree.map(jnp.zeros_like, opt), **others, **zeros, "host": np.zeros(3, int)}
    mp.load_state_dict(state, tmp_path)
    assert {name: state[name] for name in plain} == plain
    assert type(state["done"]) is bool and type(state["host"]) is np.ndarray
    assert jax.tree.structure(state["opt"]) == jax.tree.structure(opt)
    jax.tree.map(assert_array_equal, state["opt"], opt)
    for name, key in keys.items():
        assert state[name].dtype == key.dtype
        assert_array_equal(jax.random.key_data(state[name]), jax.random.key_data(key))


def test_targets_without_values(tmp_path):
    mesh = mesh_of(2, 2)
    value = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    mp.save_state_dict({"a": value, "b": value, "c": value, "k": jax.random.key(7)}, tmp_path)
    sharding = ones_like(value, mesh, [S0, S1]).sharding
    state = {
        "a": jax.ShapeDtypeStruct((4, 6), np.float32, sharding=sharding),
        "b": jax.ShapeDtypeStruct((4, 6), np.float32),
        "k": jax.eval_shape(lambda: jax.random.key(0)),
    }
    mp.load_state_dict(state, tmp_path)
    assert state["a"].sharding == sharding and isinstance(state["b"], np.ndarray)
    assert_array_equal(state["a"], value)
    assert_array_equal(state["b"], value)
    assert jax.random.key_data(state["k"]).tolist() == [0, 7]


def test_offload_reads_to_the_host(tmp_path):
    value = np.arange(11.0, dtype=np.float32)
    uneven = mp.shard_tensor(value, mesh_of(4), [S0])
    mp.save_state_dict({"w": uneven, "n": 3}, tmp_path)
    state = {"w": uneven, "n": 0}
    mp.load_state_dict(state, tmp_path, offload=True)
    assert isinstance(state["w"], np.ndarray) and state["n"] == 3
    assert_array_equal(state["w"], value)


def test_nothing_padded_and_no_replica_is_written(tmp_path):
    rng = np.random.default_rng(0)
    value = rng.integers(0, 2**31, (257, 64)).astype(np.int32)  # random: does not compress
    for i, placements in enumerate([[R, R], [S0, S0], [R, S0]]):
        mp.save_state_dict(
            {"w": mp.shard_tensor(value, mesh_of(2, 4), placements)}, tmp_path, None, 0, i
        )
        size = sum(
            f.stat().st_size for f in (tmp_path / str(i) / "arrays").rglob("*") if f.is_file()
        )
        assert value.nbytes * 0.9 < size < value.nbytes * 1.2


# --- several checkpoints ------------------------------------------------------------------------


def test_numbers_of_checkpoints(tmp_path):
    path = tmp_path / "made" / "on the way"
    mp.save_state_dict({"n": 0}, path)
    for number in (5, 40, 7):
        mp.save_state_dict({"n": number}, path, unique_id=number)
    mp.save_state_dict({"n": 41}, path)  # replaces the largest
    assert sorted(folder.name for folder in path.iterdir()) == ["0", "40", "5", "7"]
    assert mp.checkpoint_contents(path) == {"n": 41}
    assert mp.checkpoint_contents(path, unique_id=7) == {"n": 7}
    state = {"n": -1}
    mp.load_state_dict(state, path, unique_id=0)
    assert state == {"n": 0}


def test_an_unfinished_checkpoint_is_not_seen(tmp_path):
    mp.save_state_dict({"n": 1}, tmp_path, unique_id=1)
    (tmp_path / "2.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "2.new").mkdir()
    assert mp.checkpoint_contents(tmp_path) == {"n": 1}


def test_contents_need_no_mesh_and_read_no_array(tmp_path):
    uneven = mp.shard_tensor(np.ones((11, 6), ml_dtypes.bfloat16), mesh_of(8), [S0])
    mp.save_state_dict({"w": uneven, "k": jax.random.key(0), "n": 3}, tmp_path)
    for file in (tmp_path / "0" / "arrays").rglob("d/*"):
        file.unlink()
    found = mp.checkpoint_contents(tmp_path)
    assert found["w"] == jax.ShapeDtypeStruct((11, 6), jnp.bfloat16)
    assert found["k"].dtype == jax.random.key(0).dtype and found["n"] == 3


# --- mistakes -----------------------------------------------------------------------------------


def test_names_that_are_missing_warn_and_others_are_not_read(tmp_path):
    mp.save_state_dict({"a": np.ones(3, np.float32), "b": 2}, tmp_path)
    state = {"a": np.zeros(3, np.float32), "c": 7}
    with pytest.warns(UserWarning, match="lacks 'c', which stay as they are"):
        mp.load_state_dict(state, tmp_path)
    assert list(state) == ["a", "c"] and state["c"] == 7
    assert_array_equal(state["a"], np.ones(3))


@pytest.mark.parametrize(
    "target, message",
    [
        (np.zeros(4, np.float32), r"'w' is .*shape=\(4,\).* here and .*shape=\(3,\).* as saved"),
        (np.zeros(3, np.int32), "'w' is .*int32.* here and .*float32.* as saved"),
        (5, "'w' is a int here and an array"),
    ],
    ids=["shape", "dtype", "kind"],
)
def test_leaves_that_do_not_fit_are_named(tmp_path, target, message):
    mp.save_state_dict({"w": np.zeros(3, np.float32)}, tmp_path)
    with pytest.raises(ValueError, match=message):
        mp.load_state_dict({"w": target}, tmp_path)


@pytest.mark.parametrize(
    "call, options",
    [
        (call, {name: value})
        for call, names in [
            (mp.save_state_dict, {"async_save": True, "save_replicas": True}),
            (mp.load_state_dict, {"aoa_config": {}, "worker_groups": []}),
        ]
        for name, value in {
            **names, "process_group": 1, "coordinator_rank": 1, "safetensors": True
        }.items()
    ],
)  # fmt: skip
def test_options_that_do_not_act_are_named(tmp_path, call, options):
    (name,) = options
    with pytest.raises(NotImplementedError, match=rf"{call.__name__}\({name}="):
        call({}, tmp_path, **options)


def test_other_mistakes_are_named(tmp_path):
    with pytest.raises(TypeError, match="a list is no dict"):
        mp.save_state_dict([1], tmp_path)
    with pytest.raises(TypeError, match="a object is neither an array nor"):
        mp.save_state_dict({"x": object()}, tmp_path)
    with pytest.raises(ValueError, match=r"two leaves are named 'a\.b'"):
        mp.save_state_dict({"a": {"b": 1}, "a.b": 2}, tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint; there is none"):
        mp.load_state_dict({}, tmp_path)
    mp.save_state_dict({"n": 1}, tmp_path, unique_id=3)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 4; its numbers are \[3\]"):
        mp.checkpoint_contents(tmp_path, unique_id=4)
    with pytest.raises(ValueError, match="comm_method='mail'"):
        mp.load_state_dict({}, tmp_path, comm_method="mail")


# --- training goes on ---------------------------------------------------------------------------

VOCAB = 19  # divides by no mesh axis: the embedding is uneven


def training(mesh, placements):
    """Adam with bias correction, warm-up, dropout, ZeRO stage 1; the embedding in `placements`."""

    class Net(nnx.Module):
        def __init__(self, *, rngs):
            self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.head = nnx.Linear(8, VOCAB, rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.drop(self.embed(tokens)))

    def place(name, module, mesh):
        if name == "embed":
            module.embedding = mp.shard_tensor(module.embedding, mesh, placements)

    net = mp.shard_layer(Net(rngs=nnx.Rngs(params=0, dropout=1)), mesh, place)
    tx = optax.adamw(optax.linear_schedule(0.0, 1e-2, 8))
    strategy = mp.Strategy({"sharding": {"enable": True}})
    dm = mp.to_static(net, strategy, loss=cross_entropy, optimizer=tx)
    dm.train()
    return dm


def batch(step):
    rows = np.random.default_rng(step).integers(0, VOCAB, (8, 5), np.int32)
    return rows[:, :-1], rows[:, 1:]


def steps(dm, first, last):
    return [float(dm(*batch(step))) for step in range(first, last)]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run of 10 steps on dp4 x tp2 with its checkpoint after 5 steps."""
    path = tmp_path_factory.mktemp("run")
    dm = training(mesh_of(4, 2), [R, S0])
    losses = steps(dm, 0, 5)
    state = dm.state_dict()
    mp.save_state_dict({**state, "step": 5}, path)
    values = {name: host(value) for name, value in state.items()}
    return path, values, losses + steps(dm, 5, 10), dm.compile_counts


def host(value):
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


@pytest.mark.parametrize(
    "shape, placements",
    [((4, 2), [R, S0]), ((4, 1), [R, S1]), ((1,), [R]), ((2, 2, 2), [R, S0, S1])],
    ids=str,
)
def test_training_goes_on_where_it_was(saved_run, shape, placements):
    path, values, losses, counts = saved_run
    dm = training(mesh_of(*shape), placements)
    steps(dm, 90, 91)  # a state of its own, and a compiled step
    state = {**dm.state_dict(), "step": 0}
    mp.load_state_dict(state, path)
    first = state.pop("step")
    dm.set_state_dict(state)
    for name, value in dm.state_dict().items():
        assert_array_equal(host(value), values[name], err_msg=name)
    np.testing.assert_allclose(steps(dm, first, 10), losses[first:], rtol=1e-5)
    assert first == 5 and dm.compile_counts["train"] == counts["train"] == 1


def test_the_same_mesh_goes_on_bit_for_bit(saved_run):
    path, _, losses, _ = saved_run
    dm = training(mesh_of(4, 2), [R, S0])
    state = dm.state_dict()
    mp.load_state_dict(state, path)
    dm.set_state_dict(state)
    assert steps(dm, 5, 10) == losses[5:]
