"""A masked loss weighs tokens alike however the batch is taken apart: sums and counts, no means.

Sentence A has 3 valid tokens of loss 1, B has 1 of loss 5: the mean is 8/4, and the mean of the
sentences' means, which is wrong, would be 3.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp

LOSSES = np.array([[1, 1, 1, 9], [5, 9, 9, 9]], np.float32)  # the 9s are not valid
VALID = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], np.float32)
EMPTY = (np.full((1, 4), 9, np.float32), np.zeros((1, 4), np.float32))
DP = mp.ProcessMesh([0, 1], ["dp"])
PP = mp.ProcessMesh([0, 1], ["pp"])


def total(w, losses, valid):
    return (w * losses * valid).sum()


def accumulated(w, losses, valid):
    """Loss and gradient over microbatches of one sentence: sums are kept, and divided once."""

    def turn(kept, part):
        value, gradient = jax.value_and_grad(total)(w, *part)
        return (kept[0] + value, kept[1] + gradient, kept[2] + part[1].sum()), None

    start = (jnp.float32(0), jnp.float32(0), jnp.float32(0))
    (value, gradient, count), _ = jax.lax.scan(turn, start, (losses[:, None], valid[:, None]))
    count = jnp.maximum(count, 1)
    return value / count, gradient / count


@pytest.mark.parametrize("cut", [0, 1], ids=["sentences", "tokens"])
def test_accumulation_steps_weigh_by_tokens(cut):  # (ii), and (iii) inside each step
    placed = [mp.shard_tensor(x, DP, [mp.Shard(cut)]) for x in (LOSSES, VALID)]
    got = mp.jit(accumulated)(jnp.float32(1), *placed)
    np.testing.assert_allclose([float(x) for x in got], [2, 2], rtol=1e-6)


def test_a_microbatch_without_valid_tokens_changes_nothing():  # (v)
    losses, valid = (np.concatenate([x, y]) for x, y in zip((LOSSES, VALID), EMPTY, strict=True))
    placed = [mp.shard_tensor(x, DP, [mp.Shard(1)]) for x in (losses, valid)]
    got = mp.jit(accumulated)(jnp.float32(1), *placed)
    np.testing.assert_allclose([float(x) for x in got], [2, 2], rtol=1e-6)
    nothing = [mp.shard_tensor(x, DP, [mp.Shard(1)]) for x in EMPTY]
    assert [float(x) for x in mp.jit(accumulated)(jnp.float32(1), *nothing)] == [0, 0]


@pytest.mark.parametrize("schedule", ["FThenB", "1F1B", "ZBH1"])
def test_pipeline_microbatches_weigh_by_tokens(schedule):  # (iv)
    """A pipeline takes the mean of its microbatches' losses, so each gives its sum times M/count."""

    def loss(scales, losses, valid):
        share = losses.shape[0] / jnp.maximum(valid.sum(), 1)

        def weighed(out, target):
            return (out * target).sum() * share

        return mp.pipeline(
            lambda w, x: w * x, scales, losses[:, None], schedule, PP,
            loss_fn=weighed, targets=valid[:, None],
        )  # fmt: skip

    scales = np.ones((2, 1, 1), np.float32)
    value, gradient = jax.jit(jax.value_and_grad(loss))(scales, LOSSES, VALID)
    assert float(value) == pytest.approx(2, rel=1e-6)
    np.testing.assert_allclose(np.asarray(gradient).ravel(), [2, 2], rtol=1e-6)
