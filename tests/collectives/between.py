"""What each rank of a job checks, so that one job runs all of it: `run(everything)`."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

import meshpar as mp
from tests.collectives.table import DTYPES, OPERATIONS, PROCESSES, WIDE


def run(checks, give):
    """Runs checks, in the same order on all ranks, and gives what failed and how many there were."""
    failed = {}
    for name, check in checks:
        try:
            check()
        except Exception:
            failed[name] = traceback.format_exc(limit=-4)
    give(failed=failed, count=len(checks))


def same(got, wanted):
    """Whether trees of arrays are equal bit for bit, dtypes too."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted), (got, wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, (x, y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def table(group, dtypes, shapes_of):
    """The rows of the table that exist between processes, on the members of a group."""
    rank, n = mp.get_rank(group), group.nranks
    for operation in OPERATIONS:
        if PROCESSES not in operation.places:
            continue
        for dtype in filter(operation.takes_dtype, dtypes):
            for shape in shapes_of(operation, dtype):
                yield (
                    f"{operation.name} {dtype} {shape} {n}",
                    _row(operation, dtype, shape, rank, group),
                )


def _row(operation, dtype, shape, rank, group):
    def check():
        given = [operation.give(i, group.nranks, shape, dtype) for i in range(group.nranks)]
        if operation.name == "gather":
            wanted = list(given) if rank == 1 % group.nranks else []
        else:
            wanted = operation.get(given)[rank]
        same(operation.call(given[rank], group), wanted)

    return check


def every_dtype(group):
    """All dtypes in one shape, and all shapes in two; of what only moves, dtypes of each width."""

    def shapes_of(operation, dtype):
        if dtype in ("float32", "int8"):
            return operation.shapes
        moves = operation.differentiable and " " not in operation.name
        left_out = moves and dtype not in ("bool", "bfloat16", "float8_e5m2", "complex64", *WIDE)
        return [] if left_out else operation.shapes[:1]

    return [*table(group, [*DTYPES, *WIDE], shapes_of)]


def few_dtypes(group):
    """Two dtypes, arrays with dims and scalars."""
    return [*table(group, ["float32", "bool"], lambda operation, _: operation.shapes[:2])]


# --- what the table has no row for ------------------------------------------------------------------


def bits():
    """Moved floats keep every bit: the sign of zeros, and what a NaN carries."""
    words = np.array([0x80000000, 0x7FC12345, 0xFF800001, 0x00000001], np.uint32)
    for x in (words.view(np.float32), (words >> 16).astype(np.uint16).view(jnp.bfloat16)):
        for got in (
            mp.broadcast(x, 0),
            *mp.all_gather([], x),
            mp.alltoall([x] * mp.get_world_size())[0],
        ):
            assert np.asarray(got).tobytes() == x.tobytes()


def nan():
    """NaN survives maxima and minima, as in numpy."""
    x = np.array([np.nan if mp.get_rank() == 1 else 1.0, -np.inf, 2.0], np.float32)
    for op in (mp.ReduceOp.MAX, mp.ReduceOp.MIN):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            got = np.asarray(mp.all_reduce(x.astype(dtype), op)).astype(np.float32)
            np.testing.assert_array_equal(got, [np.nan, -np.inf, 2.0])
            got = mp.reduce_scatter([x.astype(dtype)] * mp.get_world_size(), op=op)
            np.testing.assert_array_equal(
                np.asarray(got).astype(np.float32), [np.nan, -np.inf, 2.0]
            )


def wrapping():
    n = mp.get_world_size()
    with np.errstate(over="ignore"):
        assert int(mp.all_reduce(np.array(100, np.int8))) == int(
            np.array([100] * n, np.int8).sum(dtype=np.int8)
        )


def inputs():
    """Lists, numbers, arrays that are not contiguous or lie on several devices, and trees."""
    rank, n = mp.get_rank(), mp.get_world_size()
    total = sum(range(n))
    assert mp.all_reduce(float(rank)) == total
    grid = np.arange(12.0, dtype=np.float32).reshape(3, 4) + rank
    strided = grid.T[::2]
    np.testing.assert_array_equal(
        mp.all_reduce(strided), n * np.arange(12).reshape(3, 4).T[::2] + total
    )
    mesh = jax.make_mesh((jax.local_device_count(),), ("x",), devices=jax.local_devices())
    placed = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
    np.testing.assert_array_equal(mp.all_reduce(placed), np.arange(8.0) * n)
    tree = {"a": np.float32(rank), "b": [np.arange(3) + rank, np.ones((2, 2), np.int32)]}
    got = mp.all_reduce(tree)
    assert got["a"] == total and np.asarray(got["b"][1]).tolist() == [[n, n]] * 2
    gathered = mp.all_gather([], tree)
    assert [float(x["a"]) for x in gathered] == list(range(n))
    free = mp.all_reduce(jnp.ones(2))
    assert not free.committed  # it may meet arrays of other devices, as what was given
    assert mp.all_reduce(jax.device_put(jnp.ones(2), jax.local_devices()[0])).committed


