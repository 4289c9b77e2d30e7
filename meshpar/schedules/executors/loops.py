"""The two halves of a loop (`scan`), whose body is split like any program.

What the second half's turns need of the first half's is stacked: one more result of the first loop,
and one more operand, cut along its first dim, of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from meshpar._jax import SubJaxprs
from meshpar.compiler.program import Node, Program, Ref, program_of
from meshpar.schedules.executors.evaluate import run_program, values_of, without_calls

if TYPE_CHECKING:
    from meshpar.schedules.executors.split import Halves

__all__ = ["LoopHalves", "is_loop"]

Split = Callable[..., "Halves"]


def is_loop(node: Node) -> bool:
    """Whether an operation is a loop that can be split."""
    return node.bodies is not None and node.bodies.kind == "scan"


@dataclass(frozen=True, slots=True)
class LoopHalves:
    """A loop in two; one of the halves may be empty.

    Args:
      node: the whole loop.
      halves: its body in two.
      first: positions of the results that the first loop makes.
      second: positions of those that the second makes.
    """

    node: Node
    halves: Halves
    first: tuple[int, ...]
    second: tuple[int, ...]

    @classmethod
    def of(
        cls,
        node: Node,
        split: Split,
        first: Collection[int],
        second: Collection[int],
        free: Collection[int],
    ) -> LoopHalves:
        """Splits a loop.

        Args:
          node: the loop.
          split: how its body is split; see `split`.
          first: positions of the results wanted of the first half.
          second: positions of those wanted of the second.
          free: positions of the operands that depend on nothing bound.
        """
        body, consts, carried = _parts(node)
        fixed = {body.inputs[p] for p in free if not consts <= p < consts + carried}

        def grown(wanted: Collection[int], other: Collection[int], half: int) -> tuple[int, ...]:
            """With the carries that the turns of the wanted results need."""
            out = set(wanted)
            while True:
                firsts, seconds = (sorted(out), []) if half == 0 else (sorted(other), sorted(out))
                private = [body.inputs[consts + c] for c in firsts if c < carried]
                halves = split(body, firsts, seconds, private=private, free=fixed)
                used = _used((halves.first, halves.second)[half])
                more = {
                    c
                    for c in range(carried)
                    if body.inputs[consts + c] in used and c not in (*out, *(other if half else ()))
                }
                if not more:
                    return tuple(sorted(out))
                out |= more

        firsts = grown(first, (), 0) if first else ()
        seconds = grown(set(second) - set(firsts), firsts, 1) if second else ()
        private = [body.inputs[consts + c] for c in firsts if c < carried]
        halves = split(body, firsts, seconds, private=private, free=fixed)
        return cls(node, halves, firsts, seconds)

    def operands(self, half: int) -> tuple[Ref, ...]:
        """What a half takes of the loop's operands; the second takes the stacked values after."""
        return tuple(self.node.ins[p] for p in self._positions(half))

    def program(self, half: int, avals: Sequence[Any]) -> Program:
        """One half as a program.

        Args:
          half: 0 or 1.
          avals: shape and dtype of the operands.

        Returns:
          Its results are those of `first` or `second`, in order; then, of the first half, the
          stacked values.
        """
        return without_calls(program_of(jax.make_jaxpr(self._function(half))(*avals)))

    def _positions(self, half: int) -> list[int]:
        body, consts, carried = _parts(self.node)
        program = (self.halves.first, self.halves.second)[half]
        used = _used(program)
        own = (self.first, self.second)[half]
        cut = set(self.halves.cut)
        return [
            p
            for p, value in enumerate(body.inputs)
            if (p - consts in own if consts <= p < consts + carried else value in used - cut)
        ]

    def _function(self, half: int) -> Callable[..., list[Any]]:
        body, consts, carried = _parts(self.node)
        program = (self.halves.first, self.halves.second)[half]
        outs = (self.first, self.second)[half]
        positions, params = self._positions(half), self.node.params
        held = sum(k < carried for k in outs)
        before = sum(p < consts for p in positions)

        def run(*operands: Any) -> list[Any]:
            fixed, carry = operands[:before], operands[before : before + held]

            def turn(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
                here = [body.inputs[p] for p in positions]
                here += self.halves.cut if half else ()
                given = dict(zip(here, (*fixed, *state, *slices), strict=True))
                results = run_program(program, *(given.get(value) for value in program.inputs))
                return results[:held], results[held:]

            state, stacked = lax.scan(
                turn,
                list(carry),
                list(operands[before + held :]),
                length=params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )
            return [*state, *stacked]

        return run


def _parts(node: Node) -> tuple[Program, int, int]:
    """The body of a loop, and the numbers of its constants and carried values."""
    bodies = node.bodies
    assert isinstance(bodies, SubJaxprs), "a loop has a body"
    return bodies.bodies[0], bodies.consts[0], bodies.carry


def _used(program: Program) -> set[int]:
    return values_of(program.outputs).union(*(values_of(node.ins) for node in program.nodes))
