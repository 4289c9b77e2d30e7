"""`shard_dataloader`: order, placement, uneven batches, what it does to the user's loader."""

import random
import threading
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp

PREFETCH = [0, 1, 3]


@pytest.fixture
def dp4():
    return mp.ProcessMesh(np.arange(4), ["dp"])


class Shuffling:
    """A map-style loader: shuffles by its own random state, and records what it hands out."""

    def __init__(self, size, batch, *, seed=0, drop_last=False):
        self.size, self.batch, self.drop_last = size, batch, drop_last
        self.rng = random.Random(seed)
        self.handed = []

    def __len__(self):
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def __iter__(self):
        order = list(range(self.size))
        self.rng.shuffle(order)
        for i in range(len(self)):
            rows = order[i * self.batch : (i + 1) * self.batch]
            self.handed += rows
            yield np.array(rows, np.int32)


def rows(loader):
    return [np.asarray(batch).tolist() for batch in loader]


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_epochs_give_the_loaders_batches_in_its_order(dp4, prefetch):
    plain, own = Shuffling(12, 4), Shuffling(12, 4)
    loader = mp.shard_dataloader(own, dp4, shard_dims="dp", prefetch=prefetch)
    assert len(loader) == len(plain) == 3
    first, second = rows(plain), rows(plain)
    assert rows(loader) == first != second
    assert rows(loader) == second


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_short_last_batch_is_cut_unevenly(dp4, prefetch):
    loader = mp.shard_dataloader(
        [np.arange(n, dtype=np.float32) for n in (4, 4, 2)], dp4, shard_dims=0, prefetch=prefetch
    )
    *full, last = list(loader)
    assert all(isinstance(batch, jax.Array) for batch in full)
    assert isinstance(last, mp.DistTensor) and last.shape == (2,)
    assert [mp.local_value(last, rank).shape for rank in range(4)] == [(1,), (1,), (0,), (0,)]


def test_leaves_of_any_structure(dp4):
    Pair = namedtuple("Pair", "x y")
    batch = Pair({"a": np.ones((4, 2)), "n": 3}, [np.zeros(8, np.int32)])
    (placed,) = mp.shard_dataloader([batch], dp4, shard_dims="dp")
    assert type(placed) is Pair
    assert mp.placements_of(placed.x["a"]) == [mp.Shard(0)]
    assert mp.placements_of(placed.x["n"]) == [mp.Replicate()]
    assert placed.x["n"] == 3 and mp.placements_of(placed.y[0]) == [mp.Shard(0)]


def test_several_axes_and_none():
    mesh = mp.ProcessMesh(np.arange(8).reshape(2, 2, 2), ["dp", "fsdp", "tp"])
    batch = np.arange(16).reshape(8, 2)
    (both,) = mp.shard_dataloader([batch], mesh, shard_dims=("dp", "fsdp"))
    assert mp.placements_of(both) == [mp.Shard(0), mp.Shard(0), mp.Replicate()]
    (whole,) = mp.shard_dataloader([batch], mesh)
    assert mp.placements_of(whole) == [mp.Replicate()] * 3


