"""The local program: what each device runs, with explicit collectives, inside `shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ref import AbstractRef

from meshpar._jax import bind_at, bind_call, eval_manual
from meshpar.compiler.planned import Move, PlannedNode, PlannedProgram, in_buckets
from meshpar.compiler.program import Constant, Ref
from meshpar.placements.apply_bucket import apply_bucket
from meshpar.placements.apply_steps import apply_steps, extreme
from meshpar.placements.axis_position import axis_position
from meshpar.placements.blocks import local_shape, shards_on
from meshpar.placements.layout import Layout
from meshpar.placements.reductions import identity, reduce_stacked
from meshpar.placements.search import planned_steps
from meshpar.placements.types import ReduceType
from meshpar.rules.rule import Rule

__all__ = ["run_local", "run_node"]

Shape = tuple[int, ...]


def run_local(planned: PlannedProgram, *blocks: jax.Array) -> list[jax.Array]:
    """Runs a planned program on the blocks of this device, inside `shard_map` over the whole mesh.

    Args:
      planned: the program with its layouts.
      *blocks: the block of each argument; a pending reduction has no dim.

    Returns:
      The block of each output.
    """
    env = _Blocks(planned)
    for number, layout, block in zip(planned.program.inputs, planned.inputs, blocks, strict=True):
        env.store(number, layout, block)
    for number, value in planned.program.constants.items():
        env.store(number, Layout.replicated(jnp.ndim(value)), value)
    for node in planned.nodes:
        env.move(node.moves)
        ins = [
            env.block(ref, layout) for ref, layout in zip(node.node.ins, node.operands, strict=True)
        ]
        outs = run_node(planned, node, ins)
        for number, layout, block in zip(node.node.outs, node.results, outs, strict=True):
            env.store(number, layout, block)
    env.move(planned.moves)
    return [
        jnp.asarray(env.block(ref, layout))
        for ref, layout in zip(planned.program.outputs, planned.outputs, strict=True)
    ]


class _Blocks:
    """The blocks that this device has: for each value one per layout in which it is there."""

    def __init__(self, planned: PlannedProgram) -> None:
        self._planned, self._program, self._sizes = planned, planned.program, planned.sizes
        self._blocks: dict[tuple[int, Layout], jax.Array] = {}

    def store(self, value: int, layout: Layout, block: Any) -> None:
        expected = local_shape(tuple(self._program.aval(value).shape), layout, self._sizes)
        assert jnp.shape(block) == expected, (
            f"a block of {jnp.shape(block)}, not {expected}, for {self._program.aval(value)} as "
            f"{layout}: a rule or a reshard is wrong"
        )
        self._blocks[value, layout] = block

    def move(self, moves: Sequence[Move]) -> None:
        for together in in_buckets(moves):
            blocks = [self._blocks[move.value, move.src] for move in together]
            if len(together) == 1:
                (move,) = together
                turned = [self._turned(self._program.aval(move.value), blocks[0], move)]
            else:
                steps = [self._planned.steps(move)[0] for move in together]
                shapes = [tuple(self._program.aval(m.value).shape) for m in together]
                turned = apply_bucket(blocks, steps, shapes, self._sizes)
            for move, block in zip(together, turned, strict=True):
                self.store(move.value, move.dst, block)

    def block(self, ref: Ref, layout: Layout) -> Any:
        if not isinstance(ref, Constant):
            return self._blocks[ref, layout]
        if layout.is_replicated:
            return ref.value
        source = Layout.replicated(ref.aval.ndim)
        whole = jnp.asarray(ref.value, ref.aval.dtype)
        return self._turned(ref.aval, whole, Move(-1, source, layout))

    def _turned(self, aval: Any, block: jax.Array, move: Move) -> jax.Array:
        shape = tuple(aval.shape)
        steps = planned_steps(move.src, move.dst, shape, aval.dtype, self._sizes)
        return apply_steps(block, steps, shape, self._sizes)


def run_node(planned: PlannedProgram, node: PlannedNode, ins: list[Any]) -> Sequence[Any]:
    """Runs one operation on the blocks of its operands, inside `shard_map`."""
    if node.bodies:
        return _run_control_flow(node, ins)
    if node.why == "annotation":
        return ins
    if node.why == "manual":
        return eval_manual(node.node.eqn, ins)
    rule = node.rule
    if rule is None:
        if node.node.eqn.effects:
            return _run_once(planned, node, ins)
        return bind_at(node.node.eqn, *ins)
    emission = _Emission(planned, node, rule)
    ins = [emission.masked(i, block) for i, block in enumerate(ins)]
    if rule.emit is not None:
        out = rule.emit(emission, *ins)
        return out if isinstance(out, (list, tuple)) else [out]
    return emission.bind(*ins)


def _run_once(planned: PlannedProgram, node: PlannedNode, ins: list[Any]) -> Sequence[Any]:
    """An effect happens on the first device only, as on one device; the others get its results."""
    axes = tuple(planned.sizes)
    avals = [planned.program.avals[value] for value in node.node.outs]
    if any(isinstance(aval, AbstractRef) for aval in avals):
        raise NotImplementedError(
            f"{node.node.name} inside mp.jit, at {node.node.where}: references that are written to "
            "are not partitioned; write code that returns the new values instead"
        )
    first = sum(axis_position(axis) for axis in axes) == 0
    out = lax.cond(
        first,
        lambda: bind_at(node.node.eqn, *ins),
        lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in avals],
    )
    return [lax.psum(x, axes) if x.dtype != jnp.bool_ else lax.pmax(x, axes) for x in out]


class _Emission:
    """Where a rule's local program runs: its factors, and the devices along them."""

    def __init__(self, planned: PlannedProgram, node: PlannedNode, rule: Rule) -> None:
        self._sizes, self._node, self._rule = planned.sizes, node, rule
        self._program = planned.program

    @property
    def params(self) -> dict[str, Any]:
        return self._node.node.params

    def bind(self, *operands: Any, **changed: Any) -> list[Any]:
        params = {**self.params, **changed}
        if self._rule.local is not None and not changed:
            outs = [
                local_shape(tuple(self._program.avals[value].shape), layout, self._sizes)
                for value, layout in zip(self._node.node.outs, self._node.results, strict=True)
            ]
            params = self._rule.local(params, [jnp.shape(x) for x in operands], outs)
        return bind_at(self._node.node.eqn, *operands, **params)

    def is_cut(self, factor: str) -> bool:
        return bool(self._node.axes.get(factor))

    def size(self, factor: str) -> int:
        return self._rule.sizes[factor]

    def local_size(self, factor: str) -> int:
        return -(-self.size(factor) // shards_on(self._node.axes.get(factor, ()), self._sizes))

    def start(self, factor: str) -> jax.Array:
        return self._range(factor)[0]

    def valid(self, factor: str) -> jax.Array:
        start, stop = self._range(factor)
        return stop - start

    def _range(self, factor: str, size: int | None = None) -> tuple[jax.Array, jax.Array]:
        block = self.size(factor) if size is None else size
        start, stop = jnp.int32(0), jnp.int32(block)
        for axis in self._node.axes.get(factor, ()):
            block = -(-block // self._sizes[axis])
            start = jnp.minimum(start + axis_position(axis).astype(jnp.int32) * block, stop)
            stop = jnp.minimum(start + block, stop)
        return start, stop

    def all_reduce(self, x: jax.Array, factor: str, kind: ReduceType) -> jax.Array:
        axes = self._node.axes[factor]
        reducers: dict[ReduceType, Callable[..., jax.Array]] = {
            ReduceType.kRedSum: lax.psum,
            ReduceType.kRedMax: partial(extreme, largest=True),
            ReduceType.kRedMin: partial(extreme, largest=False),
        }
        if kind in reducers:
            return reducers[kind](x, axes)
        return reduce_stacked(kind, self.all_gather(x, factor), 0)

    def all_gather(self, x: jax.Array, factor: str) -> jax.Array:
        return lax.all_gather(x, self._node.axes[factor])

    def ranges(self, factor: str, size: int) -> tuple[tuple[int, int], ...]:
        out = [(0, size)]
        block = size
        for axis in self._node.axes.get(factor, ()):
            block = -(-block // self._sizes[axis])
            out = [
                (min(start + i * block, stop), min(start + (i + 1) * block, stop))
                for start, stop in out
                for i in range(self._sizes[axis])
            ]
        return tuple(out)

    def position(self, factor: str) -> jax.Array:
        return axis_position(self._node.axes[factor])

    def permute(self, x: jax.Array, factor: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        axes = self._node.axes[factor]
        # lax.ppermute counts devices in the order of the mesh, whatever the order of its axes.
        in_mesh_order = tuple(axis for axis in self._sizes if axis in axes)
        places = np.arange(shards_on(axes, self._sizes)).reshape([self._sizes[a] for a in axes])
        order = np.argsort(places.transpose([axes.index(a) for a in in_mesh_order]).ravel())
        return lax.ppermute(x, in_mesh_order, [(int(order[s]), int(order[r])) for s, r in pairs])

    def masked(self, position: int, block: Any) -> Any:
        """The operand with the padding of dims that are reduced set to the reduction's identity."""
        shape = self._program.aval(self._node.node.ins[position]).shape
        for dim, names in enumerate(self._rule.operands[position]):
            for factor in names:
                axes = self._node.axes.get(factor, ())
                kind = self._rule.reduce.get(factor)
                # Where a dim has several factors they are even, or its size is that of the one.
                if kind is None or not shape[dim] % shards_on(axes, self._sizes):
                    continue
                rows = lax.broadcasted_iota(jnp.int32, jnp.shape(block), dim)
                start, stop = self._range(factor, shape[dim])
                neutral = jnp.asarray(identity(kind, block.dtype))
                block = jnp.where(rows < stop - start, block, neutral)
        return block


def _run_control_flow(node: PlannedNode, ins: list[Any]) -> Sequence[Any]:
    bodies = node.node.bodies
    assert bodies is not None, "control flow has bodies"
    locals_ = [_local_function(body) for body in node.bodies]
    if bodies.kind == "scan":
        return _run_scan(node, locals_[0], ins)
    if bodies.kind == "while":
        consts, more = bodies.consts
        test, body = locals_
        head, mid, carry = ins[:consts], ins[consts : consts + more], ins[consts + more :]
        return lax.while_loop(
            lambda c: test(*head, *c)[0], lambda c: body(*mid, *c), [jnp.asarray(c) for c in carry]
        )
    if bodies.kind == "cond":
        return lax.switch(ins[0], locals_, *ins[1:])
    return bind_call(node.node.eqn, locals_[0], ins)


def _run_scan(node: PlannedNode, body: Callable[..., list[Any]], ins: list[Any]) -> Sequence[Any]:
    bodies, params = node.node.bodies, node.node.params
    assert bodies is not None, "a scan has a body"
    (consts,), carried = bodies.consts, bodies.carry
    fixed, carry, xs = ins[:consts], ins[consts : consts + carried], ins[consts + carried :]

    def turn(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*fixed, *state, *slices)
        return out[:carried], out[carried:]

    state, stacked = lax.scan(
        turn,
        [jnp.asarray(c) for c in carry],
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*state, *stacked]


def _local_function(planned: PlannedProgram) -> Callable[..., list[Any]]:
    return lambda *blocks: run_local(planned, *blocks)
