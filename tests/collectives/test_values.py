"""NaN, signed zeros, garbage on ranks that bring nothing, ranks outside a group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from tests.collectives.regions import MESH_2X4, MESHES, on_ranks

FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_survives_every_reduction(dtype):
    rows = [[1, 2, np.nan, -3], [np.nan, -4, 4, 1], [0, 1, 1, -1], [2, 2, 2, 2]]
    given = [np.asarray(row, jnp.dtype(dtype)) for row in rows]
    whole = np.asarray(rows)
    expected = {
        mp.ReduceOp.MAX: whole.max(0),
        mp.ReduceOp.MIN: whole.min(0),
        mp.ReduceOp.SUM: whole.sum(0),
        mp.ReduceOp.PROD: whole.prod(0),
    }
    got = on_ranks(MESHES[4], lambda x: [mp.all_reduce(x, op) for op in expected], given)[3]
    for one, wanted in zip(got, expected.values(), strict=True):
        np.testing.assert_array_equal(one.astype(np.float32), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_broadcast_and_scatter_move_every_bit(dtype):
    # Signed zeros, infinities and subnormal numbers; a sum of floats would change the first.
    bits = np.asarray([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-7], jnp.dtype(dtype))
    garbage = np.full_like(bits, np.nan)

    def moved(x):
        own = mp.broadcast(x, src=2)
        return own, mp.scatter(None, [x, x * 0, x * 0, x * 0], src=2)

    given = [garbage, garbage, bits, np.full_like(bits, np.inf)]
    for rank, (everywhere, scattered) in enumerate(on_ranks(MESHES[4], moved, given)):
        assert everywhere.tobytes() == bits.tobytes()
        if rank == 0:
            assert scattered.tobytes() == bits.tobytes()


RANKS_OUTSIDE = [0, 2, 3, 4, 6]
GROUP = [1, 5, 7]


def test_a_rank_outside_brings_nothing_and_keeps_its_own():
    group = mp.new_group(GROUP)
    given = [np.full(3, np.nan if r in RANKS_OUTSIDE else r, np.float32) for r in range(8)]

    def everything(x):
        return {
            "sum": mp.all_reduce(x, group=group),
            "avg": mp.all_reduce(x, mp.ReduceOp.AVG, group),
            "max": mp.all_reduce(x, mp.ReduceOp.MAX, group),
            "prod": mp.all_reduce(x, mp.ReduceOp.PROD, group),
            "to one": mp.reduce(x, 5, group=group),
            "broadcast": mp.broadcast(x, 7, group),
            "scattered sum": mp.reduce_scatter([x, 2 * x, 3 * x], group=group),
            "gathered": jnp.stack(mp.all_gather(x, group=group)),
            "gathered to one": jnp.stack(mp.gather(x, dst=1, group=group)),
            "exchanged": jnp.stack(mp.alltoall([x, 2 * x, 3 * x], group=group)),
            "rank": mp.get_rank(group),
        }

    got = on_ranks(MESH_2X4, everything, given)
    numbers = np.asarray(GROUP)
    for i, rank in enumerate(GROUP):
        expected = {
            "sum": 13,
            "avg": np.float32(13 / 3),
            "max": 7,
            "prod": 35,
            "to one": 13 if rank == 5 else rank,
            "broadcast": 7,
            "scattered sum": 13 * (i + 1),
            "gathered": numbers[:, None],
            "gathered to one": numbers[:, None] * (rank == 1),
            "exchanged": numbers[:, None] * (i + 1),
            "rank": i,
        }
        for name, value in expected.items():
            np.testing.assert_allclose(got[rank][name] - value, 0, atol=1e-6, err_msg=name)
    for rank in RANKS_OUTSIDE:
        kept = ("sum", "avg", "max", "prod", "to one", "broadcast")
        assert all(np.isnan(got[rank][name]).all() for name in kept)
        zeros = ("scattered sum", "gathered", "gathered to one", "exchanged")
        assert not any(got[rank][name].any() for name in zeros)
        assert got[rank]["rank"] == -1


def test_groups_overlap():
    left, right = mp.new_group([0, 1, 2]), mp.new_group([2, 3])
    given = [np.float32(10**r) for r in range(4)]
    got = on_ranks(
        MESHES[4], lambda x: mp.all_reduce(mp.all_reduce(x, group=left), group=right), given
    )
    assert [float(x) for x in got] == [111, 111, 1111, 1111]


def test_integers_wrap_around_as_on_one_device():
    given = [np.int8(x) for x in (100, 100, 3, -7)]
    got = on_ranks(MESHES[4], lambda x: [mp.all_reduce(x, op) for op in (0, 3)], given)[0]
    with np.errstate(over="ignore"):
        assert got[0] == np.add.reduce(np.stack(given), dtype=np.int8)
        assert got[1] == np.multiply.reduce(np.stack(given), dtype=np.int8)


@pytest.mark.parametrize(
    ("dtype", "op", "reason"),
    [
        ("bool", "SUM", "MAX is `any`, MIN is `all`"),
        ("bool", "PROD", "MAX is `any`, MIN is `all`"),
        ("int32", "AVG", "the mean of integers is not an integer"),
        ("uint8", "AVG", "the mean of integers is not an integer"),
        ("complex64", "MAX", "complex numbers have no order"),
        ("complex64", "MIN", "complex numbers have no order"),
        ("float8_e8m0fnu", "SUM", "neither 0 nor negative"),
        ("float4_e2m1fn", "MIN", "no pattern left that could stand for NaN"),
    ],
)
def test_a_reduction_that_a_dtype_does_not_have(dtype, op, reason):
    x = np.ones(2, jnp.dtype(dtype))
    with pytest.raises(mp.CollectiveError, match=rf"(?s)ReduceOp.{op} does not take {dtype}.*"):
        try:
            mp.spmd(lambda x: mp.all_reduce(x, mp.ReduceOp[op]), MESHES[2], [[mp.Shard(0)]])(x)
        except mp.CollectiveError as error:
            assert reason in str(error) and "instead" in str(error)
            raise


def test_a_dtype_without_collectives_is_an_error_and_not_the_end_of_the_process():
    with pytest.raises(mp.PlacementError, match=r"(?s)broadcast\(tensor\): int2 .*aborts"):
        on_ranks(MESHES[2], lambda x: mp.broadcast(x.astype(jnp.int2), 0), [np.ones(2)] * 2)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_four_bits_travel(dtype):
    given = [np.asarray([r, 1], jnp.dtype(dtype)) for r in range(4)]

    def fn(x):
        got = [mp.broadcast(x, 3), mp.all_gather(x)[2], mp.scatter(None, [x] * 4, 1)]
        return [y.astype(jnp.float32) for y in (*got, mp.all_reduce(x))]

    for got in on_ranks(MESHES[4], fn, given):
        np.testing.assert_array_equal(got, [[3, 1], [2, 1], [1, 1], [6, 4]])


def test_keys_travel_but_are_not_added():
    keys = jax.random.split(jax.random.key(0), 4)

    def moved(key):
        (own,) = key
        got = [mp.broadcast(own, 3), *mp.all_gather(own), mp.scatter(None, [own] * 4, 2)]
        return jnp.stack([jax.random.key_data(x) for x in got])[None]

    shard = [mp.Shard(0)]
    got = mp.spmd(moved, MESHES[4], [shard], shard)(keys)
    words = jax.random.key_data(keys)
    for rank in range(4):
        np.testing.assert_array_equal(got[rank], jnp.stack([words[3], *words, words[2]]))
    with pytest.raises(mp.CollectiveError, match=r"mp\.broadcast or mp\.all_gather moves keys"):
        mp.spmd(mp.all_reduce, MESHES[4], [shard])(keys)
