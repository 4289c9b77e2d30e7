"""`Strategy.pipeline.executor`: the programs of the ranks train like one program and one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar import schedules
from meshpar.schedules.executors import mpmd
from meshpar.training import by_rank
from tests.training.small_pipeline import Net, batch, expected, losses, piped, single
from tests.training.test_pipelined import MESHES, TWOFOLD, check

# Schedule, mesh, microbatches, model, layers, scanned: every two of what the first three and the
# models have meet somewhere here or in the cases of `program`.
COVERING = [
    ("1F1B", "pp2 tp2 dp2", 3, "gpt2", 5, True),
    ("ZBVPP", "pp2", 1, "llama", 4, False),
    ("ZBH1", "pp4 dp2 zero1", 4, "llama", 4, True),
]
ALL = [
    (name, mesh, M, model, MESHES[mesh]["pp"] * (1 + (name in TWOFOLD)), True)
    for name, mesh, M, model in itertools.product(
        (*schedules.NAMES, "auto"), MESHES, (1, 3, 8), ("llama", "gpt2")
    )
]


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_five_steps_equal_those_of_one_device(case):
    check(*case, executor="mpmd")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL, ids=str)
def test_five_steps_equal_those_of_one_device_everywhere(case):
    check(*case, executor="mpmd")


@pytest.mark.parametrize("partitioner", ["meshpar", "xla"])
def test_every_mode_of_uneven_microbatches(partitioner):
    """10 rows over dp 2 in 3 microbatches: the last ones are smaller."""
    mesh, (x, y) = mp.ProcessMesh.create({"pp": 2, "dp": 2}), batch(10)
    dm = piped(Net(), mesh, executor="mpmd", partitioner=partitioner)
    one = single(Net())
    for each in (one, dm):
        each.eval()
    np.testing.assert_allclose(float(dm(x, y)), float(one(x, y)), rtol=1e-5)
    for each in (one, dm):
        each.predict()
    outputs = dm(x)
    assert outputs.shape == (10, 4)
    np.testing.assert_allclose(np.asarray(outputs), np.asarray(one(x)), atol=1e-5)
    np.testing.assert_allclose(losses(dm, 10), losses(one, 10), rtol=1e-5)


def test_what_is_around_the_pipeline():
    """Recomputation, a loss (sum, count), clipping, accumulation, ZeRO 3, unequal stages."""

    def parts(y, t):
        return ((y - t) ** 2).sum(), jnp.float32(t.size)

    def tx():
        clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
        return mp.shard_optimizer(clipped, None, 2)

    groups = {"recompute": {"enable": True}, "sharding": {"enable": True, "stage": 3}}
    dm = piped(
        Net(), {"pp": 2, "dp": 2}, loss=parts, tx=tx(), groups=groups, executor="mpmd",
        schedule_mode="ZBH1",
    )  # fmt: skip
    np.testing.assert_allclose(losses(dm), losses(single(Net(), tx=tx())), rtol=1e-5)
    cut = dm.state_dict()["layers.0.up.kernel"]
    assert mp.placements_of(cut) == [mp.Shard(0), mp.Shard(0)]


@pytest.mark.parametrize("executors", [("mpmd", "program"), ("program", "mpmd")])
def test_state_goes_from_one_executor_to_the_other(executors, tmp_path):
    first, second = (piped(Net(), {"pp": 2}, executor=e) for e in executors)
    got = losses(first, steps=1)
    mp.save_state_dict(first.state_dict(), tmp_path / "saved")
    state = second.state_dict()
    mp.load_state_dict(state, tmp_path / "saved")
    second.set_state_dict(state)
    got += losses(second, steps=2)
    np.testing.assert_allclose(got, expected(), rtol=1e-5)


def test_the_state_is_donated_and_nothing_else_stays():
    dm = piped(Net(scanned=True), {"pp": 2}, executor="mpmd")
    losses(dm, steps=1)
    before, live = dm._state, len(jax.live_arrays())
    losses(dm, steps=1)
    assert all(x.is_deleted() for x in (*before.params, *before.opt))
    del before
    assert len(jax.live_arrays()) == live
    assert dm.compile_counts["train"] == 1
    held = dm.state_dict()  # what somebody holds stays
    losses(dm, steps=1)
    assert np.isfinite(np.asarray(held["first.kernel"])).all()


def test_auto_takes_the_faster_one_for_training(monkeypatch):
    """Which is faster is tested in test_choice."""
    chosen, made = [], []
    make = mpmd.PipelineByRank.__init__
    monkeypatch.setattr(
        mpmd.PipelineByRank, "__init__", lambda self, step: (made.append(1), make(self, step))[1]
    )
    for executor in ("mpmd", "program"):
        monkeypatch.setattr(by_rank, "choose", lambda *_, e=executor: (chosen.append(e), e)[1])
        dm = piped(Net(), {"pp": 2}, executor="auto")
        np.testing.assert_allclose(losses(dm), expected(), rtol=1e-5)
        dm.eval()
        dm(*batch())
    assert chosen == ["mpmd", "program"] and made == [1]


@pytest.mark.parametrize(
    "asked", ["lower", "compiled_text", "memory_analysis", "collectives", "plan"]
)
def test_what_is_of_one_program_is_refused(asked):
    dm = piped(Net(), {"pp": 2}, executor="mpmd")
    dm.train()
    name = "compiled_text" if asked == "collectives" else asked
    with pytest.raises(NotImplementedError, match=rf"DistModel\.{name}[\s\S]*'program'"):
        getattr(dm, asked)(*batch())


def test_several_processes_are_refused_and_auto_is_one_program(monkeypatch):
    monkeypatch.setattr(mpmd.jax, "process_index", lambda: 1)
    with pytest.raises(NotImplementedError, match=r"Strategy\.pipeline\.executor[\s\S]*processes"):
        piped(Net(), {"pp": 2}, executor="mpmd")
    piped(Net(), {"pp": 2}, executor="auto")


def test_an_unknown_executor():
    with pytest.raises(ValueError, match="'program', 'mpmd' or 'auto'"):
        piped(Net(), {"pp": 2}, executor="spmd")
