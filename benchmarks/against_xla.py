"""meshpar's partitioner against XLA's on the steps of the reference models.

Both partition the same function (the loss alone, or a whole train step), with the same placements
of parameters, optimizer state and batch, and run in turns in one process. Bytes are what each
device sends, read from the lowered module for meshpar (what it asks for) and from the compiled one
for XLA (what it chose). Memory is that of the compiled program, layers scanned where a model has
them: arguments + temporaries + outputs - what they share.

    python -m benchmarks.against_xla [--steps 20] [--models decoder gpt2] [--layouts dp8 zero1]
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
from rich.console import Console
from rich.table import Table

import meshpar as mp
from benchmarks.model_steps import LARGE, forward, mesh_named, placed, result_placements, train_step
from benchmarks.timing import ratio, rounds
from meshpar.compiler.hlo import collectives_in_hlo, collectives_in_stablehlo, sent_bytes

MODELS = ("decoder", "gpt2", "encoder", "mlp", "resnet")
LAYERED = ("decoder", "gpt2", "encoder")
LAYOUTS = {  # name -> mesh, ZeRO stage
    "dp8": ("dp8", 0),
    "tp8": ("tp8", 0),
    "dp2 x tp4": ("dp2tp4", 0),
    "dp2 x tp2 x sp2": ("dp2tp2sp2", 0),
    "zero1": ("dp8", 1),
    "zero2": ("dp8", 2),
    "zero3": ("dp8", 3),
}
PARTITIONERS = ("meshpar", "xla")


class Program:
    """One step under one partitioner, with its state."""

    def __init__(self, name, layout, what, partitioner, *, scan):
        where, zero = LAYOUTS[layout]
        mesh = mesh_named(where)
        if what == "forward":
            step = forward(name, mesh, LARGE, scan=scan)
            self.fn = mp.jit(step.fn, out_placements=[], partitioner=partitioner)
        else:
            step = train_step(name, mesh, LARGE, zero=zero, scan=scan)
            self.fn = mp.jit(
                step.fn,
                out_placements=result_placements(step, mesh),
                donate_argnums=(0, 1, 2),
                partitioner=partitioner,
            )
        self.trains = what == "train"
        self.args = placed(step, mesh)

    def __call__(self):
        """One step on what the last one left; returns the loss."""
        out = self.fn(*self.args)
        if not self.trains:
            return out
        *state, loss = out
        self.args = (*state, self.args[-1])
        return loss

    def compiled(self):
        return self.fn.lower(*self.args).compile()


def sent(found):
    return sum(sent_bytes(kind, one, 8) for kind, several in found.items() for one in several)


def held(compiled):
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def compare(name, layout, what, steps):
    """Bytes, memory and (with `steps`) times of both."""
    made = [partial(Program, name, layout, what, p) for p in PARTITIONERS]
    ours, theirs = (make(scan=False) for make in made)
    planned = ours.fn.plan(*ours.args).bytes
    lowered = sent(collectives_in_stablehlo(ours.fn.lower(*ours.args).as_text()))
    assert planned == lowered, f"the plan says {planned}, the module {lowered}"
    compiled = theirs.compiled()
    bytes_sent = planned, sent(collectives_in_hlo(compiled.as_text()))
    if name in LAYERED:
        memory = [held(make(scan=True).compiled()) for make in made]
    else:
        memory = [held(ours.compiled()), held(compiled)]
    return bytes_sent, memory, rounds([ours, theirs], steps) if steps else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="0: bytes and memory only")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--what", nargs="+", default=["train", "forward"])
    args = parser.parse_args()
    mp.set_host_device_count(8)
    table = Table(title=f"jax {jax.__version__}, 8 {jax.devices()[0].platform} devices")
    for column in (
        "model", "layout", "step", "meshpar [ms]", "XLA [ms]", "time", "noise", "meshpar sends",
        "XLA sends", "bytes", "memory",
    ):  # fmt: skip
        left = column in ("model", "layout", "step")
        table.add_column(column, justify="left" if left else "right")
    cases = [
        (name, layout, what)
        for name in args.models
        for layout in args.layouts
        for what in args.what
        if what == "train" or not LAYOUTS[layout][1]
    ]
    console = Console(width=140)
    for number, case in enumerate(cases, 1):
        (ours, theirs), memory, times = compare(*case, args.steps)
        figures = ["", "", "", ""]
        if times:
            each = [f"{sorted(t)[len(t) // 2] * 1e3:.1f}" for t in times]
            middle, noise = ratio(*times)
            figures = [*each, f"{middle:.2f}", f"{noise:.2f}"]
        less = f"{ours / theirs:.2f}" if theirs else "1.00" if not ours else "inf"
        row = (*case, *figures, f"{ours:,}", f"{theirs:,}", less, f"{memory[0] / memory[1]:.2f}")
        console.log(f"{number}/{len(cases)}", *row)
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
