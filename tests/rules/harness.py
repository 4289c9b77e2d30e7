"""Runs single operations on a mesh in given layouts, and compares with the unsharded result.

A `Case` is a function and its arguments. A `Job` is a case with a layout for everything: either
what `propagate` makes of given placements, or one option of the rule of the case's only operation,
reached without any decision. Many jobs run as one compiled program.

Every device's block of every result is looked at.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshpar.compiler.decide import Decider
from meshpar.compiler.device_model import DeviceModel
from meshpar.compiler.options import NOTHING, Cut, expand
from meshpar.compiler.partition import run_local
from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.compiler.program import Constant, Program, program_of
from meshpar.compiler.propagate import propagate
from meshpar.errors import PlacementError
from meshpar.placements.blocks import local_shape
from meshpar.placements.layout import Layout
from meshpar.placements.reductions import check_dtype
from meshpar.placements.types import ReduceType
from meshpar.rules import find_rule
from tests.rules.host_blocks import ANY, MAX, SUM, Sizes, blocks_of, fault

PAIR: Sizes = {"x": 2}
SQUARE: Sizes = {"x": 2, "y": 2}


@dataclass(frozen=True)
class Case:
    """A function of arrays and its arguments.

    Args:
      name: shown when it fails.
      fn: what runs.
      args: numpy arrays, or key arrays.
      tolerance: relative and absolute, of floats.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    tolerance: float = 1e-5


DTYPES = (np.int32, np.uint8, np.int8, np.complex64)


def in_other_dtypes(case: Case) -> Iterator[Case]:
    """The case with its float32 arguments in each dtype that its function takes.

    Integers are eight times as large, so that they are whole.
    """
    for dtype in DTYPES:
        args = tuple(_as(x, dtype) if x.dtype == np.float32 else x for x in case.args)
        if not any(x.dtype == dtype for x in args):
            continue
        other = Case(f"{case.name} {np.dtype(dtype).name}", case.fn, args, case.tolerance)
        try:
            jax.jit(case.fn).lower(*args)
        except Exception:  # whatever it raises, the function is of other dtypes
            continue
        if len(traced(other).nodes) == 1:
            yield other


def _as(x: np.ndarray, dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.integer):
        x = np.clip(np.nan_to_num(x) * np.float64(8), -99, 99)
    return x.astype(dtype)


@dataclass(frozen=True)
class Job:
    """A case with its layouts.

    Args:
      case: what runs.
      planned: how.
      label: the layouts in words.
    """

    case: Case
    planned: PlannedProgram
    label: str = field(compare=False)


# --- what the jobs of a case are ------------------------------------------------------------------


def traced(case: Case) -> Program:
    """The case as a program."""
    return program_of(jax.make_jaxpr(case.fn)(*case.args))


def allowed(layout: Layout, dtype: Any) -> bool:
    """Whether values of a dtype can have a layout."""
    try:
        check_dtype(layout, dtype)
    except PlacementError:
        return False
    return True


def layouts_of(
    shape: tuple[int, ...], dtype: Any, sizes: Sizes, kinds: Sequence[ReduceType]
) -> list[Layout]:
    """Every layout of a value on a mesh: each axis cuts a dim, is pending, or does nothing."""
    per_axis: list[Any] = [None, *range(len(shape)), *kinds]
    out = []
    for choice in itertools.product(per_axis, repeat=len(sizes)):
        layout = Layout.replicated(len(shape))
        for axis, what in zip(sizes, choice, strict=True):
            if isinstance(what, ReduceType):
                layout = layout.with_partial(axis, what)
            elif what is not None:
                layout = layout.with_dim(what, (*layout.dims[what], axis))
        if allowed(layout, dtype):
            out.append(layout)
    return out


def placement_jobs(
    case: Case, sizes: Sizes, kinds: Sequence[ReduceType] = (SUM, MAX, ANY), limit: int = 0
) -> list[Job]:
    """The case on all combinations of placements, as `propagate` plans them.

    Args:
      limit: at most so many, drawn evenly from all; 0 for all.
    """
    program = traced(case)
    each = [
        layouts_of(tuple(a.shape), a.dtype, sizes, kinds)
        for a in (program.aval(i) for i in program.inputs)
    ]
    count = math.prod(map(len, each))
    decider = Decider(sizes, DeviceModel())
    jobs = []
    for number in _drawn(count, limit, case.name):
        layouts = []
        for options in each:
            number, which = divmod(number, len(options))
            layouts.append(options[which])
        planned = propagate(program, layouts, [None] * len(program.outputs), decider)
        jobs.append(Job(case, planned, " ".join(map(short, layouts))))
    return jobs


