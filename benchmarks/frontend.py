"""Time that meshpar itself takes: planning against tracing, and a call against `jax.jit`'s.

    python -m benchmarks.frontend [--layers 10 20 40 80] [--arrays 100]

Planning: a train step of a decoder with unrolled layers, on a mesh of 4,096 devices that are not
there. "JAX" traces and lowers the function; "meshpar" propagates layouts, plans and partitions it,
which is what `mp.jit` does on top. Each figure is the least of a few runs in turns, in one process.

Dispatch: a jitted function of many small arrays that hardly computes, called again.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import meshpar as mp
from meshpar.compiler.decide import Decider
from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.lower import shard_mapped
from meshpar.compiler.plan import Plan
from meshpar.compiler.program import program_of
from meshpar.compiler.propagate import propagate
from meshpar.models import Decoder, DecoderConfig, axes_for, cross_entropy, rules_for
from meshpar.placements.blocks import storage_shape
from meshpar.placements.layout import Layout

BATCH, LENGTH = 1024, 128


def train_step(layers):
    """A step as a pure function of abstract arrays, and the layouts of its arguments."""
    config = DecoderConfig(
        vocab_size=512, num_layers=layers, model_dim=256, num_heads=16, num_kv_heads=16,
        head_dim=16, hidden_dim=512, max_seq_len=LENGTH, scan_layers=False,
    )  # fmt: skip
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    rules = rules_for(model)

    def layout(path, x):
        keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in path]
        dotted = ".".join(str(k) for k in keys if k is not None)
        axes = axes_for(dotted, x.ndim, rules, scanned=False)
        return Layout(tuple((axis,) if axis in ("dp", "tp") else () for axis in axes))

    def step(params, opt, x, y):
        def loss(params):
            return cross_entropy(nnx.merge(graph, params)(x), y)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value

    opt = jax.eval_shape(tx.init, params)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)
    args = (params, opt, tokens, tokens)
    batch = Layout((("dp",), ()))
    at = jax.tree_util.tree_map_with_path
    return step, args, (at(layout, params), at(layout, opt), batch, batch)


def seconds(run):
    start = time.perf_counter()
    out = run()
    return time.perf_counter() - start, out


def planning(layers, rounds):
    """Equations, seconds of JAX's trace and lowering, and of meshpar's passes, one by one."""
    step, args, layouts = train_step(layers)
    mesh = mp.ProcessMesh(np.arange(4096).reshape(256, 16), ["dp", "tp"])
    known = jax.tree.leaves(layouts, is_leaf=lambda x: isinstance(x, Layout))
    model, best = DeviceModel(), {}

    def note(name, took):
        best[name] = min(best.get(name, took), took)

    for _ in range(rounds):
        jax.clear_caches()
        took, traced = seconds(lambda: jax.jit(step).trace(*args))
        note("trace", took)
        note("lower", seconds(lambda: traced.lower(lowering_platforms=("tpu",)))[0])  # noqa: B023
        jaxpr = traced.jaxpr
        took, program = seconds(lambda: program_of(jaxpr))  # noqa: B023
        note("read", took)
        wanted = [*known[: len(known) - 2], None]
        took, planned = seconds(
            lambda: propagate(program, known, wanted, Decider(mesh.axis_sizes, model))  # noqa: B023
        )
        note("propagate", took)
        names = tuple(map(str, range(len(known))))
        note("plan", seconds(lambda: Plan(planned, mesh, names, model).bytes)[0])  # noqa: B023
        storages = [
            jax.ShapeDtypeStruct(storage_shape(s.shape, layout, mesh.axis_sizes), s.dtype)
            for s, layout in zip(jax.tree.leaves(args), known, strict=True)
        ]
        program = jax.jit(shard_mapped(planned, mesh))
        note("partition", seconds(lambda: program.trace(*storages))[0])  # noqa: B023
    return len(jaxpr.eqns), best


def dispatch(arrays, calls):
    """Microseconds of a call of `jax.jit` and of `mp.jit` on equal arguments."""
    mesh = mp.ProcessMesh(np.arange(8), ["dp"])
    tree = {
        f"layer{i}": {"w": mp.shard_tensor(np.ones((8, 2), np.float32), mesh, [mp.Shard(0)])}
        for i in range(arrays)
    }

    def touch(tree):
        return jax.tree.map(lambda x: x + 1, tree)

    times = {"jax": [], "meshpar": []}
    runs = {"jax": jax.jit(touch), "meshpar": mp.jit(touch)}
    for run in runs.values():
        jax.block_until_ready(run(tree))
    for _ in range(calls):
        for name, run in runs.items():
            start = time.perf_counter()
            out = run(tree)
            times[name].append(time.perf_counter() - start)
            jax.block_until_ready(out)
    return {name: float(np.median(each)) * 1e6 for name, each in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80])
    parser.add_argument("--arrays", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    mp.set_host_device_count(8)
    table = Table(title="planning a train step for 4,096 devices, seconds")
    parts = ("trace", "lower", "read", "propagate", "plan", "partition")
    for column in ("layers", "equations", *parts, "meshpar / JAX"):
        table.add_column(column, justify="right")
    for layers in args.layers:
        equations, best = planning(layers, args.rounds)
        ours = sum(best[part] for part in parts[2:])
        theirs = best["trace"] + best["lower"]
        table.add_row(
            str(layers), f"{equations:,}", *(f"{best[part]:.2f}" for part in parts),
            f"{ours / theirs:.2f}",
        )  # fmt: skip
    Console(width=130).print(table)
    table = Table(title="a call, microseconds")
    for column in ("arrays", "jax.jit", "mp.jit", "more"):
        table.add_column(column, justify="right")
    for arrays in args.arrays:
        took = dispatch(arrays, 500)
        more = took["meshpar"] - took["jax"]
        row = (took["jax"], took["meshpar"], more)
        table.add_row(str(arrays), *(f"{each:.0f}" for each in row))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
