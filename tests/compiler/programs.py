"""Random programs as source text, with random meshes, placements and arguments.

A program is a list of lines such as `v3 = jnp.sum(v1, axis=(0,))`, so a failure pastes back. All
randomness comes from one `random.Random`, which may be one of hypothesis.

Arguments are small multiples of 1/4, and the number of bits that a value needs is followed through
the program: sums of such floats come out the same in any order. What jumps where its argument moves
a little (argmax, a comparison, floor) is applied only to values that are exact in this sense.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshpar as mp
from meshpar import Partial, Replicate, Shard
from meshpar.placements.reductions import identity

FLOATS = ("float32", "bfloat16")
MESHES = {
    name: mp.ProcessMesh(np.arange(math.prod(shape)).reshape(shape), list("abc"[: len(shape)]))
    for name, shape in {
        "2": (2,), "4": (4,), "8": (8,), "2x2": (2, 2), "2x3": (2, 3), "2x4": (2, 4),
        "4x2": (4, 2), "2x2x2": (2, 2, 2),
    }.items()
}  # fmt: skip
NAMES: dict[str, Any] = {
    "jax": jax, "jnp": jnp, "lax": lax, "np": np, "mp": mp,
    "Shard": Shard, "Replicate": Replicate, "Partial": Partial,
    "ReduceType": mp.ReduceType,
}  # fmt: skip
_MAX_ELEMENTS = 600
_BITS = {"float32": 22, "bfloat16": 7}


@dataclass(frozen=True)
class Info:
    """What is known of a value.

    Args:
      shape: its shape.
      dtype: its dtype.
      frac: bits behind the binary point; `None` where rounding has occurred.
      mag: bits before it, at most.
    """

    shape: tuple[int, ...]
    dtype: str
    frac: int | None = 0
    mag: int = 1

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def exact(self) -> bool:
        return not self.is_float or (
            self.frac is not None and self.frac + self.mag <= _BITS[self.dtype]
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Line:
    """One operation: the text with `{0}`, `{1}` for the numbered operands."""

    text: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class RandomProgram:
    """A program on a mesh.

    Args:
      mesh: a key of `MESHES`.
      inputs: what the arguments are; they are the values 0, 1, ...
      placements: of each argument; `None` for an unplaced numpy array.
      lines: the operations; line i makes the value number `len(inputs) + i`.
      outputs: the numbers of the results.
      out_placements: of each result, `None` where the plan chooses.
      gradient: whether the gradients of the float arguments are results too.
      seed: of the values of the arguments.
    """

    mesh: str
    inputs: tuple[Info, ...]
    placements: tuple[list[Any] | None, ...]
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]
    out_placements: tuple[list[Any] | None, ...]
    gradient: bool
    seed: int

    @property
    def source(self) -> str:
        """A function from the arguments to all values, as text."""
        count = len(self.inputs)
        text = [f"def program({', '.join(f'v{i}' for i in range(count))}):"]
        for i, line in enumerate(self.lines):
            names = [f"v{n}" for n in line.operands]
            text.append(f"    v{count + i} = {line.text.format(*names)}")
        everything = ", ".join(f"v{i}" for i in range(count + len(self.lines)))
        return "\n".join([*text, f"    return ({everything},)"])

    @cached_property
    def values(self) -> Callable[..., tuple[Any, ...]]:
        """The function from the arguments to all values."""
        scope = {**NAMES, "mesh": MESHES[self.mesh]}
        exec(self.source, scope)
        return scope["program"]

    @property
    def without_annotations(self) -> RandomProgram:
        """The program for one device."""
        lines = tuple(
            Line("{0}", line.operands)
            if line.text.startswith(("mp.shard_tensor", "mp.reshard"))
            else line
            for line in self.lines
        )
        return replace(self, lines=lines)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The results."""
        values = self.values(*args)
        return (*(values[i] for i in self.outputs), *self.gradients(*args))

    def gradients(self, *args: Any) -> tuple[Any, ...]:
        """Of the sum of all float results, for each float argument."""
        wrt = tuple(i for i, info in enumerate(self.inputs) if info.is_float)
        if not self.gradient or not wrt or "while_loop" in self.source:
            return ()

        def loss(*args: Any) -> jax.Array:
            values = self.values(*args)
            floats = [values[i] for i in self.outputs if values[i].dtype in FLOATS]
            return sum((jnp.tanh(x).astype(jnp.float32).sum() for x in floats), jnp.float32(0))

        return jax.grad(loss, wrt)(*args)

    @property
    def asked(self) -> tuple[list[Any] | None, ...]:
        """The placements of all results, those of gradients included."""
        floats = sum(info.is_float for info in self.inputs)
        has = self.gradient and "while_loop" not in self.source
        return (*self.out_placements, *([None] * floats * has))

    def __str__(self) -> str:
        inputs = [
            f"  v{i}: {info.dtype}{list(info.shape)} {placements}"
            for i, (info, placements) in enumerate(zip(self.inputs, self.placements, strict=True))
        ]
        outputs = ", ".join(
            f"v{i}: {p}" for i, p in zip(self.outputs, self.out_placements, strict=True)
        )
        return "\n".join(
            [
                f"mesh {self.mesh}, seed {self.seed}, gradient {self.gradient}",
                *inputs,
                self.source,
                f"  outputs {outputs}",
            ]
        )