def memory():
    """Arrays whose memory is ordered or placed in another way, or is gone, and those without any."""
    n, home = mp.get_world_size(), jax.local_devices()[0]
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + mp.get_rank()
    want = n * np.arange(6.0).reshape(2, 3) + sum(range(n))
    by_columns = jax.device_put(x, Format(Layout((1, 0)), x.sharding))
    for call in (mp.all_reduce, lambda y: mp.all_reduce(y, sync_op=False).wait()):
        np.testing.assert_array_equal(call(by_columns), want)
        np.testing.assert_array_equal(call(jax.device_put(x, jax.local_devices()[-1])), want)
    sums = mp.reduce_scatter([x + i if i % 2 else by_columns + i for i in range(n)])
    np.testing.assert_array_equal(sums, want + n * mp.get_rank())
    pinned = jax.device_put(x, jax.sharding.SingleDeviceSharding(home, memory_kind="pinned_host"))
    got = mp.all_reduce(pinned)
    np.testing.assert_array_equal(got, want)
    assert got.sharding == x.sharding
    x.delete()
    raises("the array float32[2, 3] is deleted", lambda: mp.all_reduce(x))
    raises("the array float32[2] is traced", lambda: jax.jit(mp.all_reduce)(jnp.ones(2, "float32")))


def whole_arrays():
    """An array of the whole mesh is no array of a process."""
    mesh = mp.ProcessMesh(np.arange(jax.device_count()), ["x"])
    x = mp.shard_tensor(np.arange(8.0 * jax.device_count()), mesh, [mp.Shard(0)])
    raises("lies on devices of several processes", lambda: mp.all_reduce(x))


def raises(text, call):
    try:
        call()
    except mp.CollectiveError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing raised {text!r}")


def messages():
    rank, n = mp.get_rank(), mp.get_world_size()
    x = np.arange(3.0, dtype=np.float32) + rank
    right, left = (rank + 1) % n, (rank - 1) % n
    if rank % 2 == 0:
        mp.send(x, right)
        got = mp.recv(x, left)
    else:
        got = mp.recv(x, left)
        mp.send(x, right)
    np.testing.assert_array_equal(got, np.arange(3.0) + left)
    # Both directions at once, started in the same order on both sides.
    sent, received = mp.isend({"x": x}, right), mp.irecv({"x": x}, left)
    np.testing.assert_array_equal(received.wait()["x"], np.arange(3.0) + left)
    assert sent.wait() is None and sent.is_completed()
    ring = [
        mp.P2POp(mp.isend, x, right),
        mp.P2POp(mp.isend, x + 1, right),
        mp.P2POp(mp.irecv, x, left),
        mp.P2POp(mp.irecv, x, left),
    ]
    tasks = mp.batch_isend_irecv(ring)
    assert [float(task.wait()[0]) for task in tasks] == [rank, rank + 1, left, left + 1]
    raises("sends to itself", lambda: mp.send(x, rank))
    raises("not a rank of the group", lambda: mp.send(x, n))


def tasks():
    """Two calls on their way at once, and a message behind them, whose receiver comes first."""
    rank, n = mp.get_rank(), mp.get_world_size()
    first, filled = mp.all_reduce(np.float32(rank), sync_op=False), []
    second = mp.stream.all_gather(filled, np.float32(rank), sync_op=False)
    if rank == 0:
        mp.send(np.float32(7), 1)
    if rank == 1:
        assert float(mp.recv(np.float32(0), 0)) == 7
    assert float(first.wait()) == sum(range(n)) and first.is_completed() and not first.is_sync()
    assert [float(x) for x in second.wait()] == [float(x) for x in filled] == list(range(n))
    if rank:
        first = mp.all_reduce(np.float32(rank), sync_op=False)
        mp.send(np.float32(rank), 0)
    else:  # rank 0 is last to come to the reduction
        assert [float(mp.recv(np.float32(0), r)) for r in range(1, n)] == list(range(1, n))
        first = mp.all_reduce(np.float32(rank), sync_op=False)
    assert float(first.wait()) == sum(range(n))


