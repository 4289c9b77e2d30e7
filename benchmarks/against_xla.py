"""meshpar's partitioner against XLA's on the training steps of the reference models.

Both partition the same step, with the same placements of parameters, optimizer state and batch, and
run in turns in one process. Bytes are what each device sends, read from the lowered module for
meshpar (what it asks for) and from the compiled one for XLA (what it chose); memory is that of the
compiled program: arguments + temporaries + outputs - what they share.

    python -m benchmarks.against_xla [--steps 20] [--models decoder gpt2] [--layouts dp8 zero1]
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import meshpar as mp
from benchmarks.timing import measure
from meshpar.compiler.hlo import collectives_in_hlo, collectives_in_stablehlo, sent_bytes
from meshpar.models import (
    GPT2,
    MLP,
    Decoder,
    DecoderConfig,
    GPT2Config,
    MLPConfig,
    ResNet,
    ResNetConfig,
    axes_for,
    cross_entropy,
    rules_for,
)

LAYOUTS = {  # name -> mesh axes, ZeRO stage
    "dp8": ({"dp": 8}, 0),
    "tp8": ({"tp": 8}, 0),
    "dp2 x tp4": ({"dp": 2, "tp": 4}, 0),
    "zero1": ({"dp": 8}, 1),
    "zero2": ({"dp": 8}, 2),
    "zero3": ({"dp": 8}, 3),
}
BATCH, LENGTH, VOCABULARY = 32, 64, 512


def build(name, scan):
    rngs = nnx.Rngs(0)
    if name == "decoder":
        config = DecoderConfig(
            vocab_size=VOCABULARY, num_layers=2, model_dim=128, num_heads=8, num_kv_heads=8,
            head_dim=16, hidden_dim=256, max_seq_len=LENGTH, scan_layers=scan,
        )  # fmt: skip
        return Decoder(config, rngs=rngs), scan
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, num_layers=2, model_dim=128, num_heads=8, max_seq_len=LENGTH,
            scan_layers=scan,
        )  # fmt: skip
        return GPT2(config, rngs=rngs), scan
    if name == "mlp":
        return MLP(MLPConfig(dims=(256, 512, 512, 256)), rngs=rngs), False
    return ResNet(ResNetConfig(stages=(1, 1), width=16), rngs=rngs), False


def batch_for(name):
    rng = np.random.default_rng(0)
    if name in ("decoder", "gpt2"):
        return tuple(rng.integers(0, VOCABULARY, (2, BATCH, LENGTH), np.int32))
    shape = (BATCH, 256) if name == "mlp" else (BATCH, 16, 16, 3)
    return rng.normal(size=shape).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32)


def trainer(name, axes, stage, partitioner, scan):
    model, scanned = build(name, scan)
    mesh = mp.ProcessMesh(np.arange(8).reshape(tuple(axes.values())), list(axes))
    rules = rules_for(model)
    params = nnx.state(model, nnx.Param)

    def place(path, x):
        keys = [getattr(k, "key", getattr(k, "idx", None)) for k in path]
        dotted = ".".join(str(k) for k in keys if k is not None)
        cut = axes_for(dotted, x.ndim, rules, scanned=scanned)
        return mp.shard_tensor(
            x, mesh, [mp.Shard(cut.index(n)) if n in cut else mp.Replicate() for n in axes]
        )

    nnx.update(model, jax.tree_util.tree_map_with_path(place, params))
    strategy = mp.Strategy({"data_axes": ("dp",) if "dp" in axes else ()})
    if stage:
        strategy.sharding.enable, strategy.sharding.stage = True, stage
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    dm = mp.to_static(model, strategy, loss=cross_entropy, optimizer=tx, partitioner=partitioner)
    dm.train()
    return dm


def sent(found):
    return sum(sent_bytes(kind, one, 8) for kind, several in found.items() for one in several)


def held(dm):
    memory = dm.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def compare(name, layout, steps, scan):
    axes, stage = LAYOUTS[layout]
    batch = batch_for(name)
    both = [trainer(name, axes, stage, p, scan) for p in ("meshpar", "xla")]
    placed = [dm.place_batch(*batch) for dm in both]
    runs = [lambda dm=dm, data=data: dm(*data) for dm, data in zip(both, placed, strict=True)]
    times = measure(runs, steps)
    ours = both[0].plan().bytes
    lowered = sent(collectives_in_stablehlo(both[0].lower().as_text()))
    theirs = sent(collectives_in_hlo(both[1].compiled_text()))
    return times, (ours, lowered, theirs), [held(dm) for dm in both]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=["decoder", "gpt2", "mlp", "resnet"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--scan", action="store_true", help="scan over layers, for memory")
    args = parser.parse_args()
    mp.set_host_device_count(8)
    table = Table(title=f"jax {jax.__version__}, 8 {jax.devices()[0].platform} devices")
    for column in (
        "model", "layout", "meshpar [ms]", "XLA [ms]", "time", "meshpar sends", "XLA sends",
        "bytes", "memory",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("model", "layout") else "right")
    for name in args.models:
        for layout in args.layouts:
            times, (ours, lowered, theirs), memory = compare(name, layout, args.steps, args.scan)
            assert ours == lowered or args.scan, f"the plan says {ours}, the module {lowered}"
            table.add_row(
                name, layout, f"{times[0] * 1e3:.1f}", f"{times[1] * 1e3:.1f}",
                f"{times[0] / times[1]:.2f}", f"{ours:,}", f"{theirs:,}",
                f"{ours / max(theirs, 1):.2f}", f"{memory[0] / memory[1]:.2f}",
            )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
