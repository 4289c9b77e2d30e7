"""A program in two halves: what some outputs need, and the rest.

For the backward pass of a stage the halves are I, which makes the gradient of the stage's input,
and W, which makes those of its parameters. Nothing is computed twice but what is cheaper to compute
again than to keep: changes of shape or type, and what depends on parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshpar.compiler.program import Constant, Node, Program, Ref
from meshpar.schedules.executors.evaluate import depending_on, named, splice, values_of
from meshpar.schedules.executors.loops import LoopHalves, is_loop

__all__ = ["Halves", "split"]

# Their results hold nothing that their one operand does not.
_RESHAPING = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "reshape"}
    | {"squeeze", "transpose"}
)


@dataclass(frozen=True, slots=True)
class Halves:
    """A program in two.

    Args:
      first: takes all inputs; returns the outputs wanted of it, then the values of `cut`.
      second: takes the inputs that are not private, then the values of `cut`; returns the outputs
        wanted of it.
      cut: the values that the first half leaves for the second.
    """

    first: Program
    second: Program
    cut: tuple[int, ...]


def split(
    program: Program,
    first: Sequence[int],
    second: Sequence[int],
    *,
    private: Collection[int] = (),
    free: Collection[int] = (),
) -> Halves:
    """Cuts a program in two; loops (`scan`) are cut through.

    Args:
      program: without calls (`without_calls`). It stays as it is.
      first: the positions of the outputs that the first half makes, with what they need only.
      second: the positions of those that the second half makes.
      private: inputs, by their numbers, that the second half does not get.
      free: inputs, by their numbers; what depends on nothing else is computed in both halves rather
        than kept.
    """
    return _Splitter(program, first, second, private, free).halves()


class _Splitter:
    """One split: first what each half needs, from the end, then the halves, from the beginning."""

    def __init__(
        self,
        program: Program,
        first: Sequence[int],
        second: Sequence[int],
        private: Collection[int],
        free: Collection[int],
    ) -> None:
        self.program = program
        self.wanted = tuple([program.outputs[i] for i in half] for half in (first, second))
        self.private = set(private)
        self.bound = depending_on(program, [i for i in program.inputs if i not in free])
        # The operations of each half by position; loops apart, in one or two (done in both) splits.
        self.whole: tuple[set[int], set[int]] = set(), set()
        self.loops: dict[int, list[LoopHalves]] = {}
        self.kept: set[int] = set()  # values that the first half makes, or has alone

    def halves(self) -> Halves:
        self._need_in_first()
        self._need_in_second()
        avals, constants = list(self.program.avals), dict(self.program.constants)
        halves = Program(avals, (), constants), Program(avals, (), constants)
        names: tuple[dict[int, Ref], dict[int, Ref]] = {}, {}
        stacked: list[int] = []
        for position, node in enumerate(self.program.nodes):
            for half, program in enumerate(halves):
                if position in self.whole[half]:
                    ins = tuple(named(ref, names[half]) for ref in node.ins)
                    program.nodes.append(replace(node, ins=ins))
            for loop in self.loops.get(position, ()):
                stacked += _emit(loop, halves, names)
        first, second = halves
        cut = (*sorted(self.kept), *stacked)
        first.inputs = self.program.inputs
        first.outputs = tuple(named(ref, names[0]) for ref in (*self.wanted[0], *cut))
        second.inputs = (*(i for i in self.program.inputs if i not in self.private), *cut)
        second.outputs = tuple(named(ref, names[1]) for ref in self.wanted[1])
        return Halves(first, second, cut)

    def _need_in_first(self) -> None:
        needed = values_of(self.wanted[0])
        for position in reversed(range(len(self.program.nodes))):
            node = self.program.nodes[position]
            outs = {k for k, value in enumerate(node.outs) if value in needed}
            if outs and is_loop(node):
                loop = LoopHalves.of(node, split, outs, (), self._free_operands(node))
                self.loops[position] = [loop]
                needed |= values_of(loop.operands(0))
            elif outs or node.eqn.effects:
                self.whole[0].add(position)
                needed |= values_of(node.ins)

    def _need_in_second(self) -> None:
        needed = values_of(self.wanted[1])
        for position in reversed(range(len(self.program.nodes))):
            node = self.program.nodes[position]
            outs = {k for k, value in enumerate(node.outs) if value in needed}
            if outs and is_loop(node):
                needed |= values_of(self._second_loop(position, node, outs))
            elif outs and (position not in self.whole[0] or self._again(node)):
                self.whole[1].add(position)
                needed |= values_of(node.ins)
            else:
                self.kept |= {node.outs[k] for k in outs}
        self.kept |= needed & self.private

    def _second_loop(self, position: int, node: Node, outs: set[int]) -> tuple[Ref, ...]:
        """Splits a loop for the second half; what that half takes of its operands."""
        made = self.loops.get(position, [])
        free = self._free_operands(node)
        if made and self.bound.isdisjoint(values_of(node.ins)):
            loop = LoopHalves.of(node, split, (), outs, free)
            made.append(loop)
            return loop.operands(1)
        first = made[0].first if made else ()
        self.kept |= {node.outs[k] for k in outs if k in first}
        rest = outs - set(first)
        if not rest:
            return ()
        loop = LoopHalves.of(node, split, first, rest, free)
        self.loops[position] = [loop]
        return loop.operands(1)

    def _again(self, node: Node) -> bool:
        """Whether an operation of the first half is done again in the second."""
        operands = values_of(node.ins)
        if self.bound.isdisjoint(operands):
            return True
        if node.name not in _RESHAPING or len(operands) != 1:
            return False
        return self._bytes(next(iter(operands))) <= self._bytes(node.outs[0])

    def _bytes(self, value: int) -> int:
        aval = self.program.avals[value]
        return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize

    def _free_operands(self, node: Node) -> set[int]:
        return {
            k
            for k, ref in enumerate(node.ins)
            if isinstance(ref, Constant) or ref not in self.bound
        }


def _emit(
    loop: LoopHalves,
    halves: tuple[Program, Program],
    names: tuple[dict[int, Ref], dict[int, Ref]],
) -> list[int]:
    """Appends the halves of a loop; the stacked values that go from one to the other."""
    stacked: list[int] = []
    for half, outs in enumerate((loop.first, loop.second)):
        if not outs and not (half == 0 and loop.halves.cut):
            continue
        program = halves[half]
        operands = [named(ref, names[half]) for ref in (*loop.operands(half), *stacked * half)]
        inner = loop.program(half, [program.aval(ref) for ref in operands])
        results = splice(program, inner, operands)
        names[half].update(zip((loop.node.outs[k] for k in outs), results, strict=False))
        for result in results[len(outs) :]:
            value = program.new(program.aval(result))
            names[0][value] = result
            stacked.append(value)
    return stacked