def option_jobs(case: Case, sizes: Sizes, limit: int = 0) -> list[Job]:
    """The case's one operation in every option that its rule has, whatever its cost."""
    program = traced(case)
    (node,) = program.nodes
    avals = [program.aval(ref) for ref in node.ins]
    rule = find_rule(node.name, avals, node.params)
    assert rule is not None, f"{node.name} has no rule"
    cuts = [NOTHING, *(Cut(f) for f in rule.factors)]
    cuts += [Cut(None, i, kind) for i, p in enumerate(rule.passes) for kind in sorted(p.kinds)]
    orders = list(itertools.permutations(sizes))
    count = len(cuts) ** len(sizes) * len(orders)
    jobs = []
    for number in _drawn(count, limit, case.name):
        number, order = divmod(number, len(orders))
        option = {}
        for axis in orders[order]:
            number, which = divmod(number, len(cuts))
            option[axis] = cuts[which]
        expanded = expand(rule, option, [[] for _ in node.ins], sizes)
        if expanded is None:
            continue
        layouts = list(zip(node.ins, expanded.operands, strict=True))
        if not all(
            allowed(layout, program.aval(ref).dtype)
            and not (isinstance(ref, Constant) and layout.partial)
            for ref, layout in layouts
        ):
            continue
        inputs = {ref: layout for ref, layout in layouts if not isinstance(ref, Constant)}
        planned_node = PlannedNode(
            node, rule, (), expanded.operands, expanded.results, expanded.axes
        )
        results = dict(zip(node.outs, expanded.results, strict=True))
        planned = PlannedProgram(
            program,
            sizes,
            tuple(inputs[i] for i in program.inputs),
            (planned_node,),
            (),
            tuple(results[i] for i in program.outputs),
        )
        label = " ".join(
            f"{a}:{c.factor or (c.kind and c.kind.word) or '-'}" for a, c in option.items()
        )
        jobs.append(Job(case, planned, label))
    return jobs


def _drawn(count: int, limit: int, name: str) -> Iterator[int]:
    """All numbers below a count, or so many of them, the same in every run."""
    if not limit or count <= limit:
        yield from range(count)
        return
    rng = np.random.default_rng(sum(map(ord, name)))
    yield from sorted(rng.choice(count, limit, replace=False).tolist())


def short(layout: Layout) -> str:
    """A layout in a few letters."""
    dims = ",".join("".join(axes) or "-" for axes in layout.dims)
    pending = " ".join(f"{axis}:{kind.word}" for axis, kind in layout.partial)
    return f"[{dims}{' ' if pending else ''}{pending}]"


# --- running --------------------------------------------------------------------------------------

_is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731


