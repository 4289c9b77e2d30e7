"""Steps of the reference models as pure functions, with the placements of their arguments.

The tests count their collectives at a small size, the benchmarks time them at a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar as mp
from meshpar.models import (
    GPT2,
    MLP,
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    GPT2Config,
    MLPConfig,
    ResNet,
    ResNetConfig,
    axes_for,
    cross_entropy,
    mean_embedding,
    rules_for,
)
from meshpar.placements.layout import Layout

MESHES = {
    "dp8": ["dp"],
    "tp8": ["tp"],
    "dp2tp4": ["dp", "tp"],
    "dp2tp2sp2": ["dp", "tp", "sp"],
}
SHAPES = {"dp8": (8,), "tp8": (8,), "dp2tp4": (2, 4), "dp2tp2sp2": (2, 2, 2)}


def mesh_named(name):
    shape = SHAPES[name]
    return mp.ProcessMesh(np.arange(8).reshape(shape), MESHES[name])


@dataclass(frozen=True)
class Step:
    """A step, structs of its arguments, and their layouts."""

    fn: object  # (params, opt, rest, batch) -> (params, opt, rest, loss)
    args: tuple
    layouts: tuple


@dataclass(frozen=True)
class Size:
    """How large the models and the batch are."""

    batch: int
    length: int
    vocabulary: int
    dim: int
    mlp_dims: tuple[int, ...]
    image: int
    width: int


SMALL = Size(16, 16, 64, 32, (16, 32, 32, 16), 8, 8)
LARGE = Size(32, 64, 512, 128, (256, 512, 512, 256), 16, 16)


def model_named(name, size=SMALL, *, scan=False):
    """A model of two layers; `scan` runs over them in a loop."""
    rngs = nnx.Rngs(0)
    shared = {
        "vocab_size": size.vocabulary, "num_layers": 2, "model_dim": size.dim, "num_heads": 8,
        "max_seq_len": size.length, "scan_layers": scan,
    }  # fmt: skip
    if name == "decoder":
        config = DecoderConfig(
            num_kv_heads=8, head_dim=size.dim // 8, hidden_dim=2 * size.dim, **shared
        )
        return Decoder(config, rngs=rngs)
    if name == "gpt2":
        return GPT2(GPT2Config(**shared), rngs=rngs)
    if name == "encoder":
        return Encoder(EncoderConfig(hidden_dim=2 * size.dim, **shared), rngs=rngs)
    if name == "mlp":
        return MLP(MLPConfig(dims=size.mlp_dims), rngs=rngs)
    return ResNet(ResNetConfig(stages=(1, 1), width=size.width), rngs=rngs)


def batch_for(name, size=SMALL):
    """Inputs and labels, drawn from a fixed seed."""
    rng = np.random.default_rng(0)
    if name == "mlp":
        x = rng.normal(size=(size.batch, size.mlp_dims[0])).astype(np.float32)
        return {"x": x, "y": rng.integers(0, size.mlp_dims[-1], size.batch).astype(np.int32)}
    if name == "resnet":
        x = rng.normal(size=(size.batch, size.image, size.image, 3)).astype(np.float32)
        return {"x": x, "y": rng.integers(0, 10, size.batch).astype(np.int32)}
    tokens = rng.integers(0, size.vocabulary, (size.batch, size.length)).astype(np.int32)
    return {"x": tokens, "y": np.roll(tokens, -1, 1)}


def loss_of(model, batch):
    """Cross entropy; the encoder tells which two sentences of the batch belong together."""
    if not isinstance(model, Encoder):
        return cross_entropy(model(batch["x"]), batch["y"])
    lhs, rhs = (
        mean_embedding(model(tokens, tokens > 3), tokens > 3) for tokens in (batch["x"], batch["y"])
    )
    return cross_entropy(lhs @ rhs.T, jnp.arange(lhs.shape[0]))


def forward(name, mesh, size=SMALL, *, scan=False):
    """The loss alone: (params, rest, batch) -> loss."""
    graph, *_ = nnx.split(model_named(name, size, scan=scan), nnx.Param, ...)
    step = train_step(name, mesh, size, scan=scan)

    def loss(params, rest, batch):
        return loss_of(nnx.merge(graph, params, rest, copy=True), batch)

    params, _, rest, batch = zip(step.args, step.layouts, strict=True)
    args, layouts = zip(params, rest, batch, strict=True)
    return Step(loss, args, layouts)


def train_step(name, mesh, size=SMALL, *, zero=0, scan=False):
    """The step of a model on a mesh, its state placed by the model's rules and a ZeRO stage.

    From stage 2 on the gradients are cut as the optimizer's state is.
    """
    model = model_named(name, size, scan=scan)
    model.train()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)
        value = loss_of(model, batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    def step(params, opt, rest, batch):
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        if zero >= 2:
            grads = jax.tree_util.tree_map_with_path(
                lambda path, x: mp.shard_tensor(x, mesh, zeroed[_path(path)].placements(mesh)),
                grads,
            )
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, rest, value

    opt = tx.init(params)
    batch = batch_for(name, size)
    rules = rules_for(model)
    by_path = {path: _layout(path, x, rules, mesh, scan=scan) for path, x in _paths(params).items()}
    zeroed = {p: _zero(by_path[p], x.shape, mesh) for p, x in _paths(params).items()}
    for_opt = zeroed if zero >= 1 else by_path
    layouts = (
        _like(params, by_path if zero < 3 else zeroed),
        _like(opt, for_opt),
        jax.tree.map(lambda x: Layout.replicated(x.ndim), rest),
        jax.tree.map(lambda x: _batch_layout(x, mesh), batch),
    )
    return Step(step, (params, opt, rest, batch), layouts)


def placed(step, mesh):
    """The step's arguments on the mesh."""
    return jax.tree.map(
        lambda x, layout: mp.shard_tensor(x, mesh, layout.placements(mesh)), step.args, step.layouts
    )


def result_placements(step, mesh):
    """The state comes back as it went in."""
    return (*jax.tree.map(lambda layout: layout.placements(mesh), step.layouts[:3]), [])


def _paths(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_path(path): x for path, x in flat}


def _path(path):
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    return ".".join(n for n in names if n != "value")


def _like(tree, by_path):
    """Leaves whose path ends in a parameter's path have its layout, the others are whole."""

    def of(path, x):
        name = _path(path)
        found = [p for p in by_path if name == p or name.endswith(f".{p}")]
        return by_path[max(found, key=len)] if found else Layout.replicated(x.ndim)

    return jax.tree_util.tree_map_with_path(of, tree)


def _layout(path, x, rules, mesh, *, scan):
    axes = axes_for(path, x.ndim, rules, scanned=scan)
    return Layout(tuple((a,) if a in mesh.axis_sizes else () for a in axes))


def _zero(layout, shape, mesh):
    if "dp" not in mesh.axis_sizes:
        return layout
    for dim, size in enumerate(shape):
        cut = np.prod([mesh.axis_sizes[a] for a in (*layout.dims[dim], "dp")])
        if size % cut == 0:
            return layout.with_dim(dim, (*layout.dims[dim], "dp"))
    return layout


def _batch_layout(x, mesh):
    dims = [("dp",) if "dp" in mesh.axis_sizes else ()] + [()] * (x.ndim - 1)
    if "sp" in mesh.axis_sizes and x.ndim == 2 and x.dtype == np.int32:
        dims[1] = ("sp",)
    return Layout(tuple(dims))
