"""Small models, their meshes, and the single-device training that is the specification."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar import models
from meshpar.models import axes_for, cross_entropy, rules_for

STEPS = 5


@dataclass(frozen=True)
class Case:
    """A model with its data and optimizer; `build` gives a new, equal one each time."""

    name: str
    graph: object
    state: object
    batches: tuple  # STEPS of (inputs, labels)
    tx: optax.GradientTransformation
    scanned: bool = False

    def build(self):
        return nnx.merge(self.graph, self.state, copy=True)

    def placed(self, mesh):
        """The model with its parameters placed by the rules of `meshpar.models`."""
        model = self.build()
        rules = rules_for(model)
        params = nnx.state(model, nnx.Param)
        paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        placed = [
            mp.shard_tensor(value, mesh, self.placements(dotted(path), value.ndim, rules, mesh))
            for path, value in paths
        ]
        nnx.update(model, jax.tree.unflatten(treedef, placed))
        return model

    def placements(self, path, ndim, rules, mesh):
        axes = axes_for(path, ndim, rules, scanned=self.scanned)
        return [
            mp.Shard(axes.index(axis)) if axis in axes else mp.Replicate()
            for axis in mesh.dim_names
        ]


def dotted(path):
    keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
    return ".".join(str(key) for key in keys if key is not None)


def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def _tokens(vocab):
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.integers(0, vocab, (2, 16, 8), np.int32)) for _ in range(STEPS))


def _vectors():
    rng = np.random.default_rng(1)
    return tuple(
        (rng.normal(size=(16, 16)).astype(np.float32), rng.integers(0, 8, 16, np.int32))
        for _ in range(STEPS)
    )


def _images():
    rng = np.random.default_rng(2)
    return tuple(
        (rng.normal(size=(16, 8, 8, 3)).astype(np.float32), rng.integers(0, 10, 16, np.int32))
        for _ in range(STEPS)
    )


def _decoder(**options):
    return models.Decoder(
        models.DecoderConfig(
            vocab_size=64, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
            hidden_dim=64, max_seq_len=8, **options,
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip


def _gpt2():
    # 67 divides by no axis: the embedding, which is the head too, is uneven on every tp.
    config = models.GPT2Config(
        vocab_size=67, num_layers=1, model_dim=32, num_heads=4, max_seq_len=8
    )
    return models.GPT2(config, rngs=nnx.Rngs(params=0, dropout=1))


def _resnet():
    config = models.ResNetConfig(stages=(1, 1), width=8)
    return models.ResNet(config, rngs=nnx.Rngs(0))


def _mlp():
    config = models.MLPConfig(dims=(16, 32, 32, 32, 8), dropout=0.1)
    return models.MLP(config, rngs=nnx.Rngs(0))


_BUILDERS = {
    "decoder": (_decoder, lambda: _tokens(64), adamw),
    "decoder-scanned": (lambda: _decoder(scan_layers=True), lambda: _tokens(64), adamw),
    "gpt2": (_gpt2, lambda: _tokens(67), adamw),
    "resnet": (_resnet, _images, adamw),
    "resnet-sgd": (_resnet, _images, lambda: optax.sgd(0.1)),
    "mlp": (_mlp, _vectors, adamw),
}


@pytest.fixture(scope="session")
def cases():
    """Name -> case, each built once."""
    made = {}

    def case(name):
        if name not in made:
            build, data, tx = _BUILDERS[name]
            graph, state = nnx.split(build())
            made[name] = Case(name, graph, state, data(), tx(), name.endswith("scanned"))
        return made[name]

    return case


@pytest.fixture(scope="session")
def reference(cases):
    """Name -> the losses of STEPS steps on one device, by flax and optax alone."""
    done = {}

    def losses(name):
        if name not in done:
            case = cases(name)
            model = case.build()
            model.train()
            done[name] = train_on_one_device(model, case.tx, case.batches)
        return done[name]

    return losses


def train_on_one_device(model, tx, batches):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(x), y))(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, jnp.asarray(x), jnp.asarray(y))) for x, y in batches]


@pytest.fixture
def mesh_of_shape():
    def make(**axes):
        size = int(np.prod(list(axes.values())))
        return mp.ProcessMesh(np.arange(size).reshape(tuple(axes.values())), list(axes))

    return make
