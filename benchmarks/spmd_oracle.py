"""meshpar's inference against the answers of PaddlePaddle 3.3.1's SPMD rules, case by case.

    python -m benchmarks.spmd_oracle [FILE] [--sample N] [--show CLASS]

FILE holds one JSON record a line, as `tests/data/spmd_rules.jsonl.gz` does. An answer costs the
bytes per device from the given to the answered placements of the inputs, plus an all-reduce of each
pending axis of the results; one of the reverse direction those from the result under the answered
inputs to the given placement of the result. What is as cheap and has smaller blocks is better.
Every answer of ours is replayed on blocks.

Classes: `equal` answers the same; `better` is cheaper or smaller; `even` differs at the same cost
and size; `worse`; `sound` where Paddle raised or answers wrongly, and ours is right; `unsound`;
`unsupported`. The exit status is 1 below 97 % of equal, better and even, or if one is unsound.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import meshpar as mp
from benchmarks.spmd_replay import Mesh, flat, replay

DATA = Path(__file__).parent.parent / "tests" / "data" / "spmd_rules.jsonl.gz"
CLASSES = ("equal", "better", "even", "worse", "sound", "unsound", "unsupported")
GOOD = ("equal", "better", "even", "sound")
AXES = "abcdefgh"


@dataclass(frozen=True)
class Verdict:
    """The class of a record, whether it counts for the score, and a remark."""

    name: str
    counts: bool
    remark: str = ""


def mapped(fn, tree):
    """`fn` on the leaves of nested lists."""
    return [mapped(fn, x) for x in tree] if isinstance(tree, list) else fn(tree)


class Judge:
    """Judges records; equal replays are run once."""

    def __init__(self):
        self.replays = {}
        self.meshes = {}

    def mesh(self, shape):
        """The mesh of a record."""
        key = tuple(shape)
        if key not in self.meshes:
            ranks = np.arange(math.prod(key)).reshape(key)
            self.meshes[key] = mp.ProcessMesh(ranks, list(AXES[: len(key)]))
        return self.meshes[key]

    def judge(self, record):
        """The verdict on one record."""
        counts = record["direction"] == "backward" or record.get("replay") == "ok"
        case = Case(record, self.mesh(record["mesh_shape"]))
        try:
            ours = case.ask()
        except NotImplementedError as error:
            return Verdict("unsupported", counts, str(error)[:100])
        wrong = self.replayed(case, ours)
        if wrong not in ("", "skipped"):
            return Verdict("unsound", counts, wrong)
        theirs = case.paddle()
        if theirs is None:
            return Verdict("sound", counts, case.why)
        return Verdict(case.compared(ours, theirs), counts, case.why)

    def replayed(self, case, ours):
        """Why an answer is wrong, or "" or "skipped"."""
        key = (
            case.name,
            case.mesh,
            repr(case.shapes),
            repr(case.attrs),
            repr(ours.inputs),
            ours.outputs,
        )
        if key not in self.replays:
            self.replays[key] = replay(
                mp.infer_reference(case.name),
                case.shapes,
                case.attrs,
                ours.inputs,
                ours.outputs,
                Mesh(case.mesh.axis_sizes),
            )
        return self.replays[key]


class Case:
    """A record as a question to meshpar."""

    def __init__(self, record, mesh):
        self.record, self.mesh, self.why = record, mesh, ""
        self.name = record["rule"].removeprefix("pd_op.")
        self.attrs = {
            _SAME.get(k, k): tuple(v) if isinstance(v, list) else v
            for k, v in record["attrs"].items()
        }
        self.specs = mapped(self.spec, record["inputs"])
        self.reverse = record["direction"] == "backward"
        self.wanted = mapped(self.spec, record.get("outputs_given", []))
        self.shapes = mapped(lambda spec: spec.shape, self.specs)
        if self.reverse and mp.infer_reference(self.name).templates:
            self.shapes = [*self.shapes, mapped(lambda spec: spec.shape, flat(self.wanted))]

    def spec(self, entry):
        """A tensor of a record."""
        return mp.TensorSpec(tuple(entry["shape"]), self.layout(entry))

    def layout(self, entry):
        """The placement of a tensor of a record."""
        return mp.Layout.from_dims_mapping(
            entry["dims_mapping"], self.mesh, entry.get("partial", ()), entry.get("reduce", ())
        )

    def ask(self):
        """meshpar's answer."""
        if self.reverse:
            return mp.infer_backward(
                self.name, self.specs, self.wanted, mesh=self.mesh, **self.record["attrs"]
            )
        return mp.infer_forward(self.name, self.specs, mesh=self.mesh, **self.record["attrs"])

    def paddle(self):
        """Paddle's answer as layouts of inputs and results, or `None` where it is none."""
        if "error" in self.record:
            self.why = "raised"
            return None
        if self.record.get("replay") == "wrong":
            self.why = self.record.get("replay_note", "wrong")
            return None
        result = self.record["result"]
        try:
            inputs = [self.layout(entry) for entry in flat(result["inputs"])]
            outputs = [None if e is None else self.layout(e) for e in flat(result["outputs"])]
        except mp.PlacementError:
            self.why = "an axis twice"
            return None
        for spec, layout in zip(flat(self.specs), inputs, strict=False):
            if len(spec.shape) != layout.ndim and spec.shape not in ((), (0,)):
                self.why = "another rank"
                return None
        return inputs, outputs

    def compared(self, ours, theirs):
        """The class of our answer beside Paddle's."""
        mine = flat(ours.inputs), list(ours.outputs)
        shapes = [spec.shape for spec in flat(self.specs)][: len(mine[0])]
        absent = ((0,), ()) if mp.infer_reference(self.name).optional else ()
        present = [
            i
            for i, shape in enumerate(shapes)
            if shape not in absent and mine[0][i].ndim == theirs[0][i].ndim
        ]
        out = [
            (a, b)
            for a, b in zip(mine[1], theirs[1], strict=False)
            if a is not None and b is not None and a.ndim == b.ndim
        ]
        # Backward the inputs are the answer: Paddle mostly repeats the outputs that are wanted.
        if all(mine[0][i] == theirs[0][i] for i in present) and (
            self.reverse or all(a == b for a, b in out)
        ):
            return "equal"
        theirs = [[theirs[0][i] if i in present else m for i, m in enumerate(mine[0])], theirs[1]]
        price = self.reverse_price if self.reverse else self.forward_price
        cheap, dear = price(mine, shapes, ours), price(theirs, shapes, ours)
        self.why = f"{cheap} / {dear}"
        if abs(cheap[0] - dear[0]) > 0.01:
            return "better" if cheap[0] < dear[0] else "worse"
        return "even" if cheap[1] == dear[1] else "better" if cheap[1] < dear[1] else "worse"

    def forward_price(self, answer, shapes, ours):
        """Bytes of an answer, and the elements of its blocks."""
        given = [spec.layout for spec in flat(self.specs)]
        price = sum(
            self.moved(src, dst, shape)
            for src, dst, shape in zip(given, answer[0], shapes, strict=False)
            if src.ndim == dst.ndim
        )
        size = sum(
            self.block(shape, layout) for shape, layout in zip(shapes, answer[0], strict=True)
        )
        for shape, layout in zip(ours.output_shapes, answer[1], strict=False):
            if shape is None or layout is None or layout.ndim != len(shape):
                continue
            block = 4 * self.block(shape, layout)
            sizes = self.mesh.axis_sizes
            price += sum(2 * block * (sizes[a] - 1) / sizes[a] for a in layout.partial_axes)
            size += block // 4
        return round(price, 3), size

    def reverse_price(self, answer, shapes, ours):
        """Bytes from what comes of the answered inputs to what is wanted, and input elements."""
        it = iter(answer[0])
        specs = mapped(lambda spec: mp.TensorSpec(spec.shape, next(it)), self.specs)
        if mp.infer_reference(self.name).templates:
            specs = [*specs, flat(self.wanted)]
        made = mp.infer_forward(self.name, specs, mesh=self.mesh, **self.record["attrs"])
        price = sum(
            self.moved(src, dst, shape)
            for src, dst, shape in zip(answer[0], flat(made.inputs), shapes, strict=False)
            if src.ndim == dst.ndim
        )
        price += sum(
            self.moved(src, spec.layout, shape)
            for src, spec, shape in zip(
                made.outputs, flat(self.wanted), made.output_shapes, strict=False
            )
            if src is not None and src.ndim == spec.layout.ndim
        )
        size = sum(
            self.block(shape, layout) for shape, layout in zip(shapes, answer[0], strict=True)
        )
        return round(price, 3), size

    def moved(self, src, dst, shape):
        """Bytes per device from one placement to another; all reductions cost alike."""
        if src == dst:
            return 0
        return sum(
            step.bytes
            for step in mp.reshard_steps(*map(summed, (src, dst)), shape, "f4", self.mesh)
        )

    def block(self, shape, layout):
        """The elements of a block."""
        sizes = self.mesh.axis_sizes
        return math.prod(
            -(-size // math.prod(sizes[a] for a in axes))
            for size, axes in zip(shape, layout.dims, strict=True)
        )


_SAME = {
    "keepdim": "keep_dim",
    "keepdims": "keep_dim",
    "transpose_x": "trans_x",
    "transpose_y": "trans_y",
}


def summed(layout):
    """Every pending reduction as a sum."""
    return mp.Layout(
        layout.dims, tuple((axis, mp.ReduceType.kRedSum) for axis, _ in layout.partial)
    )


def records_of(path):
    """The records of a file, packed or not."""
    data = Path(path).read_bytes()
    text = gzip.decompress(data) if str(path).endswith(".gz") else data
    return [json.loads(line) for line in text.decode().splitlines() if line.strip()]


def scored(records, show=""):
    """Counts per operation and class: of the score, beside it, and gradients left out."""
    judge = Judge()
    inside, beside = (
        collections.defaultdict(collections.Counter),
        collections.defaultdict(collections.Counter),
    )
    grads = 0
    for record in records:
        if record.get("backward_is") == "grad":
            grads += 1
            continue
        verdict = judge.judge(record)
        (inside if verdict.counts else beside)[record["rule"]][verdict.name] += 1
        if show and verdict.name in show.split(","):
            print(verdict.name, verdict.counts, verdict.remark, json.dumps(record))
    return inside, beside, grads


def share(counts):
    """The share of good answers."""
    total = sum(counts.values())
    return sum(counts[name] for name in GOOD) / total if total else 1.0


def main(argv=None):
    """Prints a line per operation; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=DATA)
    parser.add_argument("--every", type=int, default=1, help="take every n-th record only")
    parser.add_argument("--rules", default="", help="only these, separated by commas")
    parser.add_argument("--show", default="", help="print the records of these classes")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    records = records_of(options.file)[:: options.every]
    if options.rules:
        records = [r for r in records if r["rule"] in options.rules.split(",")]
    inside, beside, grads = scored(records, options.show)
    total, rest = collections.Counter(), collections.Counter()
    print(f"{'operation':44s}" + "".join(f"{name:>12s}" for name in CLASSES))
    for rule in sorted({*inside, *beside}):
        total.update(inside[rule])
        rest.update(beside[rule])
        both = inside[rule] + beside[rule]
        print(f"{rule:44s}" + "".join(f"{both[name]:12d}" for name in CLASSES))
    for title, counts in (("counted", total), ("not replayed by Paddle's data", rest)):
        print(f"{title:44s}" + "".join(f"{counts[name]:12d}" for name in CLASSES))
        print(f"  {share(counts):.2%} equal, better, even or sound of {sum(counts.values())}")
    print(f"{grads} gradient records left out; {time.perf_counter() - start:.0f} s")
    bad = total["unsound"] + rest["unsound"] + total["unsupported"] + rest["unsupported"]
    return 1 if bad or share(total) < 0.97 else 0


if __name__ == "__main__":
    sys.exit(main())
