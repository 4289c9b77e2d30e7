"""`executor="mpmd"` gives what `program` and the loop over microbatches give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar import schedules
from meshpar.schedules.executors import mpmd
from meshpar.schedules.executors.arguments import PipelineError
from tests.schedules.executors.models import mean_of_losses, mlp, mlp_params, normal
from tests.schedules.executors.test_pipeline import (
    NAMES,
    TENSOR,
    ZERO_3,
    assert_same,
    check_schedule,
    cross_entropy,
    embed,
    head,
    mesh_of,
    square,
)

# Ranks and microbatches; fewer of these than of those too.
CASES = [("FThenB", 1, 1), ("1F1B", 4, 2), ("VPP", 2, 3), ("ZBVPP", 2, 3), ("auto", 2, 4)]
ALL = [(n, P, M) for n in NAMES for P in (1, 2, 4, 8) for M in (1, 3, 8)]


@pytest.mark.parametrize("name, P, M", CASES)
def test_every_schedule_trains_like_the_loop(name, P, M):
    check_schedule(name, P, M, executor="mpmd")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, P, M", ALL)
def test_every_schedule_trains_like_the_loop_everywhere(name, P, M):
    check_schedule(name, P, M, executor="mpmd")


@pytest.mark.parametrize("name, recompute", [("1F1B", True), ("ZBH1", False)])
def test_tied_embeddings_that_lie_cut_over_the_ranks(name, recompute):
    """Also against `program`: the same operations on the same numbers."""
    params, table, mesh = mlp_params(2), normal(5, 12, 8), mesh_of(pp=2)
    tokens = jax.random.randint(jax.random.key(6), (3, 2, 5), 0, 12)
    labels = jax.random.randint(jax.random.key(7), (3, 2, 5), 0, 12)

    def piped(params, table, executor="mpmd"):
        return mp.pipeline(
            mlp,
            params,
            tokens,
            name,
            mesh,
            first_fn=embed,
            first_params=table,
            last_fn=head,
            last_params=table,
            loss_fn=cross_entropy,
            targets=labels,
            recompute=recompute,
            executor=executor,
            in_placements={"first_params": [mp.Shard(0)], "last_params": [mp.Shard(1)]},
        )

    def looped(params, table):
        ends = {"first": (embed, table), "last": (head, table)}
        return mean_of_losses(mlp, params, tokens, loss=cross_entropy, targets=labels, **ends)

    got = jax.value_and_grad(piped, (0, 1))(params, table)
    assert_same(got, jax.jit(jax.value_and_grad(looped, (0, 1)))(params, table))
    program = jax.value_and_grad(lambda *a: piped(*a, "program"), (0, 1))(params, table)
    assert_same(got, program, rtol=1e-6)
    # Without a gradient the forward passes run alone.
    assert_same(piped(params, table), got[0])


@pytest.mark.parametrize("kept, name", [(TENSOR, "ZBH1"), (ZERO_3, "1F1B")], ids=["tp", "zero3"])
def test_other_axes_cut_within_the_stages(kept, name):
    """The arrays' own placements are taken, also under `jax.grad`."""
    mesh, rows = mesh_of(pp=2, dp=2, tp=2), [mp.Replicate(), mp.Shard(1)]
    whole, x, targets = mlp_params(2), normal(3, 3, 4, 8), normal(4, 3, 4, 8)
    params = {k: mp.shard_tensor(v, mesh, kept[k]) for k, v in whole.items()}
    placed = mp.shard_tensor(x, mesh, rows)

    def piped(params, x):
        more = {"loss_fn": square, "targets": targets, "executor": "mpmd"}
        return mp.pipeline(mlp, params, x, name, mesh, **more)

    def looped(params, x):
        return mean_of_losses(mlp, params, x, loss=square, targets=targets)

    value, (gradients, for_x) = jax.value_and_grad(piped, (0, 1))(params, placed)
    expected = jax.jit(jax.value_and_grad(looped, (0, 1)))(whole, x)
    assert_same((value, (gradients, for_x)), expected)
    assert {k: mp.placements_of(g) for k, g in gradients.items()} == kept


def test_dropout_draws_the_same_numbers():
    params, x, targets = mlp_params(2), normal(3, 3, 4, 8), normal(4, 3, 4, 8)
    keys, layers = jax.random.split(jax.random.key(0), 3), jnp.arange(2)

    def stage(params, x, key):
        keep = jax.random.bernoulli(jax.random.fold_in(key, params["layer"]), 0.5, x.shape)
        return jnp.where(keep, mlp(params, x), 0.0)

    def loss(params, call):
        return call(stage, {**params, "layer": layers}, x)

    def piped(params):
        more = {"loss_fn": square, "targets": targets, "extras": keys, "executor": "mpmd"}
        return loss(params, lambda *a: mp.pipeline(*a, "1F1B", mesh_of(pp=2), **more))

    def looped(params):
        more = {"loss": square, "targets": targets, "extras": keys}
        return loss(params, lambda *a: mean_of_losses(*a, **more))

    assert_same(jax.value_and_grad(piped)(params), jax.value_and_grad(looped)(params))


