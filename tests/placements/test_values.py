"""Placing values, asking where they lie, and what a `DistTensor` gives and refuses."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar import Partial, Replicate, Shard

MESH = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["a", "b"])
LINE = mp.ProcessMesh([0, 1, 2, 3], ["x"])
SHAPES = [(), (1,), (0,), (8,), (7,), (9,), (3,), (8, 4), (5, 3), (0, 4), (2, 3, 4), (4, 8, 2)]
PLACEMENTS = [
    [], [Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Shard(-1)],
    [Shard(0, shard_order=1), Shard(0)], [Partial()], [Partial("max"), Shard(0)],
    [Shard(0), Partial("avg")], [Partial(), Partial()],
]  # fmt: skip


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_the_value_comes_back_from_every_placement(placements):
    for shape in SHAPES:
        if not shape and any(p.is_shard() for p in placements):
            continue
        x = (np.arange(np.prod(shape, dtype=int)).reshape(shape) - 3.5).astype(np.float32)
        placed = mp.shard_tensor(x, MESH, placements)
        np.testing.assert_array_equal(np.asarray(placed), x)
        assert placed.shape == shape and placed.dtype == np.float32
        assert mp.mesh_of(placed) == MESH
        listed = [
            Shard(p.dim % len(shape), shard_order=p.shard_order) if p.is_shard() else p
            for p in placements
        ]
        assert mp.placements_of(placed) == [*listed, Replicate(), Replicate()][:2]
        whole = mp.unshard_dtensor(placed)
        assert isinstance(whole, jax.Array) and whole.sharding.is_fully_replicated
        np.testing.assert_array_equal(whole, x)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
     "int4", "uint4", "complex64"],
)  # fmt: skip
def test_every_dtype_is_placed_and_moved(dtype):
    x = np.array([0, 1, 1, 0, 1, 0, 1]).astype(getattr(ml_dtypes, dtype, None) or dtype)
    placed = mp.shard_tensor(x, LINE, [Shard(0)])
    moved = mp.reshard(placed, LINE, [Replicate()])
    assert placed.dtype == moved.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(moved), x)


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_dtypes_that_end_the_process_are_refused(dtype):
    with pytest.raises(mp.PlacementError, match=f"{dtype} cannot be placed"):
        mp.shard_tensor(np.zeros(4, getattr(ml_dtypes, dtype)), LINE, [Shard(0)])


def test_all_kinds_of_data():
    expected = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    for data in (expected, expected.astype(np.float64), jnp.asarray(expected), expected.tolist()):
        placed = mp.shard_tensor(data, LINE, [Shard(0)])
        assert placed.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(placed), expected)
    again = mp.shard_tensor(mp.shard_tensor(expected, LINE, [Partial()]), LINE, [Shard(1)])
    assert mp.placements_of(again) == [Shard(1)]
    assert mp.shard_tensor(7, LINE, []).dtype == np.int32
    assert mp.shard_tensor([1, 2], LINE, [Shard(0)], dtype="bfloat16").dtype == jnp.bfloat16
    for text in ("abc", [None]):
        with pytest.raises(TypeError, match="is no tensor"):
            mp.shard_tensor(text, LINE, [])


def test_flax_variables_come_back_as_variables():
    layer = nnx.Linear(4, 7, rngs=nnx.Rngs(0))
    kernel = mp.shard_tensor(layer.kernel, LINE, [Shard(0)])
    assert isinstance(kernel, nnx.Param) and mp.placements_of(kernel.get_value()) == [Shard(0)]
    assert mp.mesh_of(layer.kernel.get_value()) is None  # a new one; the layer's stays


def test_keys_are_placed_like_other_values():
    for shape in ((), (8,), (9,)):
        keys = jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
        placed = mp.shard_tensor(keys, MESH, [Shard(0)] if shape else [])
        whole = mp.unshard_dtensor(placed)
        np.testing.assert_array_equal(jax.random.key_data(whole), jax.random.key_data(keys))
    with pytest.raises(mp.PlacementError, match="not numbers"):
        mp.shard_tensor(jax.random.key(0), MESH, [Partial()])


def test_arrays_on_explicit_meshes_work():
    explicit = jax.make_mesh((2, 4), ("a", "b"))
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(explicit, jax.P("b")))
    assert mp.placements_of(x) == [Replicate(), Shard(0)] and mp.mesh_of(x) == MESH
    moved = mp.reshard(x, MESH, [Shard(0), Shard(0)])
    np.testing.assert_array_equal(np.asarray(moved), np.arange(8.0))
    assert float(mp.jit(lambda x: (x * 2).sum())(x)) == 56


def test_creation_in_place_holds_blocks_only_and_draws_the_same_numbers():
    key = jax.random.key(3)
    expected = jax.random.normal(key, (17, 8))
    for placements in ([Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Partial()]):
        made = mp.dtensor_from_fn(jax.random.normal, MESH, placements, key, (17, 8))
        np.testing.assert_array_equal(np.asarray(made), expected)
        assert mp.placements_of(made) == [*placements, Replicate()][:2]
    big = mp.dtensor_from_fn(jnp.zeros, MESH, [Shard(0), Shard(0)], (1024, 256))
    assert {s.data.nbytes for s in big.addressable_shards} == {1024 * 256 * 4 // 8}


# --- pieces (C02) ---------------------------------------------------------------------------------


def test_a_global_shape_from_uneven_pieces():
    x = np.arange(20).reshape(10, 2)
    whole = mp.dtensor_from_local(np.split(x, [3, 6, 9]), LINE, [Shard(0)])
    assert whole.shape == (10, 2) and np.asarray(whole).mean() == 9.5
    np.testing.assert_array_equal(np.asarray(whole), x)
    for rank, piece in enumerate(np.split(x, [3, 6, 9])):
        np.testing.assert_array_equal(mp.local_value(whole, rank), piece)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum", [6, 3]),
        ("max", [4, 5]),
        ("min", [-1, -7]),
        ("prod", [-24, -70]),
        ("avg", [1.5, 0.75]),
    ],
)
def test_contributions_reduce_by_their_kind(kind, expected):
    pieces = [np.array(p, np.float32) for p in ([1, 5], [2, -7], [-1, 2], [4, 3])]
    expected = {"prod": [-8, -210]}.get(kind, expected)
    pending = mp.dtensor_from_local(pieces, LINE, [Partial(kind)])
    np.testing.assert_array_equal(np.asarray(pending), np.array(expected, np.float32))
    np.testing.assert_array_equal(mp.local_value(pending, 1), [2, -7])


def test_pieces_that_do_not_fit():
    with pytest.raises(mp.PlacementError, match=r"3 piece\(s\) for 4 rank\(s\)"):
        mp.dtensor_from_local([np.ones(2)] * 3, LINE, [Shard(0)])
    with pytest.raises(mp.PlacementError, match=r"rank 0 gives a piece of shape \(1,\), its block"):
        mp.dtensor_from_local([np.ones(n) for n in (1, 3, 3, 3)], LINE, [Shard(0)])


# --- what a DistTensor gives and refuses ----------------------------------------------------------

UNEVEN = np.arange(21, dtype=np.float32).reshape(7, 3)


@pytest.fixture(scope="module")
def uneven():
    return mp.shard_tensor(UNEVEN, LINE, [Shard(0)])


def test_operators_take_the_global_value(uneven):
    np.testing.assert_array_equal(uneven + 1, UNEVEN + 1)
    np.testing.assert_array_equal(1 - uneven, 1 - UNEVEN)
    np.testing.assert_array_equal(np.ones((2, 7), np.float32) @ uneven, np.ones((2, 7)) @ UNEVEN)
    np.testing.assert_array_equal(uneven * uneven, UNEVEN * UNEVEN)
    np.testing.assert_array_equal(uneven == UNEVEN, np.full((7, 3), True))
    np.testing.assert_array_equal(uneven[2:4, 1], UNEVEN[2:4, 1])
    np.testing.assert_array_equal(jnp.asarray(uneven), UNEVEN)
    assert len(uneven) == 7 and len(list(uneven)) == 7 and uneven.size == 21
    pending = mp.shard_tensor(3, LINE, [Partial()])
    assert int(pending) == 3 and float(pending) == 3.0 and bool(pending) and range(5)[pending] == 3


def test_it_shows_its_placements(uneven):
    assert repr(uneven) == "DistTensor(float32[7,3], [Shard(0)], ProcessMesh(x=4))"
    assert "6:7" in uneven._repr_html_() and uneven._repr_html_().count("<td") == 4
    text = repr(mp.show_placements(uneven))
    assert "[6:7, 0:3]" in text and "1 x 3" in text
    assert "0 + 1 + 2 + 3" in repr(mp.show_placements(mp.shard_tensor(1.0, LINE, [Partial()])))
    with pytest.raises(mp.PlacementError, match="does not lie on a mesh"):
        mp.show_placements(UNEVEN)


def test_it_is_a_leaf(uneven):
    assert jax.tree.leaves({"a": uneven}) == [uneven] or jax.tree.leaves({"a": uneven})[0] is uneven


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: jax.tree.map(jnp.square, {"a": x}),
        lambda x: optax.tree.norm({"a": x}),
        lambda x: jnp.mean(x),
        lambda x: jax.jit(lambda y: y.sum())(x),
        lambda x: jax.lax.mul(x, x),
        lambda x: x.mean(),
        lambda x: jax.grad(lambda y: (y * y).sum())(x),
    ],
    ids=["tree.map", "norm", "mean", "jit", "lax", "method", "grad"],
)
@pytest.mark.parametrize("kind", ["uneven", "pending"])
def test_what_would_compute_on_storage_is_right_or_refused(compute, kind, uneven):
    x = uneven if kind == "uneven" else mp.shard_tensor(UNEVEN, LINE, [Partial()])
    try:
        got = compute(x)
    except (mp.DistTensorError, AttributeError, TypeError, ValueError) as error:
        assert "mp.jit" in str(error) or "DistTensor" in str(error)
    else:
        for lhs, rhs in zip(
            jax.tree.leaves(got), jax.tree.leaves(compute(jnp.asarray(UNEVEN))), strict=True
        ):
            np.testing.assert_allclose(lhs, rhs, rtol=1e-6)


def test_a_module_with_an_uneven_parameter_is_right_or_refused():
    layer = nnx.Linear(7, 3, rngs=nnx.Rngs(0))
    x = np.ones((2, 7), np.float32)
    expected = layer(x)
    layer.kernel = mp.shard_tensor(layer.kernel, LINE, [Shard(0)])
    try:
        got = layer(x)
    except (mp.DistTensorError, TypeError) as error:
        assert "DistTensor" in str(error)
    else:
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-6)


def test_it_is_immutable(uneven):
    with pytest.raises(mp.DistTensorError, match="immutable"):
        uneven[0] = 1


# --- errors (C37) ---------------------------------------------------------------------------------


def test_errors_name_the_call_and_the_numbers():
    x = np.ones((12, 64), np.float32)
    with pytest.raises(mp.PlacementError) as error:
        mp.shard_tensor(x, MESH, [Shard(0), Shard(2)])
    text = str(error.value)
    for part in (
        "shard_tensor(data)",
        "float32[12, 64]",
        "ProcessMesh(a=2, b=4)",
        "mesh axis 'b'",
        "-2 to 1",
    ):
        assert part in text
    with pytest.raises(
        mp.PlacementError, match=r"reshard\(dist_tensor\): it does not lie on a mesh"
    ):
        mp.reshard(x, MESH, [])
    with pytest.raises(mp.PlacementError, match="is not where the mesh is"):
        mp.shard_tensor(x, MESH, [], place="gpu:0")
    assert mp.shard_tensor(x, MESH, [], place="cpu").shape == (12, 64)


# --- another mesh ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 9)], ids=str)
@pytest.mark.parametrize(
    "target",
    [
        MESH["a"],
        mp.ProcessMesh([6, 7], ["z"]),
        mp.ProcessMesh(np.arange(8).reshape(4, 2), ["p", "q"]),
    ],
    ids=str,
)
def test_to_another_mesh(shape, target):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for source in ([Shard(0)], [Shard(1), Shard(0)], [Partial(), Shard(1)], []):
        for wanted in ([Shard(0)], [Shard(1)], [Partial("max")], []):
            moved = mp.reshard(mp.shard_tensor(x, MESH, source), target, wanted)
            assert mp.mesh_of(moved) == target
            assert mp.placements_of(moved) == [*wanted, Replicate(), Replicate()][: target.ndim]
            np.testing.assert_array_equal(np.asarray(moved), x)


# --- traced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 4), (7, 5)], ids=str)
def test_annotations_leave_values_and_gradients_alone(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def f(x):
        x = mp.shard_tensor(x, MESH, [Shard(0)])
        assert mp.placements_of(x) == [Shard(0), Replicate()] and mp.mesh_of(x) == MESH
        y = mp.reshard(x * x, MESH, [Replicate(), Shard(1)])
        z = mp.reshard(mp.shard_tensor(y, MESH, [Shard(0)]), MESH, [Shard(1), Shard(0)])
        return z.sum()

    value, gradient = jax.jit(jax.value_and_grad(f))(x)
    np.testing.assert_allclose(value, (x * x).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * x, rtol=1e-6)
    batched = jax.vmap(lambda row: mp.shard_tensor(row * 2, LINE, [Shard(0)]))(x)
    np.testing.assert_array_equal(batched, x * 2)


def test_a_stopped_gradient():
    gradient = jax.grad(lambda x: mp.shard_tensor(x * x, LINE, [], stop_gradient=True).sum())
    np.testing.assert_array_equal(gradient(jnp.ones(4)), np.zeros(4))
    assert mp.placements_of(jnp.ones(3)) is None and mp.mesh_of(np.ones(3)) is None


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype, value", [("float16", 20000), ("float32", 3e38)])
@pytest.mark.parametrize("wanted", [Replicate(), Shard(0)], ids=str)
def test_a_mean_does_not_overflow_where_the_values_do_not(size, dtype, value, wanted):
    mesh = mp.ProcessMesh(np.arange(size), ["x"])
    x = np.full((7, 2), value, dtype)
    mean = mp.reshard(mp.shard_tensor(x, mesh, [Replicate()]), mesh, [Partial("avg")])
    np.testing.assert_array_equal(np.asarray(mp.reshard(mean, mesh, [wanted])), x)
