"""Runs random programs on random meshes and compares them with the single-device programs.

    python -m tests.compiler.fuzz --cases 2000 --seed 7

Many programs share one jitted function, since compiling is what takes the time. Where a batch
fails, its programs are run one by one and those that fail are cut down and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshpar as mp
from meshpar.compiler.hlo import axes_of, collectives_in_stablehlo, sent_bytes
from meshpar.placements.blocks import block_of, local_shape, storage_shape, storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.values import placed, wrap
from tests.compiler.programs import (
    MESHES,
    Line,
    RandomProgram,
    needed_only,
    random_program,
    random_value,
    terms,
)
from tests.quick_compilation import FLAGS

_GARBAGE = {"b": [False, True], "i": [-99, 77, 2**30], "f": [np.nan, np.inf, 99], "V": [np.nan, 77]}
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Failure:
    """A program that goes wrong, and how."""

    program: RandomProgram
    reason: str

    def __str__(self) -> str:
        return f"{self.program}\n  {self.reason}"


# --- arguments ------------------------------------------------------------------------------------


def arguments(program: RandomProgram) -> tuple[list[np.ndarray], list[Any]]:
    """The arguments as numpy arrays, and placed as the program says."""
    rng = np.random.default_rng(program.seed)
    mesh = MESHES[program.mesh]
    whole = [random_value(rng, info) for info in program.inputs]
    there = [
        value if asked is None else from_terms(rng, value, asked, mesh)
        for value, asked in zip(whole, program.placements, strict=True)
    ]
    return whole, there


def from_terms(
    rng: np.random.Generator, value: np.ndarray, placements: Sequence[Any], mesh: mp.ProcessMesh
) -> Any:
    """The value placed block by block, pending reductions as unequal contributions."""
    layout = Layout.of(placements, mesh, value.ndim)
    parts: dict[tuple[int, ...], np.ndarray] = {(): value}
    pending = [axis for axis in mesh.axis_names if layout.kind_of(axis) is not None]
    for axis in pending:  # along the others the contributions are copies
        kind, size = layout.kind_of(axis), mesh.axis_sizes[axis]
        parts = {
            (*at, i): piece
            for at, part in parts.items()
            for i, piece in enumerate(terms(rng, part, kind.word, size))
        }
    sizes = mesh.axis_sizes
    padded = local_shape(value.shape, layout, sizes)
    ones = (1,) * len(layout.partial)
    blocks = []
    for rank, device in zip(mesh.process_ids, mesh.jax_mesh.devices.flat, strict=True):
        coordinate = mesh.coordinate(rank)
        box = block_of(value.shape, layout, sizes, coordinate)
        block = np.full(padded, rng.choice(_GARBAGE[value.dtype.kind]), value.dtype)
        part = parts[tuple(coordinate[axis] for axis in pending)]
        block[tuple(slice(0, s.stop - s.start) for s in box)] = part[box]
        blocks.append(jax.device_put(block.reshape(ones + padded), device))
    storage = jax.make_array_from_single_device_arrays(
        storage_shape(value.shape, layout, sizes), storage_sharding(layout, mesh), blocks
    )
    return wrap(storage, value.shape, layout, mesh)


# --- results --------------------------------------------------------------------------------------


def read(x: Any) -> np.ndarray:
    """The value of a result, put together here; every copy of every block must be the same."""
    source = placed(x)
    assert source is not None, "a result lies on the mesh"
    mesh, layout = source.mesh, source.layout
    sizes = mesh.axis_sizes
    stacked = [axis for axis in sizes if axis in layout.partial_axes]
    shape = (*(sizes[axis] for axis in stacked), *source.shape)
    out = np.zeros(shape, source.storage.dtype)
    seen = np.zeros(shape, bool)
    rank_of = {d.id: r for r, d in zip(mesh.process_ids, mesh.jax_mesh.devices.flat, strict=True)}
    for shard in source.storage.addressable_shards:
        coordinate = mesh.coordinate(rank_of[shard.device.id])
        box = block_of(source.shape, layout, sizes, coordinate)
        block = np.asarray(shard.data).reshape(shard.data.shape[len(stacked) :])
        block = block[tuple(slice(0, s.stop - s.start) for s in box)]
        at = (*(coordinate[axis] for axis in stacked), *box)
        copied = out[at][seen[at]]
        if not np.array_equal(copied, block[seen[at]], equal_nan=block.dtype.kind == "f"):
            raise AssertionError(f"copies differ: {copied} and {block[seen[at]]}, {layout}")
        out[at], seen[at] = block, True
    assert seen.all(), "every element is somewhere"
    for axis in reversed(stacked):
        at = stacked.index(axis)
        wide = out.astype(np.float64) if out.dtype == jnp.bfloat16 else out
        reduce = {"sum": np.sum, "max": np.max, "min": np.min, "any": np.any, "all": np.all,
                  "prod": np.prod, "avg": np.mean}[layout.kind_of(axis).word]  # fmt: skip
        extra = {"dtype": wide.dtype} if reduce in (np.sum, np.prod) else {}
        out = reduce(wide, axis=at, **extra).astype(out.dtype)
    return out


def difference(
    got: Sequence[Any],
    expected: Sequence[Any],
    values: Sequence[Any],
    asked: Sequence[Any],
    *,
    loosely: bool = False,
) -> str | None:
    """What is wrong with the results of a program, if anything is.

    They may be off as far as bfloat16 is where it is in the program, or `loosely`.
    """
    scale = 1.0
    for value in (*values, *expected):
        if value.dtype.kind not in "biu":
            wide = np.abs(np.asarray(value, np.float64))
            scale = max(scale, float(wide[np.isfinite(wide)].max(initial=0)))
    for i, (x, whole, wanted) in enumerate(zip(got, expected, asked, strict=True)):
        if (x.shape, x.dtype) != (whole.shape, whole.dtype):
            return f"result {i} is {x.dtype}{x.shape}, not {whole.dtype}{whole.shape}"
        mesh, there = mp.mesh_of(x), mp.placements_of(x)
        asked_for = None if wanted is None else Layout.of(wanted, mesh, x.ndim)
        if asked_for is not None and Layout.of(there, mesh, x.ndim) != asked_for:
            return f"result {i} has {there}, asked was {wanted}"
        if wanted is None and any(p.is_partial() for p in there):
            return f"result {i} is left pending: {there}"
        try:
            value = read(x)
        except AssertionError as error:
            return f"result {i}: {error}"
        if whole.dtype.kind in "biu":
            if not np.array_equal(value, whole):
                return f"result {i} is\n{value}\nnot\n{whole}"
            continue
        lhs, rhs = value.astype(np.float64), np.asarray(whole, np.float64)
        low = loosely or any(v.dtype == jnp.bfloat16 for v in values)
        limit = TOLERANCE["bfloat16" if low else "float32"] * scale
        with np.errstate(invalid="ignore"):
            off = np.where((lhs == rhs) | (np.isnan(lhs) & np.isnan(rhs)), 0.0, np.abs(lhs - rhs))
        if not (np.nan_to_num(off, nan=np.inf) <= limit).all():
            return f"result {i} is\n{value}\nnot\n{whole}\n(scale {scale:.3g})"
    return None


# --- runs -----------------------------------------------------------------------------------------


def together(programs: Sequence[RandomProgram]) -> mp.compiler.jit.Jitted:
    """All programs as one partitioned function."""

    def everything(args: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        return tuple(program(*mine) for program, mine in zip(programs, args, strict=True))

    asked = tuple(program.asked for program in programs)
    return mp.jit(everything, out_placements=asked, mesh=MESHES[programs[0].mesh])


def expected_of(
    programs: Sequence[RandomProgram],
    whole: Sequence[Sequence[np.ndarray]],
    *,
    simplified: bool = True,
) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """For each program all values and all results, computed on one device.

    XLA's simplifier (jaxlib 0.10) adds the begins of a slice of a slice, also beyond the dim.
    Without it not all programs compile.
    """
    single = [program.without_annotations for program in programs]

    def everything(args: Any) -> Any:
        return [
            (program.values(*mine), program.gradients(*mine))
            for program, mine in zip(single, args, strict=True)
        ]

    out = []
    args = [list(map(jnp.asarray, mine)) for mine in whole]
    options = {} if simplified else {"xla_disable_hlo_passes": "algsimp"}
    both = jax.jit(everything).lower(args).compile(options)(args)
    for program, (values, gradients) in zip(programs, both, strict=True):
        values = [np.asarray(v) for v in values]
        out.append((values, [*(values[i] for i in program.outputs), *map(np.asarray, gradients)]))
    return out


def failures(
    programs: Sequence[RandomProgram], *, plan_too: bool = True, loosely: bool = False
) -> list[Failure]:
    """Runs programs that share a mesh and checks results and placements, and plan and bytes."""
    made = [arguments(program) for program in programs]
    there = [args for _, args in made]
    jitted = together(programs)
    try:
        plan = jitted.plan(there)
        assert not plan_too or str(plan).strip(), "the plan prints"
        comparable = plan_too and not any(node.bodies for node in plan.planned.nodes)
        sent = lowered(jitted.lower(there).as_text(), plan.mesh) if comparable else None
        alike = sent is None or planned(plan) == sent
        got = jitted(there)
    except Exception:
        if len(programs) == 1:
            return [Failure(programs[0], traceback.format_exc(limit=-6, chain=False))]
        return _one_by_one(programs)
    if not alike:
        if len(programs) == 1:
            return [Failure(programs[0], f"planned {planned(plan)}\nlowered {sent}")]
        return _one_by_one(programs)
    inputs = [whole for whole, _ in made]
    out = []
    for program, whole, mine, (values, results) in zip(
        programs, inputs, got, expected_of(programs, inputs), strict=True
    ):
        reason = difference(mine, results, values, program.asked, loosely=loosely)
        if reason is not None:
            reason = _second_opinion(program, whole, mine, reason)
        if reason is not None:
            out.append(Failure(program, reason))
    return out


def _second_opinion(
    program: RandomProgram, whole: Sequence[np.ndarray], got: Sequence[Any], reason: str
) -> str | None:
    """What is wrong even so, where XLA's simplifier or rounding may be what differs.

    Where terms cancel, two orders of a sum of bfloat16 may differ by any share of the result; then
    the same program in float32 must be right.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it may not compile without
        ((values, results),) = expected_of([program], [whole], simplified=False)
        if difference(got, results, values, program.asked) is None:
            return None
    infos = (
        replace(info, dtype="float32") if info.dtype == "bfloat16" else info
        for info in program.inputs
    )
    wide = replace(program, inputs=tuple(infos))
    return reason if wide == program or failures([wide], loosely=True) else None