def test_without_a_loss_it_returns_the_outputs():
    params, x = mlp_params(4), normal(3, 3, 2, 8)
    got = mp.pipeline(mlp, params, x, "VPP", mesh_of(pp=2), executor="mpmd")
    expected = jax.jit(lambda p, x: mp.pipeline(mlp, p, x, "VPP", mesh_of(pp=2)))(params, x)
    assert_same(got, expected)


WIDE = 24  # a size that no other dim has


@pytest.mark.parametrize("name", ["1F1B", "ZBH1", "FThenB"])
def test_a_value_lives_as_long_as_the_table_says(name, monkeypatch):
    """Its arrays are freed with it: what is live on the devices is what the slots hold."""
    P, M = 2, 5
    params = {"up": normal(0, P, 8, WIDE), "down": normal(1, P, WIDE, 8)}
    x = normal(3, M, 2, 8)
    peaks = [0] * P
    do = mpmd._Run.do

    def watched(run, rank, action):
        stash = run._stashes[rank]
        before = set(stash.values)
        do(run, rank, action)
        uses = run._signatures.uses
        wide = {v for v, use in enumerate(uses) if use.struct.shape == (2, WIDE)}
        together = {key for key in before | set(stash.values) if key[0] in wide}
        peaks[rank] = max(peaks[rank], len(together))
        device = run._ranks[rank].mesh.jax_mesh.devices.item()
        live = [a for a in jax.live_arrays() if a.shape == (2, WIDE) and device in a.devices()]
        assert len(live) == sum(key[0] in wide for key in stash.values)
        kept.append((run._signatures, wide))

    kept = []
    monkeypatch.setattr(mpmd._Run, "do", watched)

    def loss(params):
        return mp.pipeline(
            lambda w, x: jnp.sin(x @ w["up"]) @ w["down"],
            params,
            x,
            name,
            mesh_of(pp=P),
            loss_fn=square,
            targets=x,
            executor="mpmd",
        )

    jax.grad(loss)(params)
    signatures, wide = kept[0]
    table = schedules.generate(name, P, M)
    expected = [0] * P
    for rank in range(P):
        lives = []
        for v in wide:
            use = signatures.uses[v]
            until = "until_W" if use.by_weight else "until_I"
            until = "between_I_and_W" if use.made == "I" else until
            lives += schedules.lifetimes(table, until)[rank]
        lives.sort(key=lambda life: (life.first, life.last))
        expected[rank] = max(
            sum(life.first <= tick <= life.last for life in lives) for tick in range(table.ticks)
        )
    assert peaks == expected
    assert max(peaks) > 1


def test_a_new_lambda_of_the_same_code_is_not_compiled_again(monkeypatch):
    made = []
    make = mpmd.PipelineByRank.__init__
    monkeypatch.setattr(
        mpmd.PipelineByRank, "__init__", lambda self, step: (made.append(1), make(self, step))[1]
    )
    params, x = normal(0, 2, 8, 8), normal(3, 2, 2, 8)

    def loss(params, slope):
        stage = lambda w, x: jnp.tanh(x @ w) * slope  # noqa: E731 - that is the point
        more = {"loss_fn": square, "targets": x, "executor": "mpmd"}
        return mp.pipeline(stage, params, x, "1F1B", mesh_of(pp=2), **more)

    first, again, other = (jax.grad(loss)(params, slope) for slope in (2.0, 2.0, 3.0))
    assert len(made) == 2
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.asarray(first - other)).max() > 1e-3


def test_inside_jit_it_says_what_to_do():
    params, x = mlp_params(2), normal(3, 3, 2, 8)

    def loss(params, executor):
        more = {"loss_fn": square, "targets": x, "executor": executor}
        return mp.pipeline(mlp, params, x, "1F1B", mesh_of(pp=2), **more)

    with pytest.raises(PipelineError, match=r"without jax\.jit"):
        jax.jit(lambda p: loss(p, "mpmd"))(params)
    with pytest.raises(PipelineError, match=r"without jax\.jit"):
        jax.jit(jax.grad(lambda p: loss(p, "mpmd")))(params)
    with pytest.raises(ValueError, match="'program', 'mpmd' or 'auto'"):
        loss(params, "spmd")


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(mpmd.jax, "process_index", lambda: 1)
    params, x = mlp_params(2), normal(3, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=r"several processes[\s\S]*executor='program'"):
        mp.pipeline(mlp, params, x, "1F1B", mesh_of(pp=2), executor="mpmd")
