"""Time of a training step: `mp.to_static` against a hand-written `jax.jit` with equal shardings.

Both run in this process on the same devices, step by step in turns, and the order changes every
round, so that a busy machine hits both alike; the figures are medians over all steps. Their ratio
says what `to_static` costs on top: nothing, it should be.

    python -m benchmarks.step_time [--steps 60] [--partitioner xla]
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import meshpar as mp
from benchmarks.timing import measure
from meshpar.models import Decoder, DecoderConfig, axes_for, cross_entropy, rules_for

MESHES = {
    "dp8": {"dp": 8},
    "tp4 x dp2": {"dp": 2, "tp": 4},
    "fsdp8": {"fsdp": 8},
}
CONFIG = DecoderConfig(
    vocab_size=512,
    num_layers=2,
    model_dim=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    hidden_dim=256,
    max_seq_len=64,
)
BATCH = 32


def specs_of(params, mesh):
    """The `PartitionSpec` of each parameter, by the rules of `meshpar.models`."""
    rules = rules_for(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    specs = []
    for path, leaf in paths:
        keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        name = ".".join(str(key) for key in keys if key is not None)
        axes = axes_for(name, leaf.ndim, rules, scanned=False)
        specs.append(PartitionSpec(*(axis if axis in mesh.shape else None for axis in axes)))
    return jax.tree.unflatten(treedef, specs)


def by_hand(mesh, tx, data):
    """A step as one writes it with jax.jit: `() -> loss`."""
    graph, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(params, mesh))
    params = jax.device_put(params, shardings)
    opt_shardings = optax.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, params),
        shardings,
        transform_non_params=lambda _: whole,
    )
    opt = jax.jit(tx.init, out_shardings=opt_shardings)(params)

    def step(params, opt, x, y):
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(nnx.merge(graph, p)(x), y))(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    jitted = jax.jit(
        step,
        in_shardings=(shardings, opt_shardings, data[0].sharding, data[1].sharding),
        out_shardings=(shardings, opt_shardings, whole),
        donate_argnums=(0, 1),
    )
    state = [params, opt]

    def run():
        state[0], state[1], loss = jitted(*state, *data)
        return loss

    return run


def by_to_static(mesh, tx, data, partitioner):
    """The same step by `mp.to_static`: `() -> loss`."""
    home = mp.ProcessMesh.from_jax(mesh)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)

    def placed(x, spec):
        axes = [*spec, *[None] * (x.ndim - len(spec))]
        cuts = [mp.Shard(axes.index(n)) if n in axes else mp.Replicate() for n in home.dim_names]
        return mp.shard_tensor(x, home, cuts)

    nnx.update(model, jax.tree.map(placed, params, specs_of(params, mesh)))
    dm = mp.to_static(model, loss=cross_entropy, optimizer=tx, partitioner=partitioner)
    dm.train()
    return lambda: dm(*data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--partitioner", choices=("meshpar", "xla"), default="meshpar")
    args = parser.parse_args()
    mp.set_host_device_count(8)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    table = Table(title=f"jax {jax.__version__}, 8 {jax.devices()[0].platform} devices")
    for column in ("mesh", "by hand [ms]", "to_static [ms]", "ratio", "losses differ by"):
        table.add_column(column, justify="left" if column == "mesh" else "right")
    for name, axes in MESHES.items():
        mesh = jax.make_mesh(
            tuple(axes.values()),
            tuple(axes),
            axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        )
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, CONFIG.vocab_size, (2, BATCH, CONFIG.max_seq_len), np.int32)
        cut = NamedSharding(mesh, PartitionSpec(next(a for a in axes if a != "tp")))
        data = [jax.device_put(jnp.asarray(x), cut) for x in tokens]
        runs = [by_hand(mesh, tx, data), by_to_static(mesh, tx, data, args.partitioner)]
        hand, ours = measure(runs, args.steps)
        differ = abs(float(runs[0]()) / float(runs[1]()) - 1)
        table.add_row(
            name, f"{hand * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{ours / hand:.3f}", f"{differ:.1e}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