def _one_by_one(programs: Sequence[RandomProgram]) -> list[Failure]:
    """The failures of programs of which one cannot be planned, compiled, or has other bytes."""
    bad = [program for program in programs if not _lowers(program)]
    good = [program for program in programs if program not in bad]
    if not bad:  # it is in what compiling or running does
        half = len(programs) // 2
        return [*failures(programs[:half]), *failures(programs[half:])]
    out = [failure for program in bad for failure in failures([program])]
    return [*out, *(failures(good) if good else [])]


def _lowers(program: RandomProgram) -> bool:
    """Whether a program can be planned and lowered, to the collectives that are planned."""
    there = [arguments(program)[1]]
    jitted = together([program])
    try:
        plan = jitted.plan(there)
        sent = lowered(jitted.lower(there).as_text(), plan.mesh)
    except Exception:
        return False
    return planned(plan) == sent or any(node.bodies for node in plan.planned.nodes)


def planned(plan: mp.compiler.plan.Plan) -> dict[Any, int]:
    """(Kind, axes) -> bytes that each device sends, as planned."""
    out: Counter[Any] = Counter()
    for c in plan.collectives:
        out[_key(c.kind, c.axes)] += c.count * c.bytes
    return {key: sent for key, sent in out.items() if sent}


def lowered(text: str, mesh: mp.ProcessMesh) -> dict[Any, int]:
    """The same, read from the lowered module, where nothing runs in a loop."""
    out: Counter[Any] = Counter()
    for kind, found in collectives_in_stablehlo(text).items():
        for one in found:
            name = {"collective_permute": "ppermute"}.get(kind, kind)
            axes = () if name == "ppermute" else axes_of(kind, one, mesh)
            out[_key(name, axes)] += sent_bytes(kind, one)
    return {key: sent for key, sent in out.items() if sent}


