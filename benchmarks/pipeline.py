"""Memory, program size and compile time of pipelines, and their time against the simulator's.

Memory is what XLA says of the compiled step (temporaries of a device), beside what the slots of
the table take. The time test's stages are chains of integer operations of set length, which share
two cores fairly where matmuls do not; a stage's F, I and W last as long as asked.

    python -m benchmarks.pipeline [--part memory|parameters|time]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import meshpar as mp
from meshpar import models, schedules
from meshpar.schedules.executors import step as steps

RANKS, ROWS, WIDTH, HIDDEN = 4, 1024, 256, 1024


def block(params, x):
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def square(y, target):
    return ((y - target) ** 2).mean()


def compiled_step(name, microbatches):
    """The compiled step, its seconds of compilation, and the bytes of the table's slots."""
    mesh = mp.ProcessMesh.create({"pp": RANKS})
    params = {
        "up": jax.ShapeDtypeStruct((RANKS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((RANKS, HIDDEN, WIDTH), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((microbatches, ROWS, WIDTH), jnp.float32)
    tables = []
    make = steps.slot_table

    def noted(*args):
        tables.append(make(*args))
        return tables[-1]

    def loss(params, x, target):
        return mp.pipeline(block, params, x, name, mesh, loss_fn=square, targets=target)

    steps.slot_table = noted
    try:
        lowered = jax.jit(jax.value_and_grad(loss)).lower(params, x, x)
    finally:
        steps.slot_table = make
    start = time.perf_counter()
    compiled = lowered.compile()
    return compiled, time.perf_counter() - start, tables[-1].bytes


def memory(console):
    columns = ("microbatches", "temporaries MB", "slots MB", "ratio", "HLO lines", "compile s")
    table = Table("schedule", *columns)
    for name in ("1F1B", "ZBH1", "FThenB"):
        for microbatches in (4, 8, 16, 32, 64):
            compiled, seconds, slots = compiled_step(name, microbatches)
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            table.add_row(
                name,
                str(microbatches),
                f"{temporaries / 1e6:.1f}",
                f"{slots / 1e6:.1f}",
                f"{temporaries / slots:.2f}",
                str(compiled.as_text().count("\n")),
                f"{seconds:.2f}",
            )
    console.print(table)


def parameters(console):
    """Bytes of a device's state under pp4, of the whole state on one device."""
    config = models.DecoderConfig(
        vocab_size=512,
        num_layers=8,
        model_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        hidden_dim=128,
        max_seq_len=32,
        scan_layers=True,
    )
    strategy = mp.Strategy({"pipeline": {"enable": True, "accumulate_steps": 4}})
    with mp.ProcessMesh.create({"pp": 4}):
        model = models.Decoder(config, rngs=nnx.Rngs(0))
        dm = mp.to_static(model, strategy, loss=models.cross_entropy, optimizer=optax.adamw(1e-3))
    state = dm.state_dict()
    for title, names in (
        ("block stack", [n for n in state if "layers." in n]),
        ("embedding and head", [n for n in state if "embed" in n or "head" in n]),
    ):
        whole = sum(state[n].nbytes for n in names)
        here = sum(state[n].addressable_shards[0].data.nbytes for n in names)
        console.print(f"{title}: {here} of {whole} bytes on a device, {here / whole:.3f}")


def chain(steps):
    """A function of a float array that takes as long as `steps` integer operations."""

    def run(x):
        seed = jax.lax.bitcast_convert_type(x, jnp.int32)
        seed = jax.lax.fori_loop(0, steps, lambda _, s: s * 1103515245 + 12345, seed)
        # The low bit never matters to the loss, but XLA cannot know.
        return x + (seed & 1).astype(jnp.float32) * 1e-30

    return run


def timed_stage(lengths):
    forward, for_input, for_weight = (chain(steps) for steps in lengths)

    @jax.custom_vjp
    def stage(params, x):
        return forward(x) * 0.5 + params

    def keep(params, x):
        return stage(params, x), x

    def back(x, gradient):
        return for_weight(x * gradient), for_input(gradient) * 0.5

    stage.defvjp(keep, back)
    return stage


def timing(console):
    """Two ranks: a step's time over the lockstep simulation's, and what a tick costs besides."""
    mesh = mp.ProcessMesh.create({"pp": 2})
    unit, microbatches, width = 300_000, 8, 256
    lengths = (unit, unit * 4 // 3, unit * 2 // 3)
    stage = timed_stage(lengths)
    x = jnp.ones((width,))
    seconds = [_best(jax.jit(chain(steps)), x) for steps in lengths]
    costs = schedules.Costs(
        F=round(seconds[0], 6),
        I=round(seconds[1], 6),
        W=round(seconds[2], 6),
        B=round(seconds[1] + seconds[2], 6),
    )
    params, batch = jnp.ones((2, width)), jnp.ones((microbatches, width))
    steps = {}
    for name in ("FThenB", "1F1B", "ZBH1", "auto"):

        def loss(params, name=name):
            return mp.pipeline(stage, params, batch, name, mesh, loss_fn=square, targets=batch)

        steps[name] = jax.jit(jax.grad(loss))
        jax.block_until_ready(steps[name](params))
    times = {name: [] for name in steps}
    for _ in range(10):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params))
            times[name].append(time.perf_counter() - start)
    table = Table("schedule", "step ms", "lockstep ms", "ratio", "asynchronous ms")
    for name, measured in times.items():
        made = schedules.auto(2, microbatches, 1) if name == "auto" else None
        schedule = made or schedules.generate(name, 2, microbatches)
        result = schedules.simulate(schedule, costs)
        median = statistics.median(measured)
        table.add_row(
            name,
            f"{median * 1e3:.1f}",
            f"{result.lockstep_makespan * 1e3:.1f}",
            f"{median / result.lockstep_makespan:.2f}",
            f"{result.makespan * 1e3:.1f}",
        )
    console.print(table)


def _best(fn, *args):
    jax.block_until_ready(fn(*args))
    out = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        out.append(time.perf_counter() - start)
    return min(out)


PARTS = {"memory": memory, "parameters": parameters, "time": timing}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="one part only")
    chosen = parser.parse_args().part
    mp.set_host_device_count(4)
    for part in [chosen] if chosen else PARTS:
        PARTS[part](Console(width=120))