def objects():
    rank, n = mp.get_rank(), mp.get_world_size()
    large = "x" * 300_000
    for mine in ({"rank": rank}, [large, rank] if rank else None):
        found = []
        mp.all_gather_object(found, mine)
        assert found == [{"rank": r} for r in range(n)] or found == [
            None,
            *([large, r] for r in range(1, n)),
        ]
    for text in ("small", large):
        assert mp.broadcast_object_list([text, rank] if rank == 1 else [None, None], 1) == [text, 1]
        out = []
        mp.scatter_object_list(out, [(text, r) for r in range(n)] if rank == 0 else None, 0)
        assert out == [(text, rank)]
        if rank == 0:
            mp.send_object_list([text, 3], 1)
        if rank == 1:
            assert mp.recv_object_list([None, None], 0) == [text, 3]


def rows():
    """Uneven parts; tables that change need no compilation of their own."""
    rank, n = mp.get_rank(), mp.get_world_size()
    for seed in range(3):
        drawn = np.random.default_rng(seed).integers(0, 4, (n, n))
        if seed == 2:
            drawn[:] = 0
        arrays = [
            np.arange(2.0 * row.sum(), dtype=np.float32).reshape(-1, 2) + 100 * i
            for i, row in enumerate(drawn)
        ]
        parts = [np.split(x, np.cumsum(row)[:-1]) for x, row in zip(arrays, drawn, strict=True)]
        got = mp.alltoall_single(None, arrays[rank], drawn[rank].tolist(), drawn[:, rank].tolist())
        np.testing.assert_array_equal(got, np.concatenate([parts[i][rank] for i in range(n)]))
    raises("cannot be cut equally", lambda: mp.alltoall_single(np.ones(2 * n + 1, np.float32)))


def groups():
    """Overlapping groups, one in another order of its mesh, and ranks outside."""
    rank, n = mp.get_rank(), mp.get_world_size()
    for ranks in ([0, 1], [1, n - 1] if n > 2 else [1], [0]):
        group = mp.new_group(ranks)
        if rank in ranks:
            assert mp.get_rank(group) == ranks.index(rank) and mp.get_world_size(group) == len(
                ranks
            )
            assert float(mp.all_reduce(np.float32(rank), group=group)) == sum(ranks)
            assert [float(x) for x in mp.all_gather([], np.float32(rank), group)] == ranks
            assert float(mp.broadcast(np.float32(rank), ranks[-1], group)) == ranks[-1]
        else:
            assert mp.get_rank(group) == -1 and mp.get_world_size(group) == -1
            raises(
                f"rank {rank} is outside the group",
                lambda group=group: mp.all_reduce(np.float32(1), group=group),
            )
            raises(f"rank {rank} is outside the group", lambda group=group: mp.barrier(group))
    local = jax.local_device_count()
    mesh = mp.ProcessMesh(np.arange(n * local).reshape(n, local)[::-1], ["out", "in"])
    found = mp.all_gather([], np.float32(rank), mesh.group("out"))
    assert [float(x) for x in found] == [*range(n)][::-1]
    if local > 1:
        raises("mp.spmd", lambda: mp.all_reduce(np.float32(rank), group=mesh.group("in")))
    raises("is not there", lambda: mp.all_reduce(np.float32(1), group=mp.new_group([0, n])))
    raises("not a rank of the group", lambda: mp.broadcast(np.float32(1), n))


def wide_numbers():
    """Without jax_enable_x64 an array of 64 bits is taken where its numbers fit into 32."""
    n = mp.get_world_size()
    if jax.config.jax_enable_x64:
        assert int(mp.all_reduce(np.array(2**40))) == n * 2**40
        return
    assert mp.all_reduce(np.array([5], np.int64)).dtype == jnp.int32
    raises("int32 does not hold", lambda: mp.all_reduce(np.array([2**31])))
    raises("uint32 does not hold", lambda: mp.all_reduce(np.array([2**32], np.uint64)))
    raises("float32 does not hold", lambda: mp.all_reduce(np.array([1e300])))
    got = mp.all_reduce(np.array([np.inf, np.nan, 0.1]), mp.ReduceOp.MAX)
    np.testing.assert_array_equal(got, np.array([np.inf, np.nan, 0.1], np.float32))


def waiting():
    mp.barrier()
    mp.barrier(timeout=20)
    x = mp.wait(mp.all_reduce(jnp.ones(2)))
    assert x.tolist() == [mp.get_world_size()] * 2


def where():
    environment = mp.ParallelEnv()
    assert (environment.rank, environment.world_size) == (mp.get_rank(), mp.get_world_size())
    assert mp.is_initialized() and mp.get_backend() == "GLOO"
    assert mp.init_parallel_env() == mp.get_group(0)  # again: the same


CHECKS = [
    bits,
    nan,
    wrapping,
    inputs,
    memory,
    whole_arrays,
    messages,
    tasks,
    objects,
    rows,
    groups,
    wide_numbers,
    waiting,
    where,
]


def by_name():
    return [(check.__name__, check) for check in CHECKS]
