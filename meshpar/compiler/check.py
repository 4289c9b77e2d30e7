"""`mp.check`: the first operation at which a partitioned program parts from the single-device one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar._jax import bind_at
from meshpar.compiler.jit import Jitted, jit
from meshpar.compiler.lower import shard_mapped
from meshpar.compiler.planned import Move, PlannedProgram
from meshpar.compiler.program import Constant, Program, Ref
from meshpar.mesh import ProcessMesh
from meshpar.placements.storage import read_block

__all__ = ["Difference", "check"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two programs part.

    Args:
      operation: the primitive.
      where: the user's source line.
      placements: of the operands and of the result, as planned.
      result: shape and dtype of the result.
      largest: the largest absolute difference.
      relative: the same over the largest value of the operands and the result.
    """

    operation: str
    where: str
    placements: str
    result: str
    largest: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.operation} at {self.where or 'an unknown line'} differs by {self.largest:.3g} "
            f"({self.relative:.3g} of the largest value there)\n"
            f"  result      {self.result}\n  placements  {self.placements}"
        )


def check(
    fn: Callable[..., Any],
    *args: Any,
    mesh: ProcessMesh | None = None,
    rtol: float = 1e-4,
    **kwargs: Any,
) -> Difference | None:
    """Runs the partitioned and the single-device program side by side.

    Every value of the function's outermost level is kept and compared, so it takes the memory of
    all of them: use small shapes. Bodies of loops count as one operation.

    Args:
      fn: a function, or what `mp.jit` made of one.
      *args: its arguments.
      mesh: the mesh; without it that of the arguments, else the default one.
      rtol: how far a value may be off, as a part of the largest value that goes in or comes out.
        Integers and booleans must be equal.
      **kwargs: keyword arguments.

    Returns:
      The first operation whose result differs, or `None` if nothing does.

    Example:
      >>> import meshpar as mp
      >>> x = mp.shard_tensor(np.ones((4, 2)), mp.ProcessMesh([0], ["dp"]), [mp.Shard(0)])
      >>> mp.check(lambda x: jnp.sin(x).sum(), x) is None
      True
    """
    partitioned = fn if isinstance(fn, Jitted) else jit(fn, mesh=mesh)
    plan = partitioned.plan(*args, **kwargs)
    lowering = partitioned.lowering(*args, **kwargs)
    leaves = jax.tree.leaves((args, kwargs))
    watched = _watching(plan.planned)
    program = jax.jit(shard_mapped(watched, plan.mesh))
    storages = program(*lowering.placed(leaves))
    single = _single_device(plan.planned.program, [jnp.asarray(np.asarray(x)) for x in leaves])
    values = dict(zip(_watched_values(plan.planned), zip(storages, watched.outputs), strict=True))
    for node in plan.planned.nodes:
        for number, layout in zip(node.node.outs, node.results, strict=True):
            aval = plan.planned.program.avals[number]
            if number not in values or not isinstance(aval.dtype, np.dtype):
                continue
            storage, settled = values[number]
            whole = tuple(slice(0, size) for size in aval.shape)
            got = read_block(storage, tuple(aval.shape), settled, plan.mesh, whole)
            largest = _difference(got, np.asarray(single[number]))
            relative = largest / _scale([*node.node.ins, number], single) if largest else 0.0
            if relative > (rtol if np.issubdtype(got.dtype, np.inexact) else 0):
                shown = [x.placements(plan.mesh) for x in (*node.operands, layout)]
                placements = f"{', '.join(map(str, shown[:-1]))} -> {shown[-1]}"
                result = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
                return Difference(
                    node.node.name, node.node.where, placements, result, largest, relative
                )
    return None


def _watched_values(planned: PlannedProgram) -> list[int]:
    program = planned.program
    made = [value for node in planned.nodes for value in node.node.outs]
    return [v for v in made if isinstance(program.avals[v].dtype, np.dtype)]


def _watching(planned: PlannedProgram) -> PlannedProgram:
    """The same program with every value as an output, reduced but otherwise as it lies."""
    results = {v: x for n in planned.nodes for v, x in zip(n.node.outs, n.results, strict=True)}
    watched = _watched_values(planned)
    settled = [results[v].without_partial() for v in watched]
    moves = tuple(
        Move(value, results[value], layout)
        for value, layout in zip(watched, settled, strict=True)
        if results[value] != layout
    )
    program = replace(planned.program, outputs=tuple(watched))
    return replace(planned, program=program, moves=moves, outputs=tuple(settled))


def _single_device(program: Program, args: Sequence[jax.Array]) -> dict[int, Any]:
    """Every value of the program, computed on one device."""

    def run(*given: jax.Array) -> dict[int, Any]:
        env: dict[int, Any] = {**program.constants}
        env.update(zip(program.inputs, given, strict=True))

        def read(ref: Ref) -> Any:
            return ref.value if isinstance(ref, Constant) else env[ref]

        for node in program.nodes:
            outs = bind_at(node.eqn, *(read(ref) for ref in node.ins))
            env.update(zip(node.outs, outs, strict=True))
        return env

    return jax.jit(run)(*args)


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference; 1 where integers or booleans differ at all."""
    if not np.issubdtype(got.dtype, np.inexact):
        return float((got != expected).any())
    lhs, rhs = got.astype(np.complex128), expected.astype(np.complex128)
    same = (lhs == rhs) | (np.isnan(lhs) & np.isnan(rhs))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(lhs - rhs))
    return float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))


def _scale(refs: Sequence[Ref], values: dict[int, Any]) -> float:
    """The largest finite magnitude among an operation's operands and result.

    Operands count because a sum that cancels is as exact as its terms, not as its result.
    """
    scale = 1e-30
    for ref in refs:
        value = np.asarray(ref.value) if isinstance(ref, Constant) else values[ref]
        if isinstance(value.dtype, np.dtype) and np.issubdtype(value.dtype, np.number):
            array = np.abs(np.asarray(value).astype(np.complex128))
            scale = max(scale, float(array[np.isfinite(array)].max(initial=0.0)))
    return scale
