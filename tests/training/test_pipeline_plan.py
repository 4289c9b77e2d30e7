"""The plan of a pipelined step is its lowered module, ticks multiplied out."""

from collections import Counter
from fractions import Fraction

import optax
import pytest

import meshpar as mp
from meshpar.compiler.hlo import axes_of, sent_bytes
from tests.compiler.executed import executed_collectives
from tests.training.small_pipeline import Net, batch, piped


def by_tensor(model, mesh):
    """Up by columns, down by rows: a sum over tp in each layer."""
    for layer in model.layers:
        for linear, dim in ((layer.up, 1), (layer.down, 0)):
            placements = [mp.Shard(dim) if a == "tp" else mp.Replicate() for a in mesh.dim_names]
            linear.kernel = mp.shard_tensor(linear.kernel, mesh, placements)
    return model


def lowered(text, mesh, others):
    out = Counter()
    for kind, one, times in executed_collectives(text, others):
        name = {"collective_permute": "ppermute"}.get(kind, kind)
        out[name, frozenset(axes_of(kind, one, mesh))] += times * sent_bytes(kind, one)
    return {key: sent for key, sent in out.items() if sent}


def planned(plan):
    out = Counter()
    for c in plan.collectives:
        out[c.kind, frozenset(c.axes)] += c.count * c.bytes
    return {key: sent for key, sent in out.items() if sent}


@pytest.mark.parametrize(
    "name, V, split",
    [("1F1B", 1, False), ("ZBH1", 1, False), ("VPP", 2, True)],
)
def test_collectives_are_counted_as_often_as_they_run(name, V, split):
    M, P = 3, 2
    mesh = mp.ProcessMesh.create({"pp": P, "dp": 2, "tp": 2})
    model = by_tensor(Net(layers=4), mesh)
    dm = piped(
        model, mesh, schedule_mode=name, vpp_degree=V, split_backward=split, tx=optax.sgd(0.1)
    )
    dm.train()
    args = batch()
    plan = dm.plan(*args)
    schedule = dm._recipe.pipeline.table(dm._placer(tuple(args), ["x", "y"])[0])
    ticks = schedule.ticks
    shifts = 2 if P == 2 else 3  # to oneself, to the neighbours
    actions = [M, M * V, M]  # what comes before the layers, F, what comes after
    actions += [M * V, M * V] if split or name == "ZBH1" else [M * V]
    runs = [*[0] * shifts, *actions, M]
    found = lowered(dm.lower(*args).as_text(), mesh, [Fraction(n, ticks) for n in runs])
    assert planned(plan) == found
    # Each tick sends one activation on; each layer of a rank sums over tp, forward and backward.
    x = 2 * 8 * 4  # rows, features, bytes
    assert found["ppermute", frozenset({"pp"})] == ticks * x
    assert found["all_reduce", frozenset({"tp"})] >= 2 * (4 // P) * M * x