def needed_only(program: RandomProgram) -> RandomProgram:
    """The same program without the lines that no output needs."""
    count = len(program.inputs)
    needed = set(program.outputs)
    for i in reversed(range(len(program.lines))):
        if count + i in needed:
            needed.update(program.lines[i].operands)
    kept = [i for i in range(len(program.lines)) if count + i in needed]
    new = {i: i for i in range(count)} | {count + i: count + k for k, i in enumerate(kept)}
    lines = tuple(
        Line(line.text, tuple(new[n] for n in line.operands))
        for line in (program.lines[i] for i in kept)
    )
    return replace(program, lines=lines, outputs=tuple(new[i] for i in program.outputs))


# --- arguments ------------------------------------------------------------------------------------


def random_placements(
    rng: random.Random, info: Info, mesh: mp.ProcessMesh, *, sums_only: bool = False
) -> list[Any]:
    """One placement for each axis, valid for the value."""
    kinds = _reductions(info.dtype, sums_only)
    out: list[Any] = []
    for size in mesh.shape:
        draw = rng.random()
        if info.ndim and draw < 0.55:
            out.append(Shard(rng.randrange(info.ndim), shard_order=rng.choice([0, 0, 0, 1])))
        elif kinds and draw < 0.75:
            kind = rng.choice(kinds)
            out.append(Partial("sum" if kind == "avg" and size == 3 else kind))
        else:
            out.append(Replicate())
    return out


def _reductions(dtype: str, sums_only: bool) -> tuple[str, ...]:
    if dtype == "bool":
        return () if sums_only else ("any", "all")
    if sums_only:
        return ("sum",)
    return ("sum", "sum", "max", "min", *(("avg", "prod") if dtype == "float32" else ()))


def random_value(rng: np.random.Generator, info: Info) -> np.ndarray:
    """Small multiples of 1/4, small integers, or booleans."""
    if info.dtype == "bool":
        return rng.random(info.shape) < 0.5
    if info.dtype == "int32":
        return rng.integers(-5, 6, info.shape).astype(np.int32)
    return (rng.integers(-8, 9, info.shape) / 4).astype(jnp.dtype(info.dtype))


@np.errstate(over="ignore")
def terms(rng: np.random.Generator, value: np.ndarray, kind: str, count: int) -> list[np.ndarray]:
    """Unequal contributions whose reduction is the value.

    Some are neutral elements, and some sums of integers wrap around on the way.
    """
    if kind in ("any", "all"):
        neutral = kind == "all"
        out = rng.random((count, *value.shape)) < 0.5
        keeper = rng.integers(0, count, value.shape)
        here = np.arange(count).reshape(-1, *(1,) * value.ndim) == keeper
        return list(np.where(value == neutral, neutral, np.where(here, value, out)))
    if kind == "prod":
        factors = [rng.choice([1.0, 2.0, 0.5, -1.0], value.shape) for _ in range(count - 1)]
        rest = np.asarray(value, np.float64)
        for factor in factors:
            rest = rest / factor
        return [np.asarray(f, value.dtype) for f in (*factors, rest)]
    if kind in ("max", "min"):
        sign = 1 if kind == "max" else -1
        keeper = rng.integers(0, count, value.shape)
        neutral = identity(mp.ReduceType[f"kRed{kind.title()}"], value.dtype)
        out = []
        for i in range(count):
            nothing = (rng.random(value.shape) < 0.2) | (value == neutral)
            other = (value - sign * rng.integers(1, 4, value.shape)).astype(value.dtype)
            out.append(np.where(keeper == i, value, np.where(nothing, neutral, other)))
        return out
    if value.dtype == np.int32:
        high = 2**31 - 1 if rng.random() < 0.3 else 3
        parts = [rng.integers(-high, high, value.shape, np.int32) for _ in range(count - 1)]
        return [*parts, value - sum(parts, np.zeros_like(value))]
    whole = np.asarray(value, np.float64) * (count if kind == "avg" else 1)
    parts = [rng.integers(-3, 4, value.shape) for _ in range(count - 1)]
    return [np.asarray(t, value.dtype) for t in (*parts, whole - sum(parts))]


# --- the operations -------------------------------------------------------------------------------