def _data(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def mesh_of(sizes: Sizes) -> Mesh:
    """A mesh of the first devices."""
    count = math.prod(sizes.values())
    devices = np.array(jax.devices()[:count], dtype=object)
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def local_program(job: Job) -> Callable[..., list[jax.Array]]:
    """What each device runs for a job: blocks with a leading dim of 1 to the same of results."""
    avals = [job.planned.program.aval(i) for i in job.planned.program.inputs]

    def run(*blocks: jax.Array) -> list[jax.Array]:
        ins = []
        for aval, block, arg in zip(avals, blocks, job.case.args, strict=True):
            block = block[0]
            ins.append(
                jax.random.wrap_key_data(block, impl=jax.random.key_impl(arg))
                if _is_key(aval)
                else block
            )
        outs = run_local(job.planned, *ins)
        return [(jax.random.key_data(out) if _is_key(out) else out)[None] for out in outs]

    return run


def on_mesh(fn: Callable[..., Any], sizes: Sizes) -> Callable[..., Any]:
    """A local program over the mesh, with a leading dim that counts the devices."""
    spec = PartitionSpec(tuple(sizes))
    return jax.shard_map(fn, mesh=mesh_of(sizes), in_specs=spec, out_specs=spec, check_vma=False)


FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def failures(jobs: Sequence[Job], sizes: Sizes, batch: int = 150) -> list[str]:
    """Runs jobs, and tells what came out wrong: one line each."""
    wrong: list[str] = []
    for start in range(0, len(jobs), batch):
        wrong += _failures(jobs[start : start + batch], sizes)
    return wrong


def _failures(jobs: Sequence[Job], sizes: Sizes) -> list[str]:
    wrong: dict[int, str] = {}
    blocks: dict[tuple[int, int, Layout], np.ndarray] = {}
    wanted: dict[int, list[np.ndarray]] = {}
    keys: list[list[tuple[int, int, Layout]]] = []
    for number, job in enumerate(jobs):
        case = job.case
        if id(case) not in wanted:
            wanted[id(case)] = [_data(x) for x in jax.tree.leaves(case.fn(*case.args))]
        keys.append([(id(case), i, layout) for i, layout in enumerate(job.planned.inputs)])
        for arg, key in zip(case.args, keys[-1], strict=True):
            if key not in blocks:
                blocks[key] = blocks_of(_data(arg), key[2], sizes, seed=number)

    def everything(there: dict[Any, Any]) -> list[Any]:
        out: list[Any] = []
        for number, job in enumerate(jobs):
            try:
                out.append(local_program(job)(*(there[key] for key in keys[number])))
            except Exception as error:  # any error of a rule is a failure of its job, not of all
                wrong[number] = f"{type(error).__name__}: {str(error)[:300]}"
                out.append([])
        return out

    named = list(blocks)
    program = jax.jit(
        on_mesh(lambda one, *flat: (one, everything(dict(zip(named, flat, strict=True)))), sizes),
        compiler_options=FAST,
    )
    # XLA refuses a shard_map of which no operand holds anything.
    something = np.zeros(math.prod(sizes.values()), np.float32)
    _, results = jax.device_get(program(something, *(blocks[key] for key in named)))
    for number, (job, outs) in enumerate(zip(jobs, results, strict=True)):
        if number in wrong:
            continue
        for got, want, layout in zip(outs, wanted[id(job.case)], job.planned.outputs, strict=True):
            problem = fault(got, want, layout, sizes, job.case.tolerance)
            if problem:
                wrong[number] = problem
                break

    def told(job: Job, text: str) -> str:
        outputs = " ".join(map(short, job.planned.outputs))
        return f"{job.case.name} {job.label} -> {outputs}: {text}"

    return [told(jobs[n], text) for n, text in sorted(wrong.items())]


def report(wrong: Sequence[str], count: int) -> str:
    """The failures as a message."""
    return f"{len(wrong)} of {count} jobs:\n" + "\n".join(wrong[:20])


# --- bytes ----------------------------------------------------------------------------------------


def bytes_sent(job: Job) -> int:
    """What each device sends in a job's collectives, from the traced local program."""
    sizes = job.planned.sizes
    count = math.prod(sizes.values())
    program = job.planned.program
    shapes = []
    for number, layout, arg in zip(program.inputs, job.planned.inputs, job.case.args, strict=True):
        data = _data(arg)
        local = local_shape(tuple(program.aval(number).shape), layout, sizes)
        words = data.shape[layout.ndim :]
        shapes.append(jax.ShapeDtypeStruct((count, *local, *words), data.dtype))
    jaxpr = jax.make_jaxpr(on_mesh(local_program(job), sizes))(*shapes)
    return _sent(jaxpr.jaxpr, sizes)


def _sent(jaxpr: Any, sizes: Sizes) -> int:
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        n = math.prod(sizes.get(axis, 1) for axis in axes)
        held = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.invars)
        share = (n - 1) / n
        if name in ("psum", "psum_invariant", "pmax", "pmin"):
            total += 2 * held * share
        elif name == "all_gather":
            total += held * (n - 1)
        elif name in ("reduce_scatter", "all_to_all"):
            total += held * share
        elif name == "ppermute":
            total += held
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += _sent(inner, sizes)
    return round(total)
