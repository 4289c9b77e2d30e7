"""A model of a few small layers, on one device and as a pipeline."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshpar as mp
from meshpar import models


class Net(nnx.Module):
    """A linear layer, equal ones of two modules each, another linear layer."""

    def __init__(self, layers=5, scanned=False):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.layers = models.stack.make_layers(
            lambda rngs: Block(rngs), layers, scan=scanned, rngs=rngs
        )
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(models.stack.run_layers(self.layers, self.first(x), remat=False))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class PlacedNet(Net):
    """A net with kernels cut over `tp`, and layers run by a method.

    Args:
      mesh: where it lies.
      cut: kernel -> the dim, counted from the last, that `tp` cuts.
    """

    def __init__(self, mesh, cut, scanned):
        super().__init__(layers=4, scanned=scanned)
        self.mesh = mesh
        for layer in [self.layers] if scanned else self.layers:
            for name, dim in cut.items():
                linear = getattr(layer, name)
                there = placements(mesh, {"tp": linear.kernel.ndim + dim})
                linear.kernel = mp.shard_tensor(linear.kernel, mesh, there)

    def __call__(self, x):
        x = self.first(x)
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                x = self.layer(layer, x)
        else:

            def step(layer, x):
                return self.layer(layer, x)

            x = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        return self.head(x)

    def layer(self, layer, x):
        raise NotImplementedError


def placements(mesh, cut):
    """`cut` maps an axis to the dim that it cuts."""
    return [mp.Shard(cut[a]) if a in cut else mp.Replicate() for a in mesh.dim_names]


def loss(y, t):
    return ((y - t) ** 2).mean()


def batch(rows=12):
    return [jax.random.normal(jax.random.key(k), (rows, 4)) for k in (0, 1)]


def losses(dm, rows=12, steps=3):
    x, y = batch(rows)
    dm.train()
    return [float(dm(x, y)) for _ in range(steps)]


def single(model, loss=loss, tx=None):
    with mp.ProcessMesh([0], ["dp"]):
        return mp.to_static(model, loss=loss, optimizer=tx or optax.adam(1e-2))


@functools.cache
def expected(make=Net):
    return losses(single(make()))


def piped(model, axes, loss=loss, tx=None, groups=None, partitioner="meshpar", **options):
    """`axes` is a mesh or what makes one; `groups` are more of a strategy's."""
    mesh = mp.ProcessMesh.create(axes) if isinstance(axes, dict) else axes
    pipeline = {"enable": True, "accumulate_steps": 3, **options}
    strategy = mp.Strategy({"pipeline": pipeline, **(groups or {})})
    tx = tx or optax.adam(1e-2)
    with mesh:
        return mp.to_static(model, strategy, loss=loss, optimizer=tx, partitioner=partitioner)