def test_a_mesh_and_an_axis_per_input():
    lhs, rhs = mp.ProcessMesh([0, 1], ["x"]), mp.ProcessMesh([2, 3], ["y"])
    x = np.arange(4)
    for batch in ((x, x), {"b": x, "a": x, "unused": x}):
        keys = ["a", "b"] if isinstance(batch, dict) else None
        (placed,) = mp.shard_dataloader([batch], [lhs, rhs], keys, shard_dims=["x", None])
        first, second = placed.values() if keys else placed
        assert len(placed) == 2
        assert mp.mesh_of(first) == lhs and mp.placements_of(first) == [mp.Shard(0)]
        assert mp.mesh_of(second) == rhs and mp.placements_of(second) == [mp.Replicate()]


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_errors_reach_the_consumer_in_their_place(dp4, prefetch):
    def failing():
        yield np.arange(4)
        raise OSError("disk")

    batches = iter(mp.shard_dataloader(failing(), dp4, shard_dims="dp", prefetch=prefetch))
    assert np.asarray(next(batches)).tolist() == [0, 1, 2, 3]
    with pytest.raises(OSError, match="disk"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_nothing_is_read_after_an_error(dp4):
    class Failing:
        reads = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.reads += 1
            raise OSError("disk")

    source = Failing()
    with pytest.raises(OSError, match="disk"):
        list(mp.shard_dataloader(source, dp4, prefetch=3))
    assert source.reads == 1


def test_the_loader_is_read_ahead_in_another_thread(dp4):
    third = threading.Event()

    def source():
        yield np.zeros(4)
        yield np.ones(4)
        third.set()
        yield np.ones(4)

    batches = iter(mp.shard_dataloader(source(), dp4, prefetch=3))
    next(batches)
    assert third.wait(timeout=60)  # read although only one batch was asked for
    batches.close()


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_leaving_early_loses_no_batch_of_a_generator(dp4, prefetch):
    loader = mp.shard_dataloader((np.full(4, i) for i in range(6)), dp4, prefetch=prefetch)
    seen = []
    for batch in loader:
        seen.append(int(batch[0]))
        if len(seen) == 2:
            break
    seen += [int(batch[0]) for batch in loader]
    assert seen == list(range(6))


def test_no_thread_is_left_behind(dp4):
    before = threading.active_count()
    for _ in mp.shard_dataloader([np.zeros(4)] * 5, dp4):
        break
    assert threading.active_count() == before


# --- with to_static -----------------------------------------------------------------------------


def sums(mesh, loader, *, lr=0.0):
    """A model whose loss is the mean of its inputs plus a parameter."""
    return mp.to_static(
        (lambda w, x: x.astype(jnp.float32) + w, mp.shard_tensor(0.0, mesh, [])),
        mp.Strategy({"data_axes": ("dp",)}),
        loss=lambda y, x: y.mean(),
        optimizer=optax.sgd(lr),
        loader=loader,
    )


@pytest.mark.parametrize("one_shot", [False, True], ids=["map", "generator"])
def test_to_static_leaves_the_loader_untouched(dp4, one_shot):
    by_hand, recorded = Shuffling(12, 4, seed=3), Shuffling(12, 4, seed=3)
    expected = rows(by_hand)
    loader = mp.shard_dataloader(
        iter(recorded) if one_shot else recorded, dp4, shard_dims="dp", prefetch=1
    )
    state = recorded.rng.getstate()
    dm = sums(dp4, loader)
    dm.train()
    assert recorded.handed == [] and recorded.rng.getstate() == state
    losses = [float(dm(batch)) for batch in loader]
    assert recorded.handed == by_hand.handed == [row for batch in expected for row in batch]
    assert losses == [np.mean(batch) for batch in expected]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.filterwarnings("ignore::meshpar.RecompileWarning")
def test_the_last_batch_counts_each_sample_once(dp4, drop_last):
    source = Shuffling(10, 4, drop_last=drop_last)
    loader = mp.shard_dataloader(source, dp4, shard_dims="dp")
    dm = sums(dp4, loader)
    for mode in (dm.train, dm.eval):
        mode()
        total = count = 0
        for _ in range(2):
            for batch in loader:
                total += float(dm(batch)) * len(batch)
                count += len(batch)
        assert count == (16 if drop_last else 20)
        assert total == pytest.approx(sum(source.handed[-count:]))
    if not drop_last:
        assert sorted(source.handed[:10]) == sorted(source.handed[10:20]) == list(range(10))


def test_to_static_places_unplaced_batches_as_the_loader_does():
    mesh = mp.ProcessMesh([[0, 1], [2, 3]], ["rows", "columns"])
    loader = mp.shard_dataloader([], mesh, shard_dims="columns")
    with mesh:
        dm = mp.to_static((lambda w, x: x * w, jnp.ones(())), loader=loader)
    dm.predict()
    (placed,) = dm.place_batch(np.ones((4, 3), np.float32))
    assert mp.placements_of(placed) == [mp.Replicate(), mp.Shard(0)]


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"dense_tensor_idx": [[0]]}, NotImplementedError, r"dense_tensor_idx=\[\[0\]\]"),
        ({"is_dataset_splitted": True}, ValueError, "shard_dims must name the axis"),
        ({"shard_dims": "tp"}, mp.MeshError, "'tp' is not an axis of the mesh"),
        ({"shard_dims": 1}, mp.MeshError, "1 is not an axis of the mesh"),
        ({"meshes": []}, mp.MeshError, "no ProcessMesh"),
        ({"meshes": [None]}, mp.MeshError, "no ProcessMesh"),
        ({"prefetch": -1}, ValueError, "prefetch=-1"),
        ({"meshes": 3, "shard_dims": ["dp", None]}, ValueError, "2 shard_dims for 3 meshes"),
        ({"meshes": 2, "input_keys": ["x"]}, ValueError, "2 meshes for the input_keys"),
    ],
)
def test_wrong_options_are_named(dp4, options, error, message):
    meshes = options.pop("meshes", dp4)
    meshes = [dp4] * meshes if isinstance(meshes, int) else meshes
    with pytest.raises(error, match=message):
        mp.shard_dataloader([np.zeros(4)], meshes, **options)


@pytest.mark.parametrize(
    "batch, options, error, message",
    [
        ((1, 2, 3), {"meshes": 2}, ValueError, r"2 meshes for the 3 inputs \[0, 1, 2\]"),
        (np.zeros(4), {"meshes": 2}, ValueError, "has no inputs to tell apart"),
        ({"x": 1}, {"input_keys": ["y"]}, ValueError, r"lacks the keys \['y'\]; it has \['x'\]"),
        ((1,), {"input_keys": ["y"]}, ValueError, "it has none: it is a tuple"),
        ({"x": "text"}, {}, TypeError, "is no tensor"),
    ],
)
def test_batches_that_do_not_fit_are_named(dp4, batch, options, error, message):
    loader = mp.shard_dataloader([batch], [dp4] * options.pop("meshes", 1), **options)
    with pytest.raises(error, match=message):
        list(loader)


def test_len_of_a_loader_without_one(dp4):
    with pytest.raises(TypeError, match="has no len"):
        len(mp.shard_dataloader(iter([]), dp4))
