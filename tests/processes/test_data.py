"""Data over processes: pieces, parts of batches, programs and checkpoints, in 2 x 2 devices."""

import numpy as np
import pytest

from tests.processes.launching import launch

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, meshpar as mp
from meshpar import Partial, Replicate, Shard
from tests.processes.ranks import give, start

start()
me = jax.process_index()
line = mp.ProcessMesh([0, 1, 2, 3], ["x"])
grid = mp.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
mixed = mp.ProcessMesh([0, 2, 1, 3], ["x"])
x = np.arange(21, dtype=np.float32).reshape(7, 3)
y = np.arange(16, dtype=np.float32).reshape(4, 4)
mine = slice(2 * me, 2 * me + 2)


def whole(value):
    return np.asarray(value if isinstance(value, mp.DistTensor) else mp.jit(lambda v: v, out_placements=[])(value))


def error(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except (ValueError, NotImplementedError) as raised:
        return f"{type(raised).__name__}: {raised}"


# --- one value, given whole by every process ------------------------------------------------------
for name, mesh, placements in [
    ("even", grid, [Shard(0), Shard(1)]), ("uneven", line, [Shard(0)]), ("pending", grid, [Partial(), Shard(0)]),
]:
    for kind in (np.asarray, jnp.asarray):
        value = mp.shard_tensor(kind(x if name != "even" else y), mesh, placements)
        give(**{f"{name}_{kind.__module__}": np.asarray(mp.unshard_dtensor(value)), f"{name}_at": mp.placements_of(value)})
again = mp.shard_tensor(mp.shard_tensor(y, grid, [Shard(0)]), grid, [Replicate(), Shard(1)])
give(again=np.asarray(mp.unshard_dtensor(again)), again_at=mp.placements_of(again))
give(other_process=error(mp.local_value, again, rank=3 - 2 * me))

# --- pieces ---------------------------------------------------------------------------------------
rows = np.split(x, [2, 4, 6])
give(
    by_rank=np.asarray(mp.unshard_dtensor(mp.dtensor_from_local(rows[mine], line, [Shard(0)]))),
    by_process=np.asarray(mp.unshard_dtensor(mp.dtensor_from_local(x[4 * me : 4 * me + 4], line, [Shard(0)]))),
    whole_rows=np.asarray(mp.unshard_dtensor(mp.dtensor_from_local(y[mine], grid, [Shard(0), Shard(1)]))),
    repeated=np.asarray(mp.unshard_dtensor(mp.dtensor_from_local(y, grid, [Replicate(), Shard(1)]))),
    sum=np.asarray(mp.unshard_dtensor(mp.dtensor_from_local([y * r for r in range(4)][mine], line, [Partial()]))),
    one_sum=np.asarray(mp.unshard_dtensor(mp.dtensor_from_local(y * (me + 1), grid, [Partial(), Replicate()]))),
    scalar=float(mp.unshard_dtensor(mp.dtensor_from_local(np.float32(me), grid, [Partial("max")]))),
    errors=[
        error(mp.dtensor_from_local, y, line, [Partial()]),
        error(mp.dtensor_from_local, y[mine], mixed, [Shard(0)]),
        error(mp.dtensor_from_local, x[3 * me : 3 * me + 3], line, [Shard(0)]),
        error(mp.dtensor_from_local, rows[mine] if me else [x], line, [Shard(0)]),
        error(mp.dtensor_from_local, y[mine].astype(np.int32 if me else np.float32), line, [Shard(0)]),
        error(mp.dtensor_from_local, y[mine][0] if me else y[mine], line, [Shard(0)]),
    ],
)

# --- batches --------------------------------------------------------------------------------------
parts = [{"x": y[mine] + i, "n": i} for i in range(3)] + [{"x": x[4 * me : 4 * me + 4], "n": 3}]
loader = mp.shard_dataloader(parts, line, shard_dims="x", is_dataset_splitted=True)
for epoch in range(2):
    batches = [{k: np.asarray(mp.unshard_dtensor(v)) for k, v in batch.items()} for batch in loader]
give(batches=batches)
for batch in loader:
    break  # what was read ahead is of no concern to the other process
unequal = mp.shard_dataloader(parts[: 3 + me], line, shard_dims="x", is_dataset_splitted=True)
misfit = mp.shard_dataloader([{"x": x[: 3 - me]}], line, shard_dims="x", is_dataset_splitted=True)
other = mp.shard_dataloader([{"xy"[me]: x}], line, shard_dims="x", is_dataset_splitted=True)
give(loader_errors=[error(list, unequal), error(list, misfit), error(list, other)])

# --- programs -------------------------------------------------------------------------------------
w = mp.shard_tensor(np.ones((3, 4), np.float32), line, [Shard(1)])
z = mp.shard_tensor(x, line, [Shard(0)])
for partitioner in ("meshpar", "xla"):
    f = mp.jit(lambda a, b: jnp.tanh(a / 20 @ b).sum(0), partitioner=partitioner, out_placements=[])
    give(**{partitioner: np.asarray(f(z, w))})
give(gradient=np.asarray(mp.jit(jax.grad(lambda b: jnp.tanh(x / 20 @ b).sum()), out_placements=[])(w)))

# --- checkpoints ----------------------------------------------------------------------------------
import os
folder = os.path.join(os.environ["MESHPAR_TEST_RESULTS"], "..", "state")
state = {
    "uneven": z, "pending": mp.shard_tensor(y, grid, [Partial()]), "host": np.arange(5), "step": 3,
    "key": mp.shard_tensor(jax.random.key(1), line, []), "even": mp.shard_tensor(y, grid, [Shard(1), Shard(0)]),
}
for turn in range(2):  # the second one takes the place of the first
    mp.save_state_dict(state, folder, unique_id=7)
mp.save_state_dict({"step": 4}, folder, unique_id=8)
give(save_errors=[
    error(mp.save_state_dict, {"a": np.zeros(2 + me)}, folder),
    error(mp.save_state_dict, {"a": 1}, folder, unique_id=me),
])
back = {
    "uneven": mp.shard_tensor(x * 0, grid, [Shard(1)]), "pending": mp.shard_tensor(y * 0, line, []), "host": np.zeros(5, int),
    "step": 0, "key": mp.shard_tensor(jax.random.key(0), line, []), "even": mp.shard_tensor(y * 0, line, [Shard(0)]),
}
mp.load_state_dict(back, folder, unique_id=7)
give(
    back={k: np.asarray(mp.unshard_dtensor(back[k])) for k in ("uneven", "pending", "even")},
    host=back["host"], step=back["step"], newest=mp.checkpoint_contents(folder)["step"],
    bits=np.asarray(mp.jit(lambda k: jax.random.bits(k, (3,)), out_placements=[])(back["key"])),
    folders=sorted(os.listdir(folder)),
)
"""
X = np.arange(21, dtype=np.float32).reshape(7, 3)
Y = np.arange(16, dtype=np.float32).reshape(4, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("data"), SCRIPT, processes=2, devices=2).ok().results


def test_a_value_that_every_process_gives_whole(results):
    for got in results:
        for name, value in [("even", Y), ("uneven", X), ("pending", X)]:
            np.testing.assert_array_equal(got[f"{name}_numpy"], value)
        np.testing.assert_array_equal(got["again"], Y)
        assert [str(p) for p in got["again_at"]] == ["Replicate()", "Shard(1)"]
        assert "belongs to another process" in got["other_process"]


def test_pieces_of_ranks_and_of_processes(results):
    for got in results:
        for name in ("by_rank", "by_process"):
            np.testing.assert_array_equal(got[name], X)
        for name in ("whole_rows", "repeated"):
            np.testing.assert_array_equal(got[name], Y)
        np.testing.assert_array_equal(got["sum"], Y * 6)
        np.testing.assert_array_equal(got["one_sum"], Y * 3)
        assert got["scalar"] == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (0, "one piece for several contributions"),
        (1, "do not make one piece"),
        (2, r"process 0 gives a piece of shape (3, 3), its ranks (0, 1) hold (4, 3)"),
        (3, "1 piece(s) for 2 rank(s)"),
        (4, "int32 in [Shard(0)]"),
        (5, "dims"),
    ],
)
def test_pieces_that_do_not_fit_raise_on_every_process(results, case, words):
    for got in results:
        assert words in got["errors"][case], got["errors"][case]


def test_each_process_reads_its_part_of_the_batches(results):
    for got in results:
        assert [batch["n"] for batch in got["batches"]] == [0, 1, 2, 3]
        for i, batch in enumerate(got["batches"]):
            np.testing.assert_array_equal(batch["x"], X if i == 3 else Y + i)
        unequal, misfit, other = got["loader_errors"]
        assert "process(es) [0] have ended" in unequal
        assert "leaf" in misfit and "process 0 gives a piece of shape (3, 3)" in misfit
        assert "has a batch of" in other


def test_both_partitioners_run_over_all_processes(results):
    w = np.ones((3, 4), np.float32)
    for got in results:
        for name in ("meshpar", "xla"):
            np.testing.assert_allclose(got[name], np.tanh(X / 20 @ w).sum(0), rtol=1e-6)
        np.testing.assert_allclose(
            got["gradient"], X.T / 20 @ (1 - np.tanh(X / 20 @ w) ** 2), rtol=1e-5
        )


def test_processes_that_save_different_things(results):
    for rank, got in enumerate(results):
        shapes, paths = got["save_errors"]
        assert f"on process {1 - rank} and float64[{2 + rank}] on process {rank}" in shapes, shapes
        assert f"process {1 - rank} writes" in paths, paths


def test_a_checkpoint_is_written_by_all_and_read_onto_another_mesh(results):
    import jax

    for got in results:
        for name, value in [("uneven", X), ("pending", Y), ("even", Y)]:
            np.testing.assert_array_equal(got["back"][name], value)
        np.testing.assert_array_equal(got["host"], np.arange(5))
        assert got["step"] == 3 and got["newest"] == 4 and got["folders"] == ["7", "8"]
        np.testing.assert_array_equal(got["bits"], jax.random.bits(jax.random.key(1), (3,)))
