"""A program with a layout for every value: what propagation makes and partitioning runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from meshpar.compiler.options import Wished
from meshpar.compiler.program import Node, Program, Ref
from meshpar.placements.layout import Layout
from meshpar.placements.search import planned_steps
from meshpar.placements.steps import Step
from meshpar.rules.rule import Rule

__all__ = ["Asked", "Move", "PlannedNode", "PlannedProgram", "in_buckets"]


Asked = tuple[tuple[tuple[Layout, ...], ...], tuple[Wished, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Move:
    """A value that is turned from a layout in which it is there into another.

    Args:
      value: its number.
      src: the layout taken.
      dst: the layout made, which is there from now on.
      again: whether it was there before and was let go meanwhile.
      bucket: moves next to each other with the same number are one collective.
    """

    value: int
    src: Layout
    dst: Layout
    again: bool = False
    bucket: int | None = None


def in_buckets(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves one by one, but those of a bucket together."""
    for number, together in groupby(moves, key=lambda move: move.bucket):
        if number is None:
            yield from ([move] for move in together)
        else:
            yield list(together)


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """An operation with its layouts.

    Args:
      node: the operation.
      rule: its rule; `None` for control flow, annotations and operations without one.
      moves: what is resharded right before it.
      operands: the layout of each operand.
      results: the layout of each result.
      axes: factor -> the mesh axes that cut it.
      bodies: the planned bodies of control flow.
      why: what decided, in a few words.
      asked: what the choice was made from, where a rule was: the layouts in which each operand was
        there, the wishes for each result, and how many operations take each operand.
    """

    node: Node
    rule: Rule | None
    moves: tuple[Move, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bodies: tuple[PlannedProgram, ...] = ()
    why: str = ""
    asked: Asked | None = None


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A program with layouts.

    Args:
      program: the program.
      sizes: the mesh's axes.
      inputs: the layout of each argument.
      nodes: the operations in order.
      moves: what is resharded at the end.
      outputs: the layout of each output.
    """

    program: Program
    sizes: Mapping[str, int]
    inputs: tuple[Layout, ...]
    nodes: tuple[PlannedNode, ...]
    moves: tuple[Move, ...]
    outputs: tuple[Layout, ...]

    def refs(self) -> tuple[Ref, ...]:
        """The program's outputs."""
        return self.program.outputs

    def steps(self, move: Move) -> tuple[Step, ...]:
        """The steps of a move."""
        aval = self.program.aval(move.value)
        return planned_steps(move.src, move.dst, tuple(aval.shape), aval.dtype, self.sizes)
