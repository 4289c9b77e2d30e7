"""`mp.check`: the first operation at which a partitioned program goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from meshpar._jax import bind_at, is_key_array
from meshpar.compiler.jit import jit
from meshpar.compiler.lower import shard_mapped
from meshpar.compiler.plan import Plan
from meshpar.compiler.planned import Move, PlannedProgram
from meshpar.compiler.program import Constant, Program, Ref
from meshpar.mesh import ProcessMesh
from meshpar.placements.layout import Layout
from meshpar.placements.storage import read_block
from meshpar.placements.values import wrap

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


class Planned(Protocol):
    """What runs by a plan: `mp.jit` of a function, or a `DistModel`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def planned_call(self, *args: Any, **kwargs: Any) -> tuple[Plan, Sequence[jax.Array]]:
        """The plan of a call, and the storages of all that goes in; nothing runs."""
        ...


def check(
    fn: Callable[..., Any] | Planned,
    *args: Any,
    mesh: ProcessMesh | None = None,
    rtol: float = 1e-4,
    **kwargs: Any,
) -> Difference | None:
    """Runs the partitioned and the single-device program side by side.

    Every value of the function's outermost level is kept and compared, so it takes the memory of
    all of them: use small shapes. Bodies of loops count as one operation.

    Args:
      fn: a function, what `mp.jit` made of one, or a `DistModel`, of which a step in its current
        mode is compared; its state stays as it is.
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
    by_plan = cast(Planned, fn if hasattr(fn, "planned_call") else jit(fn, mesh=mesh))
    plan, given = by_plan.planned_call(*args, **kwargs)
    watched = _watching(plan.planned)
    storages = jax.jit(shard_mapped(watched, plan.mesh))(*given)
    whole = [
        _whole(storage, plan.planned.program.aval(number), layout, plan.mesh)
        for storage, number, layout in zip(
            given, plan.planned.program.inputs, plan.planned.inputs, strict=True
        )
    ]
    single = _single_device(plan.planned.program, whole)
    pairs = zip(storages, watched.outputs, strict=True)
    values = dict(zip(_watched_values(plan.planned), pairs, strict=True))
    for node in plan.planned.nodes:
        for number, layout in zip(node.node.outs, node.results, strict=True):
            aval = plan.planned.program.avals[number]
            if number not in values or not isinstance(aval.dtype, np.dtype):
                continue
            storage, settled = values[number]
            box = tuple(slice(0, size) for size in aval.shape)
            got = read_block(storage, tuple(aval.shape), settled, plan.mesh, box)
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


def _whole(storage: jax.Array, aval: Any, layout: Layout, mesh: ProcessMesh) -> jax.Array:
    """The global value of an argument, on one device."""
    if is_key_array(storage):
        data = jnp.asarray(np.asarray(jax.random.key_data(storage)))
        keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(storage))
        return keys[tuple(slice(0, size) for size in aval.shape)]
    return jnp.asarray(np.asarray(wrap(storage, tuple(aval.shape), layout, mesh)))


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
