"""The residual network and its running statistics."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from meshpar.models.losses import cross_entropy
from meshpar.models.resnet import ResNet, ResNetConfig

CONFIG = ResNetConfig(stages=(1, 1), width=8, in_channels=8)


@nnx.jit
def apply(model, x):
    return model(x)


def images(seed=0, batch=6):
    random = np.random.default_rng(seed)
    return jnp.asarray(2.0 + random.standard_normal((batch, 8, 8, 8), np.float32))


def statistics(model):
    return nnx.to_flat_state(nnx.state(model, nnx.BatchStat))


def test_logits_and_gradients():
    model = ResNet(CONFIG, rngs=nnx.Rngs(0))
    labels = jnp.arange(6) % 10
    loss, grads = nnx.jit(nnx.value_and_grad(lambda m: cross_entropy(m(images()), labels)))(model)
    assert math.isfinite(loss)
    assert apply(model, images()).shape == (6, 10)
    for path, grad in nnx.to_flat_state(grads):
        assert np.isfinite(grad[...]).all(), path


def test_training_updates_the_running_statistics_by_the_batch_of_the_step():
    model = ResNet(CONFIG, rngs=nnx.Rngs(0))
    before = {path: np.asarray(leaf[...]) for path, leaf in statistics(model)}
    apply(model, images())
    after = dict(statistics(model))
    for path, leaf in after.items():
        assert not np.allclose(leaf[...], before[path]), path
    # Of the first norm the batch is known: momentum times old plus the rest of the batch's.
    stem = np.asarray(model.stem(images()))
    assert_allclose(
        model.stem_norm.mean[...], 0.1 * stem.mean(axis=(0, 1, 2)), rtol=1e-4, atol=1e-5
    )
    assert_allclose(
        model.stem_norm.var[...], 0.9 + 0.1 * stem.var(axis=(0, 1, 2)), rtol=1e-4, atol=1e-5
    )


def test_evaluation_reads_the_running_statistics_and_changes_nothing():
    model = ResNet(CONFIG, rngs=nnx.Rngs(0))
    apply(model, images())
    model.eval()
    before = [np.asarray(leaf[...]) for _, leaf in statistics(model)]
    together = apply(model, images(1))
    # Training statistics would make an image's logits depend on its batch.
    assert_allclose(apply(model, images(1)[:2]), together[:2], rtol=1e-4, atol=1e-5)
    for old, (_, new) in zip(before, statistics(model), strict=True):
        assert_array_equal(old, new[...])


def test_the_defaults_are_resnet_20():
    model = nnx.eval_shape(lambda: ResNet(ResNetConfig(), rngs=nnx.Rngs(0)))
    kernels = [path for path, leaf in nnx.to_flat_state(nnx.state(model)) if path[-1] == "kernel"]
    shortcuts = [path for path in kernels if "shortcut" in path]
    assert len(kernels) - len(shortcuts) == 20
    assert len(shortcuts) == 2