class Builder:
    """Draws a program line by line."""

    def __init__(self, rng: random.Random, mesh: str, *, loops: bool = True) -> None:
        self.rng, self.mesh, self.loops = rng, mesh, loops
        self.pool: list[Info] = []
        self.lines: list[Line] = []

    def pick(self, accept: Callable[[Info], bool] = lambda _: True) -> int | None:
        """A value, later ones rather than earlier ones."""
        fitting = [i for i, info in enumerate(self.pool) if accept(info)]
        if not fitting:
            return None
        return max(self.rng.choice(fitting), self.rng.choice(fitting))

    def add(
        self,
        text: str,
        operands: Sequence[int],
        frac: int | None = None,
        mag: int | None = None,
        *,
        structural: bool = False,
    ) -> bool:
        """Adds a line if its result is small enough; structural ones keep the operands' bits."""
        infos = [self.pool[i] for i in operands]
        if structural:
            floats = [i for i in infos if i.is_float] or infos
            known = [i.frac for i in floats]
            frac = None if None in known else max((f for f in known if f is not None), default=0)
            mag = max((i.mag for i in floats), default=1)
        names = [f"v{i}" for i in range(len(operands))]
        code = f"lambda {', '.join(names)}: {text.format(*names)}"
        fn = eval(code, {**NAMES, "mesh": MESHES[self.mesh]})
        structs = [jax.ShapeDtypeStruct(i.shape, jnp.dtype(i.dtype)) for i in infos]
        out = jax.eval_shape(fn, *structs)
        if math.prod(out.shape) > _MAX_ELEMENTS or out.ndim > 4:
            return False
        made = Info(tuple(out.shape), str(out.dtype), frac, 8 if mag is None else mag)
        if made.dtype not in (*FLOATS, "int32", "bool"):
            return False
        if made.is_float and made.mag > 40:
            return False
        self.pool.append(made)
        self.lines.append(Line(text, tuple(operands)))
        return True


def _bits(count: int) -> int:
    return max(count, 1).bit_length()


def _plus(lhs: int | None, rhs: int | None) -> int | None:
    return None if lhs is None or rhs is None else lhs + rhs


def _most(*fracs: int | None) -> int | None:
    return None if None in fracs else max(f for f in fracs if f is not None)


def binary(b: Builder) -> bool:
    lhs = b.pick(lambda i: i.dtype != "bool")
    if lhs is None:
        return False
    mine = b.pool[lhs]

    def fits(i: Info) -> bool:
        pairs = zip(i.shape, mine.shape, strict=False)
        same_rank = i.ndim == mine.ndim and all(s == t or 1 in (s, t) for s, t in pairs)
        inner = i.ndim == mine.ndim - 1 and i.shape == mine.shape[1:]
        return i.dtype == mine.dtype and (i.ndim == 0 or same_rank or inner)

    rhs = b.pick(fits)
    if rhs is None:
        return False
    other = b.pool[rhs]
    name = "{1}[None]" if 0 < other.ndim == mine.ndim - 1 else "{1}"
    both = mine.exact and other.exact
    op = b.rng.choice(["+", "-", "*", *(("max", "min", "<", "==") if both else ()), "/"])
    if b.rng.random() < 0.5 and name == "{1}":
        first, second = name, "{0}"
    else:
        first, second = "{0}", name
    grown = max(mine.mag, other.mag) + 1
    if op in ("max", "min"):
        return b.add(f"jnp.{op}imum({first}, {second})", (lhs, rhs), structural=True)
    if op == "*":
        frac, mag = _plus(mine.frac, other.frac), mine.mag + other.mag
        return b.add(f"{first} * {second}", (lhs, rhs), frac, mag)
    if op == "/":
        if not mine.is_float:
            return b.add(f"{first} // (jnp.abs({second}) % 5 + 1)", (lhs, rhs), 0, grown)
        return b.add(f"{first} / (jnp.abs({second}) + 1.5)", (lhs, rhs), None, grown)
    return b.add(f"{first} {op} {second}", (lhs, rhs), _most(mine.frac, other.frac), grown)


_SMOOTH = {
    "jnp.tanh({0})": 1, "jnp.sin({0})": 1, "jax.nn.sigmoid({0})": 1, "jax.nn.gelu({0})": None,
    "jnp.exp(jnp.clip({0}, -3, 3))": 5, "jnp.log1p(jnp.abs({0}))": None,
    "jnp.sqrt(jnp.abs({0}) + 1)": None, "lax.rsqrt(jnp.abs({0}) + 1)": 1, "jax.nn.softplus({0})": None,
    "lax.erf({0})": 1, "jnp.arctan({0})": 1,
}  # fmt: skip