def _key(kind: str, axes: Sequence[str]) -> tuple[str, frozenset[str]]:
    """A permutation over two axes may happen to move nothing along one of them."""
    return kind, frozenset() if kind == "ppermute" else frozenset(axes)


# --- cutting down ---------------------------------------------------------------------------------


def smaller(program: RandomProgram) -> Iterator[RandomProgram]:
    """Programs with a little less in them, the shortest first."""
    count = len(program.inputs)
    if program.gradient:
        yield replace(program, gradient=False)
    for i in range(len(program.lines)):
        one = replace(program, outputs=(count + i,), out_placements=(None,))
        if len(needed_only(one).lines) < len(program.lines):
            yield needed_only(one)
    for i in range(len(program.outputs)):
        if len(program.outputs) > 1:
            one = replace(
                program,
                outputs=(program.outputs[i],),
                out_placements=(program.out_placements[i],),
            )
            yield needed_only(one)
        if program.out_placements[i] is not None:
            asked = list(program.out_placements)
            asked[i] = None
            yield replace(program, out_placements=tuple(asked))
    for i, line in enumerate(program.lines):
        if line.text.startswith(("mp.shard_tensor", "mp.reshard")):
            lines = list(program.lines)
            lines[i] = Line("{0}", line.operands)
            yield replace(program, lines=tuple(lines))
        if line.text == "{0}":
            yield without_line(program, i)
    for i, there in enumerate(program.placements):
        for at, placement in enumerate(there or ()):
            if not placement.is_replicated():
                changed = [*there[:at], mp.Replicate(), *there[at + 1 :]]
                yield replace(
                    program,
                    placements=(*program.placements[:i], changed, *program.placements[i + 1 :]),
                )


