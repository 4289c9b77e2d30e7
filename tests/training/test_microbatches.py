"""Batches of any number of rows: the last microbatches are smaller, and the step is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshpar as mp
from meshpar import schedules
from meshpar.errors import MeshparError
from tests.training.small_pipeline import Block, Net, batch, losses, piped, single


def microbatches(dm, rows):
    placed, _ = dm._placer(tuple(batch(rows)), ["x", "y"])
    return dm._recipe.pipeline.table(placed).M


@pytest.mark.parametrize(
    "options, rows, count",
    [
        ({"accumulate_steps": 1, "micro_batch_size": 6}, 48, 4),
        ({"accumulate_steps": 1, "micro_batch_size": 7}, 48, 4),  # 24 on a device: 6, 6, 6, 6
        ({"accumulate_steps": 1, "micro_batch_size": 100}, 16, 1),
        ({"accumulate_steps": 3}, 16, 3),  # 8 rows on a device: 3, 3, 2
        ({"accumulate_steps": 4}, 2, 1),
        ({"accumulate_steps": 5}, 16, 4),  # of 2 rows, which leave none for a fifth
    ],
    ids=str,
)
def test_the_number_of_microbatches(options, rows, count):
    assert microbatches(piped(Net(), {"pp": 2, "dp": 2}, **options), rows) == count


class Noisy(Net):
    """With dropout, and outputs whose rows are their second dim."""

    def __init__(self):
        super().__init__(layers=4, scanned=True)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))

    def __call__(self, x):
        return super().__call__(self.dropout(x)).T


def masked(y, t):
    """A mean over the labels that count, which the batch alone decides."""
    counts = t.T > 0
    return (((y - t.T) ** 2) * counts).sum() / counts.sum()


def results(dm, rows):
    """Losses of training and evaluation, outputs of prediction."""
    x, y = (
        mp.shard_tensor(leaf, dm.mesh, [mp.Shard(0) if a == "dp" else mp.Replicate() for a in dm.mesh.axis_names])
        for leaf in batch(rows)
    )  # fmt: skip
    dm.train()
    losses = [float(dm(x, y)) for _ in range(3)]
    dm.eval()
    losses.append(float(dm(x, y)))
    dm.predict()
    return losses, np.asarray(dm(x))


# Rows, mesh, options: every schedule meets 8 rows in microbatches of 3, 3 and 2.
CASES = [
    (8, {"pp": 2}, {"schedule_mode": name, "vpp_degree": 2 if V else 1})
    for name, V in zip(schedules.NAMES, (0, 0, 0, 0, 1, 1, 1, 1), strict=True)
]
COVERING = [
    (2, {"pp": 2}, {"schedule_mode": "FThenB", "accumulate_steps": 4}),
    (10, {"pp": 2, "dp": 2}, {"schedule_mode": "ZBH1"}),  # 5 on a device: 2, 2, 1
    (7, {"dp": 2, "pp": 2}, {"schedule_mode": "VPP", "vpp_degree": 2}),  # 4 and 3
]


def check(rows, axes, options, partitioner="meshpar"):
    losses, outputs = results(single(Noisy(), masked), rows)
    got, got_outputs = results(piped(Noisy(), axes, masked, **options), rows)
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    np.testing.assert_allclose(got_outputs, outputs, atol=1e-5 * np.abs(outputs).max())


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_smaller_last_microbatches(case):
    check(*case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_smaller_last_microbatches_of_every_schedule(case):
    check(*case)


@pytest.mark.parametrize(
    "rows, message",
    [
        ((0, 0), r"no rows[\s\S]*x \(0, 4\)"),
        ((4, 6), r"no common number of rows[\s\S]*x \(4, 4\), .*\(6, 4\)"),
    ],
)
def test_batches_without_common_rows(rows, message):
    dm = piped(Net(), {"pp": 2})
    dm.train()
    with pytest.raises(MeshparError, match=message):
        dm(*(jnp.zeros((n, 4)) for n in rows))


def test_rows_that_microbatches_would_have_to_share():
    """A reshape that mixes rows of different microbatches is refused, by name and line."""

    class Pairs(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([Block(rngs), Block(rngs)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.reshape(-1, 2, 8).mean((1, 2))

    dm = piped(Pairs(), {"pp": 2}, lambda y, t: (y**2).mean() + 0 * t.sum())
    dm.train()
    with pytest.raises(NotImplementedError, match=r"test_microbatches.py[\s\S]*all microbatches"):
        dm(jax.random.normal(jax.random.key(0), (10, 8)), jnp.zeros(10))


@pytest.mark.parametrize("executor, scanned", [("program", True), ("mpmd", False)])
def test_parameters_of_a_narrow_type(executor, scanned):
    """Gradients are rounded for each microbatch too, so losses equal up to the type's 8 bits."""

    def narrow():
        model = Net(4, scanned)
        nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
        return model

    dm = piped(narrow(), {"pp": 2, "dp": 2}, executor=executor, schedule_mode="ZBH1")
    wide, one = losses(single(Net(4, scanned))), losses(single(narrow()))
    np.testing.assert_allclose(losses(dm), one, rtol=2**-7)
    assert not np.allclose(one, wide, rtol=1e-6)  # the types differ at all
    assert {x.dtype for x in dm.state_dict("param").values()} == {jnp.dtype(jnp.bfloat16)}