def unary(b: Builder) -> bool:
    x = b.pick()
    if x is None:
        return False
    info = b.pool[x]
    if info.dtype == "bool":
        texts = ["~{0}", "{0} | True", "{0} ^ True", *["{0} @ {0}.T"] * (info.ndim == 2)]
        return b.add(b.rng.choice(texts), (x,), 0, 1)
    if info.dtype == "int32":
        text = b.rng.choice(
            ["-{0}", "{0} + 3", "7 - {0}", "jnp.abs({0})", "{0} % 3", "{0} * {0}", "{0} << 1",
             "{0} > 1", "{0} & 5", "jnp.sign({0})", "lax.population_count({0})", "{0} // 2",
             "lax.div({0}, jnp.full_like({0}, 3))", "lax.rem({0}, jnp.full_like({0}, 3))"]
        )  # fmt: skip
        return b.add(text, (x,), 0, min(2 * info.mag + 3, 32))
    draw = b.rng.random()
    if draw < 0.35:
        text, mag = b.rng.choice(list(_SMOOTH.items()))
        return b.add(text, (x,), None, mag or info.mag + 1)
    if draw < 0.7 or not info.exact:
        text, more, grown = b.rng.choice(
            [("-{0}", 0, 0), ("{0} * 0.5", 1, 0), ("{0} + 1.5", 1, 1), ("1.5 - {0}", 1, 1),
             ("{0} * {0}", info.frac or 0, info.mag), ("{0} * 3", 0, 2), ("{0} - 2", 0, 1)]
        )  # fmt: skip
        return b.add(text, (x,), _plus(info.frac, max(more, 0)), info.mag + grown)
    text = b.rng.choice(
        ["jnp.floor({0})", "jnp.sign({0})", "jnp.round({0})", "{0} > 0.5", "{0} == 1",
         "jnp.abs({0})", "jax.nn.relu({0})", "jnp.isfinite({0})", "jnp.clip({0}, -1, 1)"]
    )  # fmt: skip
    return b.add(text, (x,), info.frac, info.mag)


def convert(b: Builder) -> bool:
    x = b.pick()
    if x is None:
        return False
    info = b.pool[x]
    to = b.rng.choice(["float32", "bfloat16", "int32"])
    if to == info.dtype or (to == "int32" and not info.exact) or info.mag > 15:
        return False
    text = "jnp.floor({0})" if info.is_float and to == "int32" else "{0}"
    return b.add(f"{text}.astype(jnp.{to})", (x,), info.frac, info.mag)


def reduction(b: Builder) -> bool:
    x = b.pick(lambda i: i.ndim > 0)
    if x is None:
        return False
    info = b.pool[x]
    dims = tuple(sorted(b.rng.sample(range(info.ndim), b.rng.randint(1, info.ndim))))
    count = math.prod(info.shape[d] for d in dims)
    keep = b.rng.choice([", keepdims=True", "", ""])
    tail = f"axis={dims}{keep}"
    if info.dtype == "bool":
        return b.add(f"jnp.{b.rng.choice(['any', 'all', 'sum'])}({{0}}, {tail})", (x,), 0, 10)
    ops = ["sum", "sum", "mean" if info.is_float and count else "sum"]
    if count:
        if info.exact:
            ops += ["max", "min"]
            ops += ["argmax", "argmin"]
        if info.is_float:
            ops += ["logsumexp", "var"]
        if info.dtype == "int32":
            ops += ["bitwise_or.reduce", "bitwise_and.reduce"]
        if count <= 8 and info.mag < 4:
            ops.append("prod")
    op = b.rng.choice(ops)
    if op in ("argmax", "argmin"):
        return b.add(f"jnp.{op}({{0}}, axis={dims[0]}{keep})", (x,), 0, 4)
    if op == "logsumexp":
        return b.add(f"jax.nn.logsumexp({{0}}, {tail})", (x,), None, info.mag + 3)
    if op in ("max", "min"):
        return b.add(f"jnp.{op}({{0}}, {tail})", (x,), structural=True)
    if "bitwise" in op:
        return b.add(f"jnp.{op}({{0}}, axis={dims[0]})", (x,), 0, info.mag)
    if op == "prod":
        return b.add(f"jnp.prod({{0}}, {tail})", (x,), None, info.mag * max(count, 1))
    grown = info.mag + (_bits(count) if op == "sum" else 0)
    frac = info.frac if op == "sum" else None
    return b.add(f"jnp.{op}({{0}}, {tail})", (x,), frac, grown * (2 if op == "var" else 1))


def softmax(b: Builder) -> bool:
    x = b.pick(lambda i: i.is_float and i.ndim > 0 and i.size > 0 and i.mag < 7)
    if x is None:
        return False
    axis = b.rng.randrange(b.pool[x].ndim)
    name = b.rng.choice(["softmax", "log_softmax"])
    return b.add(f"jax.nn.{name}({{0}}, axis={axis})", (x,), None, 4)


