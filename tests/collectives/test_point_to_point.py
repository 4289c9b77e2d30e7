"""Sends and receives inside a region: pairs that become one `ppermute`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from tests.collectives.regions import MESH_2X4, MESHES, on_ranks, region

RANKS = [np.full(2, r, np.float32) for r in range(4)]


def exchange(*operations):
    return [task.wait() for task in mp.batch_isend_irecv(operations)]


def test_a_rank_takes_part_or_not():
    """A pipeline: each stage hands on to the next, the first gets nothing."""

    def fn(x):
        ops = [
            mp.P2POp(mp.isend, x, lambda rank: rank + 1 if rank < 3 else None),
            mp.P2POp(mp.irecv, x - 10, {1: 0, 2: 1, 3: 2}),
        ]
        sent, got = exchange(*ops)
        return {"sent": sent, "got": got}

    got = on_ranks(MESHES[4], fn, RANKS)
    assert [float(x["got"][0]) for x in got] == [-10, 0, 1, 2]
    assert [float(x["sent"][0]) for x in got] == [0, 1, 2, 3]


def test_both_directions_at_once_in_any_order():
    def fn(x):
        right = [(r + 1) % 4 for r in range(4)]
        left = [(r - 1) % 4 for r in range(4)]
        return exchange(
            mp.P2POp(mp.irecv, x, right),
            mp.P2POp(mp.isend, x, right),
            mp.P2POp(mp.irecv, x, left),
            mp.P2POp(mp.isend, 100 + x, left),
        )

    from_right, _, from_left, _ = zip(*on_ranks(MESHES[4], fn, RANKS), strict=True)
    assert [float(x[0]) for x in from_right] == [101, 102, 103, 100]
    assert [float(x[0]) for x in from_left] == [3, 0, 1, 2]


def test_a_group_of_an_axis_acts_in_every_line():
    group = MESH_2X4.group("tp")

    def fn(x):
        ops = [mp.P2POp(mp.isend, x, lambda r: (r + 1) % 4, group)]
        return exchange(*ops, mp.P2POp(mp.irecv, x, lambda r: (r - 1) % 4, group))[1]

    got = on_ranks(MESH_2X4, fn, [np.float32(r) for r in range(8)])
    assert [int(x) for x in got] == [3, 0, 1, 2, 7, 4, 5, 6]


def test_ranks_outside_a_group_keep_their_own():
    group = mp.new_group([1, 3])
    swap = {1: 3, 3: 1}
    got = on_ranks(
        MESHES[4],
        lambda x: exchange(mp.P2POp(mp.isend, x, swap, group), mp.P2POp(mp.irecv, -x, swap, group))[
            1
        ],
        RANKS,
    )
    assert [float(x[0]) for x in got] == [0, 3, -2, 1]


def test_trees_travel_and_gradients_come_back():
    def fn(x):
        ops = [mp.P2POp(mp.isend, {"a": x, "b": [2 * x]}, lambda r: (r + 1) % 4)]
        got = exchange(*ops, mp.P2POp(mp.irecv, {"a": x, "b": [x]}, lambda r: (r - 1) % 4))[1]
        return got["a"] * got["b"][0]

    run = region(MESHES[4], fn)
    x, weights = np.arange(1.0, 5.0, dtype=np.float32), np.asarray([1, 10, 100, 1000], np.float32)
    np.testing.assert_array_equal(run(x), 2 * np.roll(x, 1) ** 2)
    gradient = jax.grad(lambda x: (weights * run(x)).sum())(x)
    np.testing.assert_array_equal(gradient, 4 * x * np.roll(weights, -1))


def test_a_pair_is_one_permutation():
    run = region(MESHES[4], lambda x: exchange(mp.P2POp(mp.isend, x, [1, 0, None, None]), mp.P2POp(mp.irecv, x, [1, 0, None, None]))[1])  # fmt: skip
    text = run.lower(np.ones((4, 2), np.float32)).as_text()
    assert len(re.findall("stablehlo.collective_permute", text)) == 1
    assert "source_target_pairs = dense<[[0, 1], [1, 0]]>" in text


RIGHT = [1, 2, 3, 0]
LEFT = [3, 0, 1, 2]


def send(peer, x=None):
    return lambda y: mp.P2POp(mp.isend, y if x is None else x, peer)


def receive(peer, x=None):
    return lambda y: mp.P2POp(mp.irecv, y if x is None else x, peer)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([], "one or more mp.P2POp"),
        ([send(RIGHT)], "operation 0, isend, has no irecv at its other end"),
        ([send(RIGHT), receive(RIGHT)], "operation 1, irecv, has no isend at its other end"),
        ([receive(LEFT), send(RIGHT), send(RIGHT)], "operation 2, isend, has no irecv"),
        ([send(1), receive(0)], "peer=1 does not say who the peer of rank 0 is"),
        ([send([1, 2]), receive(LEFT)], "does not say who the peer of rank 2 is"),
        ([send(lambda r: r + 1), receive(LEFT)], "the peer of rank 3 is 4, which is not a rank"),
        ([send([1, 1, None, None])], "rank 1 receives more than once"),
        ([receive([1, 1, None, None])], "rank 1 sends more than once"),
        ([send(lambda r: mp.get_rank())], "the peer of rank 0 is a traced value"),
        ([send(RIGHT), receive(LEFT, jnp.ones(3))], r"float32\[2\] is sent where float32\[3\]"),
        ([send(RIGHT), receive(LEFT, jnp.ones(2, int))], r"is sent where int32\[2\] is received"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_operations_that_do_not_belong_together(operations, message):
    with pytest.raises(mp.CollectiveError, match=message) as error:
        on_ranks(MESHES[4], lambda x: exchange(*(op(x) for op in operations)), RANKS)
    assert "batch_isend_irecv(p2p_op_list)" in str(error.value)


def test_other_operations_are_refused():
    with pytest.raises(mp.CollectiveError, match=r"op is mp.isend or mp.irecv"):
        mp.P2POp(mp.send, jnp.ones(2), 1)


@pytest.mark.parametrize(
    ("alone", "name"),
    [
        (lambda x: mp.send(x, 1), "send(tensor): a send alone"),
        (lambda x: mp.recv(x, 1), "recv(tensor): a receive alone"),
        (lambda x: mp.isend(x, 1), "send(tensor): a send alone"),
        (lambda x: mp.irecv(x, 1), "recv(tensor): a receive alone"),
    ],
)
def test_alone_they_name_the_batch(alone, name):
    with pytest.raises(mp.CollectiveError) as error:
        on_ranks(MESHES[4], alone, RANKS)
    assert name in str(error.value) and "mp.batch_isend_irecv([mp.P2POp(" in str(error.value)