def without_line(program: RandomProgram, number: int) -> RandomProgram:
    """The program with a line that does nothing left out."""
    value, count = len(program.inputs) + number, len(program.inputs)
    (same,) = program.lines[number].operands
    lines = [
        Line(line.text, tuple(same if n == value else n for n in line.operands))
        for line in program.lines
    ]
    outputs = tuple(same if n == value else n for n in program.outputs)
    if all(n < count for n in outputs):
        return program
    return needed_only(replace(program, lines=tuple(lines), outputs=outputs))


def cut_down(failure: Failure, seconds: float = 60) -> Failure:
    """A smaller program that fails too."""
    until = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < until:
        again = False
        for candidate in smaller(failure.program):
            if candidate == failure.program or time.monotonic() > until:
                continue
            try:
                found = failures([candidate])
            except Exception:
                continue
            if found:
                failure, again = found[0], True
                break
    return failure


# --- the command ----------------------------------------------------------------------------------


def batches(seed: int, cases: int, size: int) -> Iterator[tuple[int, list[RandomProgram]]]:
    """Batches of programs on one mesh each; every third batch has control flow."""
    done = 0
    for number in itertools.count():
        if done >= cases:
            return
        rng = random.Random(f"{seed}/{number}")
        mesh = rng.choice(list(MESHES))
        yield number, [random_program(rng, mesh, loops=number % 3 == 0) for _ in range(size)]
        done += size


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--shrink", type=float, default=40)
    options = parser.parse_args()
    start, done, failed = time.monotonic(), 0, 0
    gc.disable()  # programs make many objects, and few that refer to each other
    for number, programs in batches(options.seed, options.cases, options.batch):
        for failure in failures(programs, plan_too=number % 3 == 1):
            failed += 1
            print(f"--- seed {options.seed}, batch {number}")
            print(cut_down(failure, options.shrink) if options.shrink else failure, flush=True)
        done += len(programs)
        if time.monotonic() - start > options.seconds:
            break
        if number % 10 == 9:
            gc.collect()
            print(f"{done} cases, {failed} failures, {time.monotonic() - start:.0f} s", flush=True)
    print(f"seed {options.seed}: {done} cases, {failed} failures, {time.monotonic() - start:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    flags = ["--xla_force_host_platform_device_count=8", *FLAGS]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_numpy_rank_promotion", "raise")
    sys.exit(main())