def einsum(b: Builder) -> bool:
    lhs = b.pick(lambda i: i.ndim > 0 and i.dtype != "bool")
    if lhs is None:
        return False
    mine = b.pool[lhs]
    rhs = b.pick(lambda i: i.dtype == mine.dtype and bool({*i.shape} & {*mine.shape}))
    if rhs is None:
        return False
    other = b.pool[rhs]
    left = list("pqrs"[: mine.ndim])
    right = list("uvwx"[: other.ndim])
    out: list[str] = []
    contracted = 1
    for j, size in enumerate(other.shape):
        match = [i for i, s in enumerate(mine.shape) if s == size and left[i] not in right]
        if match and b.rng.random() < 0.75:
            i = b.rng.choice(match)
            right[j] = left[i]
            if b.rng.random() < 0.4:
                out.append(left[i])
            else:
                contracted *= size
    out += [c for c in (*left, *right) if (c in left) != (c in right)]
    b.rng.shuffle(out)
    equation = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
    frac, mag = _plus(mine.frac, other.frac), mine.mag + other.mag + _bits(contracted)
    return b.add(f"jnp.einsum('{equation}', {{0}}, {{1}})", (lhs, rhs), frac, mag)


def _factored(rng: random.Random, size: int) -> list[int]:
    dims: list[int] = []
    while size > 1 and len(dims) < 2:
        part = rng.choice([d for d in range(1, size + 1) if size % d == 0])
        dims.append(part)
        size //= part
    return [*dims, size]


def shape(b: Builder) -> bool:
    x = b.pick()
    if x is None:
        return False
    info = b.pool[x]
    if b.rng.random() < 0.5:
        if info.ndim >= 2 and b.rng.random() < 0.5:
            at = b.rng.randrange(info.ndim - 1)
            merged = info.shape[at] * info.shape[at + 1]
            new = (*info.shape[:at], merged, *info.shape[at + 2 :])
        elif info.ndim and info.size and b.rng.random() < 0.6:
            at = b.rng.randrange(info.ndim)
            new = (*info.shape[:at], *_factored(b.rng, info.shape[at]), *info.shape[at + 1 :])
        elif info.size:
            new = tuple(_factored(b.rng, info.size))
        else:
            return False
        return b.add(f"{{0}}.reshape({tuple(new)})", (x,), structural=True)
    if not info.ndim:
        size = b.rng.randint(1, 5)
        return b.add(f"jnp.broadcast_to({{0}}, ({size},))", (x,), structural=True)
    at = b.rng.randrange(info.ndim)
    perm = list(range(info.ndim))
    b.rng.shuffle(perm)
    texts = [
        f"jnp.transpose({{0}}, {tuple(perm)})",
        f"jnp.expand_dims({{0}}, {at})",
        f"jnp.flip({{0}}, {at})",
        f"jnp.roll({{0}}, {b.rng.randint(-3, 3)}, {at})",
        f"jnp.repeat({{0}}, 2, axis={at})",
        f"jnp.broadcast_to({{0}}[None], (3, *{info.shape}))",
        f"jnp.concatenate([{{0}}, {{0}}], {at})",
        f"jnp.stack([{{0}}, {{0}}], {at})",
        f"jnp.tile({{0}}, {(1,) * (info.ndim - 1) + (2,)})",
    ]
    return b.add(b.rng.choice(texts), (x,), structural=True)


def slicing(b: Builder) -> bool:
    x = b.pick(lambda i: i.ndim > 0 and i.size > 0)
    if x is None:
        return False
    info = b.pool[x]
    at = b.rng.randrange(info.ndim)
    size = info.shape[at]
    start = b.rng.randrange(size)
    stop = b.rng.randint(start + 1, size)
    before = ":, " * at
    zero = "False" if info.dtype == "bool" else "0"
    pads = [(0, 0, 0)] * info.ndim
    pads[at] = (b.rng.randint(-1, 2), b.rng.randint(0, 2), b.rng.randint(0, 1))
    texts = [
        f"{{0}}[{before}{start}:{stop}]",
        f"{{0}}[{before}{start}:{stop}:2]",
        f"{{0}}[{before}{start}]",
        f"lax.pad({{0}}, jnp.asarray({zero}, {{0}}.dtype), {pads})",
        f"{{0}}.at[{before}{start}:{stop}].set({zero})",
        f"{{0}}.at[{before}{start}].set({zero})",
        f"lax.dynamic_slice_in_dim({{0}}, {start}, {stop - start}, {at})",
    ]
    return b.add(b.rng.choice(texts), (x,), structural=True)


def dynamic(b: Builder) -> bool:
    x = b.pick(lambda i: i.ndim > 0 and i.size > 0)
    index = b.pick(lambda i: i.dtype == "int32" and i.ndim == 0)
    if x is None or index is None:
        return False
    info = b.pool[x]
    at = b.rng.randrange(info.ndim)
    size = b.rng.randint(1, info.shape[at])
    piece = f"lax.dynamic_slice_in_dim({{0}}, {{1}}, {size}, {at})"
    texts = [piece, f"lax.dynamic_update_slice_in_dim({{0}}, {piece} * 2, {{1}} // 2, {at})"]
    if info.dtype == "bool":
        texts.pop()
    text = b.rng.choice(texts)
    return b.add(text, (x, index), info.frac, info.mag + 1)


