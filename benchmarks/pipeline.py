"""Memory, program size and compile time of pipelines, and their time against the simulator's.

Memory is what XLA says of the compiled step (temporaries of a device), beside what the slots of
the table take. The time test's stages are chains of integer operations of set length, which run on
two cores as fast as on one where matmuls do not; a stage's F, I and W last as long as asked.

With `--part tpu` memory is that of a slice of TPUs, by the TPU compiler, which needs no TPU but the
extra `tpu`.

    python -m benchmarks.pipeline [--part memory|parameters|compile|time|overhead|tpu]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import meshpar as mp
from benchmarks.timing import measure
from benchmarks.tpu_slice import tpu_slice
from meshpar import models, schedules
from meshpar.schedules.executors import step as steps

RANKS, ROWS, WIDTH, HIDDEN = 4, 1024, 256, 1024


def block(params, x):
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def square(y, target):
    return ((y - target) ** 2).mean()


def compiled_step(name, microbatches, scale=1):
    """The compiled step, its seconds of compilation, and the bytes of the table's slots.

    Args:
      name: the schedule.
      microbatches: their number.
      scale: how many times as long every dim of a stage is.
    """
    mesh = mp.ProcessMesh(list(range(RANKS)), ["pp"])
    rows, width, hidden = (n * scale for n in (ROWS, WIDTH, HIDDEN))

    def struct(spec, *shape):
        sharding = jax.NamedSharding(mesh.jax_mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    cut, whole = jax.P("pp"), jax.P()
    params = {
        "up": struct(cut, RANKS, width, hidden),
        "down": struct(cut, RANKS, hidden, width),
    }
    x = struct(whole, microbatches, rows, width)
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
    compiled: Any = lowered.compile()  # JAX's types say that its text and its memory may miss
    return compiled, time.perf_counter() - start, tables[-1].bytes


def memory(console, counts=(4, 8, 16, 32, 64), scale=1):
    columns = ("microbatches", "temporaries MB", "slots MB", "ratio", "HLO lines", "compile s")
    table = Table("schedule", *columns)
    for name in ("1F1B", "ZBH1", "FThenB"):
        for microbatches in counts:
            compiled, seconds, slots = compiled_step(name, microbatches, scale=scale)
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


def tpu(console):
    """The same by the TPU compiler, with stages too large for the memory on the chip."""
    with tpu_slice("v5e:2x2"):
        memory(console, (4, 8, 16, 32), scale=4)


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


def compiling(console):
    """Seconds to compile and lines of the compiled program, for 8 and for 64 microbatches."""
    table = Table("schedule", "compile s, M=8", "M=64", "ratio", "HLO lines, M=8", "M=64", "ratio")
    for name in ("1F1B", "ZBH1"):
        seconds, lines = {8: [], 64: []}, {}
        for turn in range(24):
            for microbatches in sorted(seconds, reverse=bool(turn % 2)):
                jax.clear_caches()
                compiled, once, _ = compiled_step(name, microbatches)
                seconds[microbatches].append(once)
                lines[microbatches] = compiled.as_text().count("\n")
        few, many = (statistics.median(taken) for taken in seconds.values())
        shown = (f"{few:.2f}", f"{many:.2f}", f"{many / few:.2f}")
        table.add_row(name, *shown, *map(str, lines.values()), f"{lines[64] / lines[8]:.2f}")
    console.print(table)


def chain(steps):
    """A function of a float array that takes as long as `steps` integer operations.

    They are of one number, each after the last: what vector units do in a time depends on the
    machine's other tenants.
    """

    def run(x):
        seed = jax.lax.bitcast_convert_type(x[:1], jnp.int32)
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


def on_both(program, inputs):
    """Seconds of a program that two devices run at the same time."""
    start = time.perf_counter()
    jax.block_until_ready([program(x) for x in inputs])
    return time.perf_counter() - start


def timing(console):
    """Two ranks, messages of 16 KB: the time of a step over that of the simulator's clocks.

    The clocks get the median times of the actions, measured between the steps.
    """
    mesh = mp.ProcessMesh.create({"pp": 2})
    unit, microbatches, width = 6_000_000, 8, 4096
    lengths = (unit, unit * 4 // 3, unit * 2 // 3)
    stage, rough = timed_stage(lengths), schedules.Costs(F=0.02, I=0.0267, W=0.0133, B=0.04)
    params, batch = jnp.ones((2, width)), jnp.ones((microbatches, width))
    tables = {n: schedules.generate(n, 2, microbatches) for n in ("FThenB", "1F1B", "ZBH1")}
    tables["auto"] = schedules.auto(2, microbatches, 1, costs=rough)
    runs = {}
    for name, table in tables.items():

        def loss(params, executor, table=table):
            more = {"loss_fn": square, "targets": batch, "executor": executor}
            return mp.pipeline(stage, params, batch, table, mesh, **more)

        runs[name, "program"] = jax.jit(jax.grad(partial(loss, executor="program")))
        runs[name, "mpmd"] = jax.grad(partial(loss, executor="mpmd"))
    actions = [jax.jit(chain(steps)) for steps in lengths]
    inputs = [jax.device_put(jnp.ones((width,)), device) for device in jax.devices()[:2]]
    times, seconds = {which: [] for which in runs}, [[] for _ in actions]
    for turn in range(11):
        for program, taken in zip(actions, seconds, strict=True):
            taken.append(on_both(program, inputs))
        for which, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(params))
            times[which].append(time.perf_counter() - start)
        if not turn:  # that compiled
            times, seconds = {which: [] for which in runs}, [[] for _ in actions]
    F, I, W = (round(statistics.median(taken), 6) for taken in seconds)  # noqa: E741
    costs = schedules.Costs(F=F, I=I, W=W, B=I + W)
    console.print(f"F, I, W: {F * 1e3:.1f}, {I * 1e3:.1f}, {W * 1e3:.1f} ms")
    table = Table("schedule", "executor", "step ms", "clock ms", "ratio", "over 1F1B")
    for (name, executor), measured in times.items():
        median = statistics.median(measured)
        result = schedules.simulate(tables[name], costs)
        clock = result.lockstep_makespan if executor == "program" else result.makespan
        table.add_row(
            name,
            executor,
            f"{median * 1e3:.1f}",
            f"{clock * 1e3:.1f}",
            f"{median / clock:.3f}",
            f"{median / statistics.median(times['1F1B', executor]):.3f}",
        )
    console.print(table)


def overhead(console):
    """What a tick of `program` and an action of `mpmd` take where stages do next to nothing."""
    table = Table("ranks", "message KB", "program us a tick", "mpmd us an action")
    for ranks, width in ((2, 4096), (2, 262_144), (4, 4096)):
        mesh = mp.ProcessMesh.create({"pp": ranks})
        steps = {"program": [], "mpmd": []}
        for microbatches in (16, 64):
            params, batch = jnp.ones((ranks, width)), jnp.ones((microbatches, width))

            def loss(params, executor, batch=batch, mesh=mesh):
                more = {"loss_fn": square, "targets": batch, "executor": executor}
                return mp.pipeline(lambda w, x: x * w, params, batch, "1F1B", mesh, **more)

            program = jax.jit(jax.grad(partial(loss, executor="program")))
            mpmd = jax.grad(partial(loss, executor="mpmd"))
            medians = measure([partial(program, params), partial(mpmd, params)], 10)
            run = schedules.generate("1F1B", ranks, microbatches).uncombined()
            actions = sum(map(len, run.orders))
            for taken, median, count in zip(
                steps.values(), medians, (run.ticks, actions), strict=True
            ):
                taken.append((median, count))
        # Per tick or action is what 48 more microbatches take; the rest is once a step.
        each = {
            name: (many[0] - few[0]) / (many[1] - few[1]) for name, (few, many) in steps.items()
        }
        table.add_row(
            str(ranks),
            str(width * 4 // 1024),
            f"{each['program'] * 1e6:.0f}",
            f"{each['mpmd'] * 1e6:.0f}",
        )
    console.print(table)


PARTS = {
    "memory": memory,
    "parameters": parameters,
    "compile": compiling,
    "time": timing,
    "overhead": overhead,
    "tpu": tpu,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="one part only")
    chosen = parser.parse_args().part
    mp.set_host_device_count(4)
    for part in [chosen] if chosen else [part for part in PARTS if part != "tpu"]:
        PARTS[part](Console(width=120))
