"""Parameters that the mesh does not divide, and activations cut along the sequence."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import meshpar as mp
from meshpar import models
from meshpar.models import cross_entropy

GPT2_VOCAB = 50_257


def gpt2():
    config = models.GPT2Config(
        vocab_size=GPT2_VOCAB, num_layers=1, model_dim=8, num_heads=1, max_seq_len=4
    )
    return models.GPT2(config, rngs=nnx.Rngs(params=0, dropout=1))


def test_the_vocabulary_of_gpt2_on_four_devices(mesh_of_shape):
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, GPT2_VOCAB, (2, 3, 4, 4), np.int32)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    runs = []
    for ranks in (1, 4):
        mesh = mesh_of_shape(tp=ranks)
        model = gpt2()
        placed = mp.shard_tensor(model.embed.embedding, mesh, [mp.Shard(0)])
        model.embed.embedding = placed
        dm = mp.to_static(model, mp.Strategy({"data_axes": ()}), loss=cross_entropy, optimizer=tx)
        dm.train()
        runs.append([float(dm(x, y)) for x, y in zip(tokens, labels, strict=True)])
        state = dm.state_dict()
        for name in ("embed.embedding", "opt.1.0.mu.embed.embedding", "opt.1.0.nu.embed.embedding"):
            rows = -(-GPT2_VOCAB // ranks)
            storage = getattr(state[name], "storage", state[name])
            assert {s.data.shape for s in storage.addressable_shards} == {(rows, 8)}, name
            assert np.asarray(state[name]).shape == (GPT2_VOCAB, 8)
    assert_allclose(runs[1], runs[0], rtol=1e-5)


def test_padding_stays_out_of_the_moments_and_of_weight_decay(mesh_of_shape):
    """The storage's padding rows are zero after steps that move every true row."""
    mesh = mesh_of_shape(tp=4)
    w = mp.shard_tensor(np.ones((5, 2), np.float32), mesh, [mp.Shard(0)])
    dm = mp.to_static(
        (lambda w, x: (x @ w).sum(), w), mp.Strategy({"data_axes": ()}), optimizer=optax.adamw(0.1)
    )
    dm.train()
    for _ in range(2):
        dm(np.ones((3, 5), np.float32))
    for name, value in dm.state_dict().items():
        if value.ndim:
            blocks = np.asarray(value.storage)
            true = np.asarray(value)
            assert np.count_nonzero(true) == true.size, name
            assert np.count_nonzero(blocks) == true.size, name


class Block(nnx.Module):
    """A norm on activations cut along the sequence, a column- and a row-parallel matrix."""

    def __init__(self, norm, mesh, rngs):
        self.mesh = mesh
        self.norm, self.final = norm(8, rngs=rngs), norm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def by_sequence(self, x):
        return mp.shard_tensor(x, self.mesh, [mp.Shard(0), mp.Shard(1)])

    def __call__(self, x):
        x = self.by_sequence(x)
        x = x + self.by_sequence(self.down(jax.nn.gelu(self.up(self.norm(x)))))
        return self.final(x)


@pytest.mark.parametrize("norm", [nnx.RMSNorm, nnx.LayerNorm])
def test_norm_weights_under_sequence_parallelism(mesh_of_shape, norm):  # C22
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 8, 8)).astype(np.float32)
    runs = {}
    for axes in ({"dp": 1, "tp": 1}, {"dp": 2, "tp": 4}):
        mesh = mesh_of_shape(**axes)
        model = Block(norm, mesh, nnx.Rngs(0))
        for linear, dim in ((model.up, 1), (model.down, 0)):
            linear.kernel = mp.shard_tensor(linear.kernel, mesh, [mp.Replicate(), mp.Shard(dim)])
        dm = mp.to_static(
            model, loss=lambda out, y: ((out - y) ** 2).mean(), optimizer=optax.sgd(1.0)
        )
        before = dm.state_dict("param")
        dm.train()
        dm(x, y)
        after = dm.state_dict("param")
        # With a learning rate of 1 the step is the gradient.
        runs[mesh.size] = {n: np.asarray(before[n]) - np.asarray(after[n]) for n in after}
        for name in (n for n in after if "norm" in n or "final" in n):
            shards = [np.asarray(s.data) for s in after[name].addressable_shards]
            assert len(shards) == mesh.size
            for shard in shards:
                assert_array_equal(shard, shards[0], err_msg=name)
    for name, gradient in runs[1].items():
        assert np.abs(gradient).max() > 0
        assert_allclose(runs[8][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)