def join(b: Builder) -> bool:
    lhs = b.pick(lambda i: i.ndim > 0)
    if lhs is None:
        return False
    mine = b.pool[lhs]
    at = b.rng.randrange(mine.ndim)

    def fits(i: Info) -> bool:
        return (i.dtype, i.ndim) == (mine.dtype, mine.ndim) and all(
            d == at or s == t for d, (s, t) in enumerate(zip(i.shape, mine.shape, strict=True))
        )

    rhs = b.pick(fits)
    if rhs is None:
        return False
    return b.add(f"jnp.concatenate([{{0}}, {{1}}], {at})", (lhs, rhs), structural=True)


def indexing(b: Builder) -> bool:
    x = b.pick(lambda i: i.ndim > 0 and i.size > 0)
    ids = b.pick(lambda i: i.dtype == "int32" and 0 < i.ndim < 3)
    if x is None or ids is None:
        return False
    info, where = b.pool[x], b.pool[ids]
    at = b.rng.randrange(info.ndim)
    mode = b.rng.choice(["clip", "wrap", "fill"])
    fill = ", fill_value=0" if mode == "fill" else ""
    texts = [f"jnp.take({{0}}, {{1}}, axis={at}, mode='{mode}'{fill})"]
    if info.ndim == where.ndim and all(
        d == at or s == t for d, (s, t) in enumerate(zip(info.shape, where.shape, strict=True))
    ):
        texts.append(f"jnp.take_along_axis({{0}}, {{1}}, axis={at}, mode='clip')")
    if at == 0:  # whose indices jnp promises to be in bounds
        texts.append("{0}[{1}]")
    text = b.rng.choice(texts)
    return b.add(text, (x, ids), info.frac, info.mag)


def scatter(b: Builder) -> bool:
    x = b.pick(lambda i: i.ndim > 0 and i.size > 0 and i.dtype != "bool")
    ids = b.pick(lambda i: i.dtype == "int32" and i.ndim == 1)
    if x is None or ids is None:
        return False
    info, where = b.pool[x], b.pool[ids]
    count = where.size
    op = b.rng.choice(["add", "add", "max", "min"])
    if op != "add" and not info.exact:
        op = "add"
    updates = b.pick(
        lambda i: i.dtype == info.dtype and i.shape == (count, *info.shape[1:])
        and (op == "add" or i.exact)
    )  # fmt: skip
    if b.rng.random() < 0.3:
        depth = b.rng.randint(1, 6)
        return b.add(f"jax.nn.one_hot({{0}}, {depth})", (ids,), 0, 1)
    if updates is None:
        value = b.rng.choice([1, 2])
        return b.add(f"{{0}}.at[{{1}}].{op}({value})", (x, ids), info.frac, info.mag + _bits(count))
    more = b.pool[updates]
    return b.add(
        f"{{0}}.at[{{1}}].{op}({{2}})",
        (x, ids, updates),
        _most(info.frac, more.frac),
        max(info.mag, more.mag) + _bits(count),
    )


def scans(b: Builder) -> bool:
    x = b.pick(lambda i: i.ndim > 0 and i.dtype != "bool")
    if x is None:
        return False
    info = b.pool[x]
    at = b.rng.randrange(info.ndim)
    reverse = b.rng.choice(["True", "False"])
    ops = ["cumsum", "cumsum"]
    if info.exact:
        ops += ["cummax", "cummin"]
    if info.is_float and info.mag < 6:
        ops.append("cumlogsumexp")
    if info.mag < 3:
        ops.append("cumprod")
    op = b.rng.choice(ops)
    grown = info.mag * info.shape[at] if op == "cumprod" else info.mag + _bits(info.shape[at])
    frac = None if op in ("cumlogsumexp", "cumprod") else info.frac
    return b.add(f"lax.{op}({{0}}, axis={at}, reverse={reverse})", (x,), frac, grown)


def ordering(b: Builder) -> bool:
    x = b.pick(lambda i: i.ndim > 0 and i.exact and i.dtype != "bool")
    if x is None:
        return False
    info = b.pool[x]
    at = b.rng.randrange(info.ndim)
    texts = [f"jnp.sort({{0}}, axis={at})", f"jnp.argsort({{0}}, axis={at})"]
    if info.shape[-1] >= 1:
        k = b.rng.randint(1, info.shape[-1])
        texts += [f"lax.top_k({{0}}, {k})[{part}]" for part in (0, 1)]
    return b.add(b.rng.choice(texts), (x,), info.frac, info.mag)


def select(b: Builder) -> bool:
    cond = b.pick(lambda i: i.dtype == "bool")
    if cond is None:
        return False
    shape = b.pool[cond].shape
    x = b.pick(lambda i: i.shape == shape and i.dtype != "bool")
    if x is None:
        return False
    info = b.pool[x]
    y = b.pick(lambda i: i.shape == shape and i.dtype == info.dtype)
    if y is None or b.rng.random() < 0.3:
        return b.add("jnp.where({0}, {1}, 3)", (cond, x), info.frac, info.mag + 2)
    return b.add("jnp.where({0}, {1}, {2})", (cond, x, y), structural=True)


