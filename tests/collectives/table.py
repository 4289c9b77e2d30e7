"""Every collective: where it exists, what a rank gives, and what numpy says the ranks get.

A plain table, which the tests of regions and those of processes go through alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

import meshpar as mp
from meshpar import ReduceOp

REGION, PROCESSES = "region", "processes"
BOTH = (REGION, PROCESSES)
SHAPES = [(3, 2), (), (0, 3)]

BOOL = ["bool"]
WHOLE = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
FLOAT = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
COMPLEX = ["complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
"""The dtypes that need `jax_enable_x64`."""

DTYPES = [*BOOL, *WHOLE, *FLOAT, *COMPLEX]


def values(shape: tuple[int, ...], dtype: str, rank: int) -> np.ndarray:
    """Small whole numbers, other ones on each rank, whose sums and products every dtype holds."""
    drawn = np.random.default_rng([rank, *shape]).integers(-1, 2, shape)
    if dtype == "bool":
        return drawn > 0
    if dtype.startswith("uint"):
        return (drawn + 1).astype(dtype)
    if dtype.startswith("complex"):
        return (drawn + 1j * np.roll(drawn, 1)).astype(dtype)
    return drawn.astype(jnp.dtype(dtype))


@dataclass(frozen=True)
class Operation:
    """One public call.

    Args:
      name: the public name, and what is particular to this row.
      give: (rank, number of ranks, shape, dtype) -> what the rank gives.
      call: (what the rank gives, group) -> what it gets. Run on each rank.
      get: what all members give -> what each gets; `None` for what is not said.
      takes: the dtypes; the wide ones follow from their narrow relatives.
      places: where it exists.
      shapes: of the arrays that it is tried with.
      differentiable: whether it has a gradient.
    """

    name: str
    give: Callable[[int, int, tuple[int, ...], str], Any]
    call: Callable[[Any, Any], Any]
    get: Callable[[list[Any]], list[Any]]
    takes: tuple[str, ...] = tuple(DTYPES)
    places: tuple[str, ...] = BOTH
    shapes: list[tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    differentiable: bool = True

    def takes_dtype(self, dtype: str) -> bool:
        kind = np.dtype(jnp.dtype(dtype)).kind
        narrow = {"int64": "int32", "uint64": "uint32", "float64": "float32"}
        return narrow.get(dtype, dtype if kind != "c" else "complex64") in self.takes


def one(rank: int, n: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return values(shape, dtype, rank)


def one_each(rank: int, n: int, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    return [values(shape, dtype, 100 * rank + i) for i in range(n)]


def rows(rank: int, n: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return values((2 * n, *shape), dtype, rank)


def combine(op: ReduceOp, xs: list[np.ndarray]) -> np.ndarray:
    """The reduction by numpy; narrow floats exactly, as all numbers are small."""
    stacked, dtype = np.stack(xs), xs[0].dtype
    if dtype.kind == "V" or (dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)):
        stacked = stacked.astype(np.float32)
    with np.errstate(over="ignore"):
        if op == ReduceOp.SUM:
            out = stacked.sum(0, dtype=stacked.dtype)
        elif op == ReduceOp.AVG:
            out = stacked.mean(0, dtype=stacked.dtype)
        elif op == ReduceOp.PROD:
            out = stacked.prod(0, dtype=stacked.dtype)
        else:
            out = stacked.max(0) if op == ReduceOp.MAX else stacked.min(0)
    return np.asarray(out).astype(dtype)


TAKES = {
    ReduceOp.SUM: (*WHOLE, *FLOAT, *COMPLEX),
    ReduceOp.PROD: (*WHOLE, *FLOAT, *COMPLEX),
    ReduceOp.AVG: (*FLOAT, *COMPLEX),
    ReduceOp.MAX: (*BOOL, *WHOLE, *FLOAT),
    ReduceOp.MIN: (*BOOL, *WHOLE, *FLOAT),
}


def other(group: Any) -> int:
    """A member that is not the first, where there is one."""
    return group.ranks[1 % group.nranks]


def at(xs: list[Any]) -> int:
    return 1 % len(xs)


def transposed(inputs: list[list[Any]]) -> list[list[Any]]:
    return [list(items) for items in zip(*inputs, strict=True)]


def with_zeros(inputs: list[Any], place: str = REGION) -> list[Any]:
    nothing = [np.zeros_like(x) for x in inputs]
    return [list(inputs) if i == at(inputs) else nothing for i in range(len(inputs))]


def exchanged_rows(inputs: list[np.ndarray]) -> list[np.ndarray]:
    n = len(inputs)
    return [np.concatenate([np.split(x, n)[j] for x in inputs]) for j in range(n)]


def ring(x: Any, group: Any) -> Any:
    """To the next member of the group, from the one before."""
    n = group.nranks
    step = {r: group.ranks[(i + 1) % n] for i, r in enumerate(group.ranks)}
    back = {r: group.ranks[(i - 1) % n] for i, r in enumerate(group.ranks)}
    operations = [mp.P2POp(mp.isend, x, step, group), mp.P2POp(mp.irecv, x, back, group)]
    return mp.batch_isend_irecv(operations)[1].wait()


def _reductions() -> list[Operation]:
    out: list[Operation] = []
    for op in ReduceOp:
        takes = TAKES[op]
        out += [
            Operation(
                f"all_reduce {op.name}",
                one,
                lambda x, g, op=op: mp.all_reduce(x, op, g),
                lambda xs, op=op: [combine(op, xs)] * len(xs),
                takes,
            ),
            Operation(
                f"reduce {op.name}",
                one,
                lambda x, g, op=op: mp.reduce(x, other(g), op, g),
                lambda xs, op=op: [combine(op, xs) if i == at(xs) else x for i, x in enumerate(xs)],
                takes,
            ),
            Operation(
                f"reduce_scatter {op.name}",
                one_each,
                lambda xs, g, op=op: mp.reduce_scatter(xs, op=op, group=g),
                lambda inputs, op=op: [combine(op, xs) for xs in transposed(inputs)],
                takes,
            ),
        ]
    return out


OPERATIONS: list[Operation] = [
    *_reductions(),
    Operation(
        "broadcast",
        one,
        lambda x, g: mp.broadcast(x, other(g), g),
        lambda xs: [xs[at(xs)]] * len(xs),
    ),
    Operation(
        "all_gather",
        one,
        lambda x, g: mp.all_gather([], x, g),
        lambda xs: [list(xs)] * len(xs),
    ),
    Operation(
        "gather",
        one,
        lambda x, g: mp.gather(x, [], other(g), g),
        with_zeros,
    ),
    Operation(
        "scatter",
        one_each,
        lambda xs, g: mp.scatter(None, xs, other(g), g),
        lambda inputs: inputs[at(inputs)],
    ),
    Operation("alltoall", one_each, lambda xs, g: mp.alltoall([], xs, g), transposed),
    Operation(
        "alltoall_single",
        rows,
        lambda x, g: mp.alltoall_single(x, group=g),
        exchanged_rows,
        shapes=[(), (3,), (0,)],
    ),
    Operation(
        "batch_isend_irecv",
        one,
        ring,
        lambda xs: [xs[i - 1] for i in range(len(xs))],
        places=(REGION,),
    ),
]

ELSEWHERE = {
    "send": (PROCESSES,),
    "recv": (PROCESSES,),
    "isend": (PROCESSES,),
    "irecv": (PROCESSES,),
    "barrier": (PROCESSES,),
    "wait": (PROCESSES,),
    "all_gather_object": (PROCESSES,),
    "broadcast_object_list": (PROCESSES,),
    "scatter_object_list": (PROCESSES,),
    "send_object_list": (PROCESSES,),
    "recv_object_list": (PROCESSES,),
}
"""The operations that exist between processes only, which do not fit one row."""
