"""Cross-entropy against optax, with ignored tokens and over a sharded vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from meshpar.models.losses import cross_entropy


def case(shape=(3, 5), vocab=12, scale=4.0):
    random = np.random.default_rng(0)
    logits = scale * random.standard_normal((*shape, vocab), np.float32)
    return jnp.asarray(logits), jnp.asarray(random.integers(vocab, size=shape, dtype=np.int32))


def reference(logits, labels, kept):
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(kept, labels, 0))
    return jnp.where(kept, nats, 0).sum() / kept.sum()


@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
def test_equals_the_mean_of_optax(shape):
    logits, labels = case(shape)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-5)


@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
def test_ignored_tokens_are_neither_summed_nor_counted(ignore_index):
    logits, labels = case()
    labels = jnp.where(jnp.arange(15).reshape(3, 5) % 4 == 1, ignore_index, labels)
    kept = labels != ignore_index
    loss, grad = jax.value_and_grad(cross_entropy)(logits, labels, ignore_index=ignore_index)
    expected, expected_grad = jax.value_and_grad(reference)(logits, labels, kept)
    assert_allclose(loss, expected, rtol=1e-5)
    assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-7)
    assert_array_equal(grad[~kept], 0)


def test_no_kept_token_gives_zero_and_no_nan():
    logits, labels = case()
    loss, grad = jax.value_and_grad(cross_entropy)(logits, labels * 0 - 1, ignore_index=-1)
    assert loss == 0
    assert_array_equal(grad, 0)


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_large_logits_do_not_overflow(scale):
    logits = jnp.array([[scale, 0.0, -scale]])
    assert_allclose(cross_entropy(logits, jnp.array([0])), 0.0, atol=1e-6)
    assert_allclose(cross_entropy(logits, jnp.array([2])), 2 * scale, rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32():
    logits = jnp.zeros((4, 1024), jnp.bfloat16)
    loss = cross_entropy(logits, jnp.zeros(4, jnp.int32))
    assert loss.dtype == jnp.float32
    assert_allclose(loss, np.log(1024), rtol=1e-6)


def test_a_sharded_vocabulary_is_never_gathered():
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    logits, labels = case(vocab=64)
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, None, "tp")))
    run = jax.jit(jax.value_and_grad(cross_entropy), out_shardings=(None, sharded.sharding))
    text = run.lower(sharded, labels).compile().as_text()
    assert "all-reduce" in text
    for kind in ("all-gather", "all-to-all", "collective-permute", "scatter("):
        assert kind not in text
    loss, grad = run(sharded, labels)
    expected, expected_grad = jax.value_and_grad(cross_entropy)(logits, labels)
    assert_allclose(loss, expected, rtol=1e-5)
    assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-7)


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"labels of shape \(3, 4\).*logits \(3, 5, 12\)"):
        cross_entropy(case()[0], jnp.zeros((3, 4), jnp.int32))