def fresh(b: Builder) -> bool:
    shape = tuple(b.rng.choice([1, 2, 3, 4, 6, 7, 8]) for _ in range(b.rng.randint(1, 2)))
    key = f"jax.random.key({b.rng.randint(0, 9)})"
    text, frac, mag = b.rng.choice(
        [
            (f"jnp.arange({shape[0]})", 0, 4),
            (f"lax.broadcasted_iota(jnp.float32, {shape}, {len(shape) - 1})", 0, 4),
            (f"jnp.full({shape}, 1.5)", 1, 1),
            (f"jnp.eye({shape[0]})", 0, 1),
            (f"jax.random.normal({key}, {shape})", None, 3),
            (f"jax.random.uniform({key}, {shape})", None, 1),
            (f"jax.random.randint({key}, {shape}, -4, 5)", 0, 3),
            (f"jax.random.bernoulli({key}, 0.5, {shape})", 0, 1),
        ]
    )
    return b.add(text, (), frac, mag)


def dropout(b: Builder) -> bool:
    x = b.pick(lambda i: i.is_float and i.ndim > 0)
    if x is None:
        return False
    info = b.pool[x]
    mask = f"jax.random.bernoulli(jax.random.key({b.rng.randint(0, 9)}), 0.5, {{0}}.shape)"
    return b.add(f"jnp.where({mask}, {{0}} / 0.5, 0)", (x,), info.frac, info.mag + 1)


def annotation(b: Builder) -> bool:
    x = b.pick()
    if x is None:
        return False
    info = b.pool[x]
    mesh = MESHES[b.mesh]
    # The contributions of a pending float sum are the plan's own: any reduction may be asked.
    placements = random_placements(b.rng, info, mesh, sums_only=b.rng.random() < 0.7)
    placements = [
        Replicate() if str(p) in ("Partial(ReduceType.kRedProd)", "Partial(ReduceType.kRedAvg)")
        and not info.is_float else p for p in placements
    ]  # fmt: skip
    name = b.rng.choice(["shard_tensor", "reshard"])
    text = f"mp.{name}({{0}}, mesh, {placements})"
    return b.add(text, (x,), structural=True)


def convolution(b: Builder) -> bool:
    x = b.pick(lambda i: i.is_float and i.ndim == 3 and i.size > 0)
    if x is None:
        return False
    info = b.pool[x]
    width = b.rng.randint(1, 3)
    features = b.rng.randint(1, 4)
    padding = b.rng.choice(["SAME", "VALID"])
    if padding == "VALID" and info.shape[2] < width:
        return False
    kernel = f"jnp.full(({features}, {info.shape[1]}, {width}), 0.5, {{0}}.dtype)"
    strides = b.rng.choice([1, 1, 2])
    text = f"lax.conv_general_dilated({{0}}, {kernel}, ({strides},), '{padding}')"
    grown = info.mag + _bits(info.shape[1] * width)
    return b.add(text, (x,), _plus(info.frac, 1), grown)


def windows(b: Builder) -> bool:
    x = b.pick(lambda i: i.dtype == "float32" and i.ndim == 2 and i.size > 0 and i.exact)
    if x is None:
        return False
    info = b.pool[x]
    start, op = b.rng.choice([("0.0", "lax.add"), ("-jnp.inf", "lax.max")])
    text = f"lax.reduce_window({{0}}, {start}, {op}, (1, 2), (1, {b.rng.randint(1, 2)}), 'SAME')"
    return b.add(text, (x,), info.frac, info.mag + 1)


def control(b: Builder) -> bool:
    if not b.loops:
        return False
    x = b.pick(lambda i: i.is_float and i.mag < 8)
    if x is None:
        return False
    info = b.pool[x]
    y = b.pick(lambda i: (i.dtype, i.shape) == (info.dtype, info.shape))
    xs = b.pick(lambda i: i.dtype == info.dtype and i.shape[1:] == info.shape and i.ndim > 0)
    operands = [x, y if y is not None else x]
    texts = [
        "lax.fori_loop(0, 3, lambda i, c: c * 0.5 + {1}, {0})",
        "lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] - {1}), (0, {0}))[1]",
        "lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, {1}, c[1]), (0, {0}, {1}))[1]",
        "jax.checkpoint(lambda a, b: jnp.sin(a) * b)({0}, {1})",
        "jax.grad(lambda a: (jax.checkpoint(jnp.tanh)(a) * {1}).sum())({0})",
        "lax.fori_loop(0, 2, lambda i, c: c + c.sum() * 0.25, {0})",
    ]
    if info.exact:
        texts += [
            "lax.cond({0}.sum() > 0, lambda a, b: a + b, lambda a, b: a - 2 * b, {0}, {1})",
            "lax.switch(jnp.floor({0}.sum()).astype(jnp.int32) % 3, [lambda a: a, lambda a: -a, "
            "lambda a: a * 0 + a.sum()], {1})",
        ]
    if xs is not None:
        operands.append(xs)
        carry = b.rng.choice(["c * 0.5 + x", "c + {1}", "x", "c + x.sum() * 0.125"])
        stacked = b.rng.choice(["c * x", "x.sum()", "c.sum()", "jnp.tanh(x)"])
        part, reverse = b.rng.randint(0, 1), b.rng.choice(["", ", reverse=True"])
        texts += [f"lax.scan(lambda c, x: ({carry}, {stacked}), {{0}}, {{2}}{reverse})[{part}]"] * 4
        texts.append(
            "jax.grad(lambda a: lax.scan(lambda c, x: (jnp.sin(c) * x, c), a, {2})[1].sum())({0})"
        )
    text = b.rng.choice(texts)
    used = [n for i, n in enumerate(operands) if f"{{{i}}}" in text]
    for new, old in enumerate(i for i in range(len(operands)) if f"{{{i}}}" in text):
        text = text.replace(f"{{{old}}}", f"{{{new}}}")
    return b.add(text, used, None, info.mag + 6)


