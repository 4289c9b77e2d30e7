"""Lists, tasks, streams, and what every call refuses."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from tests.collectives.regions import MESHES, on_ranks, region
from tests.collectives.table import ELSEWHERE, OPERATIONS

RANKS = [np.full(2, r, np.float32) for r in range(4)]
MESH = MESHES[4]
X = np.ones(2, np.float32)


def test_lists_are_filled_and_returned():
    def fn(x):
        filled, replaced, exchanged, on_one = [], [None] * 4, [], [0, 0, 0, 0]
        same = (
            mp.all_gather(filled, x) is filled,
            mp.all_gather(replaced, x) is replaced,
            mp.alltoall(exchanged, [x] * 4) is exchanged,
            mp.gather(x, on_one, dst=0) is on_one,
        )
        assert same == (True,) * 4
        return jnp.stack([jnp.stack(xs) for xs in (filled, replaced, exchanged, on_one)])

    got = on_ranks(MESH, fn, RANKS)
    for rank in range(4):
        for i in range(3):
            np.testing.assert_array_equal(got[rank][i], RANKS)
        np.testing.assert_array_equal(got[rank][3], RANKS if rank == 0 else np.zeros((4, 2)))


def test_an_array_in_place_of_a_list_is_joined_or_cut():
    def fn(x):
        return {
            "gathered": mp.all_gather(jnp.zeros(8), x),
            "scattered": mp.scatter(None, jnp.arange(8.0) + x[0], src=2),
            "summed": mp.reduce_scatter(jnp.arange(8.0) + x[0]),
            "exchanged": mp.alltoall(jnp.arange(4.0) + 10 * x[0]),
            "single": mp.alltoall_single(jnp.arange(4.0) + 10 * x[0]),
        }

    for rank, got in enumerate(on_ranks(MESH, fn, RANKS)):
        np.testing.assert_array_equal(got["gathered"], np.concatenate(RANKS))
        np.testing.assert_array_equal(got["scattered"], np.arange(8.0)[2 * rank :][:2] + 2)
        np.testing.assert_array_equal(got["summed"], 4 * np.arange(8.0)[2 * rank :][:2] + 6)
        np.testing.assert_array_equal(got["exchanged"], rank + 10 * np.arange(4.0))
        np.testing.assert_array_equal(got["single"], rank + 10 * np.arange(4.0))


def test_trees_travel_whole():
    def fn(x):
        tree = {"a": x, "b": (x[0], jnp.int32(7))}
        rows = mp.all_gather(tree)
        return (
            mp.all_reduce(tree),
            rows[3],
            mp.scatter(None, [tree] * 4),
            mp.alltoall([tree] * 4)[1],
        )

    total, row, scattered, exchanged = on_ranks(MESH, fn, RANKS)[2]
    np.testing.assert_array_equal(total["a"], [6, 6])
    assert (total["b"][0], total["b"][1]) == (6, 28)
    np.testing.assert_array_equal(row["a"], RANKS[3])
    np.testing.assert_array_equal(scattered["a"], RANKS[0])
    assert exchanged["b"] == (1, 7)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, **how: mp.stream.all_reduce(x, **how),
        lambda x, **how: mp.stream.reduce(x, 0, **how),
        lambda x, **how: mp.stream.broadcast(x, 0, **how),
        lambda x, **how: mp.stream.all_gather([], x, **how),
        lambda x, **how: mp.stream.gather(x, [], **how),
        lambda x, **how: mp.stream.scatter(x, [x] * 4, **how),
        lambda x, **how: mp.stream.reduce_scatter(x, [x] * 4, **how),
        lambda x, **how: mp.stream.alltoall([], [x] * 4, **how),
        lambda x, **how: mp.stream.alltoall_single(x, jnp.tile(x, 4), **how),
    ],
)
def test_streams_give_tasks(call):
    def fn(x):
        task = call(x, use_calc_stream=True)
        assert isinstance(task, mp.Task) and task.is_sync() and task.is_completed()
        assert not call(x, sync_op=False).is_sync()
        return task.wait()

    expected = region(MESH, lambda x: call(x).result)
    jax.tree.map(
        np.testing.assert_array_equal, region(MESH, fn)(np.stack(RANKS)), expected(np.stack(RANKS))
    )
    with pytest.raises(mp.CollectiveError, match="takes sync_op=True"):
        call(X, sync_op=False, use_calc_stream=True)


def test_streams_have_the_operations_and_their_arguments():
    for name in mp.stream.__all__:
        plain = inspect.signature(getattr(mp, name)).parameters
        stream = inspect.signature(getattr(mp.stream, name)).parameters
        assert list(stream)[-2:] == ["sync_op", "use_calc_stream"]
        assert len(stream) == len([p for p in plain if p != "timeout"]) + 1


def test_sync_op_gives_a_task():
    def fn(x):
        task = mp.all_reduce(x, sync_op=False)
        assert isinstance(task, mp.Task) and not task.is_sync()
        return task.wait()

    assert on_ranks(MESH, fn, RANKS)[0].tolist() == [6, 6]
    task = mp.Task({"a": jnp.ones(3) + 1})
    assert task.wait()["a"].tolist() == [2, 2, 2] and task.is_completed()
    assert task.synchronize() is None


CALLS = {
    "all_reduce": lambda x: mp.all_reduce(x),
    "reduce": lambda x: mp.reduce(x, 0),
    "broadcast": lambda x: mp.broadcast(x, 0),
    "all_gather": lambda x: mp.all_gather([], x),
    "gather": lambda x: mp.gather(x),
    "scatter": lambda x: mp.scatter(x, [x]),
    "reduce_scatter": lambda x: mp.reduce_scatter(x, [x]),
    "alltoall": lambda x: mp.alltoall([], [x]),
    "alltoall_single": lambda x: mp.alltoall_single(x),
    "send": lambda x: mp.send(x, 0),
    "recv": lambda x: mp.recv(x, 0),
    "isend": lambda x: mp.isend(x, 0),
    "irecv": lambda x: mp.irecv(x, 0),
    "batch_isend_irecv": lambda x: mp.batch_isend_irecv([mp.P2POp(mp.isend, x, 0)]),
    "barrier": lambda x: mp.barrier(),
    "all_gather_object": lambda x: mp.all_gather_object([], 1),
    "broadcast_object_list": lambda x: mp.broadcast_object_list([1], 0),
    "scatter_object_list": lambda x: mp.scatter_object_list([], [1]),
    "send_object_list": lambda x: mp.send_object_list([1], 0),
    "recv_object_list": lambda x: mp.recv_object_list([1], 0),
}


def test_the_table_and_the_calls_are_all_there_is():
    rows = {operation.name.split()[0] for operation in OPERATIONS}
    assert rows | set(ELSEWHERE) == set(CALLS) | {"wait"}


@pytest.mark.parametrize("name", CALLS)
def test_without_ranks_a_call_names_both_ways_to_have_them(name):
    with pytest.raises(mp.CollectiveError) as error:
        CALLS[name](X)
    text = str(error.value)
    assert "there are no ranks here" in text and name.removeprefix("i") in text
    assert "mp.spmd(fn, mesh" in text and "mp.init_parallel_env()" in text


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if "object" in name])
def test_objects_do_not_travel_inside_a_region(name):
    with pytest.raises(mp.CollectiveError, match="Python objects do not travel inside a region"):
        on_ranks(MESH, CALLS[name], RANKS)


def test_nothing_is_waited_for_inside_a_region():
    with pytest.raises(mp.CollectiveError, match=r"barrier\(\): there is nothing to wait for"):
        on_ranks(MESH, CALLS["barrier"], RANKS)
    with pytest.raises(mp.CollectiveError, match=r"wait\(tensor\): there is nothing to wait for"):
        on_ranks(MESH, mp.wait, RANKS)
    assert mp.wait({"a": jnp.ones(2)})["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: mp.all_reduce(x, "sum"), "op='sum' is no reduction"),
        (lambda x: mp.all_reduce(x, 5), "op=5 is no reduction"),
        (lambda x: mp.all_reduce(x, True), "op=True is no reduction"),
        (lambda x: mp.all_reduce(x, timeout=3), "timeout=3 inside a region"),
        (lambda x: mp.all_reduce("abc"), "'abc' is no array"),
        (lambda x: mp.broadcast(x, 4), "src is 4, which is not a rank of the group"),
        (lambda x: mp.broadcast(x, 1, mp.new_group([0, 2])), "its ranks are 0, 2"),
        (lambda x: mp.reduce(x, -1), "dst is -1, which"),
        (lambda x: mp.gather(x, dst=1.5), "dst is 1.5, which"),
        (lambda x: mp.scatter(x, [x] * 4, src=9), "src is 9, which"),
        (lambda x: mp.broadcast(x, mp.get_rank()), "src is a traced value"),
        (lambda x: mp.all_gather([x] * 3, x), "tensor_list has 3 item(s) for 4 rank(s)"),
        (lambda x: mp.all_gather((), x), "tensor_list is a tuple; it is a list to fill"),
        (lambda x: mp.gather(x, [x]), "gather_list has 1 item(s) for 4 rank(s)"),
        (lambda x: mp.alltoall([x], [x] * 4), "out_tensor_list has 1 item(s) for 4"),
        (lambda x: mp.alltoall([x] * 5), "in_tensor_list has 5 item(s) for 4 rank(s)"),
        (lambda x: mp.alltoall({"a": x}), "in_tensor_list is a dict"),
        (lambda x: mp.reduce_scatter([x, x]), "tensor_list has 2 item(s) for 4 rank(s)"),
        (lambda x: mp.scatter(None, []), "tensor_list has 0 item(s) for 4 rank(s)"),
        (lambda x: mp.scatter(x), "scatter(tensor_list): there is no list"),
        (lambda x: mp.scatter(None), "there is no list"),
        (lambda x: mp.scatter(None, [x, x, x[:1], x]), "tensor_list[2] is float32[1], and"),
        (lambda x: mp.scatter(x[:1], [x] * 4), "tensor_list[0] is float32[2], and tensor is"),
        (lambda x: mp.alltoall([x, x, x, x.astype(int)]), "in_tensor_list[3] is int32[2]"),
        (lambda x: mp.alltoall([x, x, x, [x]]), "in_tensor_list[3] is another tree"),
        (lambda x: mp.alltoall_single(x), "2 rows / 4 ranks leaves 2"),
        (lambda x: mp.reduce_scatter(x), "2 rows / 4 ranks leaves 2"),
        (lambda x: mp.alltoall(x[0]), "a scalar cannot be cut between 4"),
        (lambda x: mp.alltoall_single(x, in_split_sizes=[1, 1, 0, 0]), "is no table of 4 x 4"),
        (lambda x: mp.alltoall_single(x, in_split_sizes=[[1]] * 4), "is no table of 4 x 4"),
        (lambda x: mp.alltoall_single(x, in_split_sizes=[[2.0] * 4] * 4), "is no table of 4 x 4"),
        (lambda x: mp.alltoall_single(x, in_split_sizes=[[1, 2], [3]]), "is no table of 4 x 4"),
        (lambda x: mp.alltoall_single(x, in_split_sizes=[[-1] * 4] * 4), "negative number of rows"),
        (lambda x: mp.alltoall_single(x, in_split_sizes=[[1] * 4] * 4), "add up to [4, 4, 4, 4]"),
        (lambda x: mp.alltoall_single(x, out_split_sizes=[1] * 4), "the table of in_split_sizes"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(mp.CollectiveError) as error:
        on_ranks(MESH, call, RANKS)
    assert message in str(error.value), str(error.value)


def test_an_error_shows_the_call_its_arguments_and_its_group():
    with pytest.raises(mp.CollectiveError) as error:
        on_ranks(MESH, lambda x: mp.broadcast({"w": x}, 4, MESH.group()), RANKS)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("broadcast(tensor): src is 4, which is not a rank of the group.")
    assert [line.split()[0] for line in lines[1:]] == ["tensor", "src", "group", "because"]
    assert "float32[2]" in lines[1] and "4 ranks along 'x' of ProcessMesh(x=4)" in lines[3]


def test_a_value_of_the_whole_mesh_is_not_one_of_a_rank():
    pending = mp.shard_tensor(X, MESH, [mp.Partial()])
    with pytest.raises(mp.CollectiveError, match="is a value of the whole mesh"):
        on_ranks(MESH, lambda x: mp.all_reduce(pending), RANKS)