def gradient(b: Builder) -> bool:
    x = b.pick(lambda i: i.is_float and i.mag < 6)
    if x is None:
        return False
    info = b.pool[x]
    y = b.pick(lambda i: (i.dtype, i.shape) == (info.dtype, info.shape))
    other = x if y is None else y
    texts = ["(jnp.tanh(a) * {1}).sum()", "(a * a * {1}).sum()", "(a.sum() * {1}).sum()"]
    if info.ndim and info.size:
        at = b.rng.randrange(info.ndim)
        texts += [
            f"(jax.nn.softmax(a, {at}) * {{1}}).sum()",
            f"(jnp.cumsum(a, {at}) * {{1}}).sum()",
            f"jnp.sin(jnp.take(a, jnp.array([0, 0, 1]), {at}, mode='clip')).sum()",
            f"(jnp.flip(a, {at}) * {{1}}).sum()",
            f"jnp.square(jnp.concatenate([a, {{1}}], {at})).sum()",
            f"jax.nn.logsumexp(a, {at}).sum()",
            f"(jnp.linalg.norm(a + 3, axis={at})).sum()",
        ]
        if info.exact:
            texts += [f"jnp.max(a, {at}).sum()", f"(jnp.sort(a, {at}) * {{1}}).sum()"]
    loss = b.rng.choice(texts)
    operands = (x, other) if "{1}" in loss else (x,)
    return b.add(f"jax.grad(lambda a: {loss})({{0}})", operands, None, 2 * info.mag + 8)


OPERATIONS: Mapping[Callable[[Builder], bool], int] = {
    binary: 6, unary: 4, convert: 1, reduction: 6, softmax: 1, einsum: 4, shape: 6, slicing: 4,
    dynamic: 2, join: 3, indexing: 3, scatter: 3, scans: 3, ordering: 2, select: 2, fresh: 1,
    dropout: 1, annotation: 4, convolution: 2, windows: 1, control: 3, gradient: 3,
}  # fmt: skip


def random_program(rng: random.Random, mesh: str, *, loops: bool = True) -> RandomProgram:
    """Draws a program for a mesh.

    Args:
      rng: all randomness comes from it.
      mesh: a key of `MESHES`.
      loops: whether it may contain control flow.
    """
    builder = Builder(rng, mesh, loops=loops)
    dims = [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 4, *([0] if rng.random() < 0.1 else [])]
    common = rng.choice(dims)
    for _ in range(rng.randint(2, 4)):
        rank = rng.choice([0, 1, 2, 2, 3])
        shape = tuple(rng.choice([common, rng.choice(dims)]) for _ in range(rank))
        dtype = rng.choice(["float32", "float32", "float32", "int32", "bool", "bfloat16"])
        is_float = dtype in FLOATS
        builder.pool.append(Info(shape, dtype, 2 if is_float else 0, 2 if is_float else 3))
    inputs = tuple(builder.pool)
    count, wanted = len(inputs), rng.randint(3, 12)
    operations, weights = list(OPERATIONS), list(OPERATIONS.values())
    for _ in range(4 * wanted):
        if len(builder.lines) >= wanted:
            break
        rng.choices(operations, weights)[0](builder)
    made = range(count, count + len(builder.lines))
    used = {n for line in builder.lines for n in line.operands}
    outputs = tuple(i for i in made if i not in used) or (0,)
    on = MESHES[mesh]
    program = RandomProgram(
        mesh,
        inputs,
        tuple(None if rng.random() < 0.15 else random_placements(rng, info, on) for info in inputs),
        tuple(builder.lines),
        outputs,
        tuple(
            random_placements(rng, builder.pool[i], on, sums_only=True)
            if rng.random() < 0.5
            else None
            for i in outputs
        ),
        rng.random() < 0.15,
        rng.randrange(10**6),
    )
    return needed_only(program)
