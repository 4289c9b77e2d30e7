"""What a rank can do in one tick, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Literal, get_args

Op = Literal["F", "B", "I", "W"]
OPS: tuple[Op, ...] = get_args(Op)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one rank.

    Args:
      op: `F` forward, `B` full backward, `I` backward for the input, `W` for the weights. A
        backward is one `B`, or one `I` and a later `W`; `B` delivers its input gradient at its end.
      chunk: which of the rank's stages, counted from 0.
      microbatch: counted from 0.

    Example:
      >>> Action("F", 0, 3)
      Action(op='F', chunk=0, microbatch=3)
    """

    op: Op
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op}{self.chunk}.{self.microbatch}"


Cell = tuple[Action, ...]
"""What one rank does in one tick: nothing, one action, or several that run as one (combined)."""

Row = tuple[Cell, ...]
"""One rank's cells, tick by tick."""

Order = Sequence[Action | Sequence[Action] | None]
"""One rank's work in the order it is done; a sequence of actions is combined, `None` is idle."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of each action of one stage, in any unit, and of a hop between two ranks.

    The simulator and the search compute with the decimal values, not their binary neighbours, so
    equal costs give equal times. Hops do not occupy the ranks.

    Example:
      >>> Costs(F=1, I=1.2, W=0.8, hop=0.1)
      Costs(F=1, I=1.2, W=0.8, B=2, hop=0.1)
    """

    F: float = 1
    I: float = 1  # noqa: E741 - the letter of the literature
    W: float = 1
    B: float = 2
    hop: float = 0

    def __post_init__(self) -> None:
        for name, value in self.items():
            smallest = "at least 0" if name == "hop" else "more than 0"
            if not (value >= 0 if name == "hop" else value > 0) or value == float("inf"):
                raise ValueError(f"Costs({name}={value!r}): a cost is a finite number, {smallest}.")

    def items(self) -> tuple[tuple[str, float], ...]:
        """The costs by name, in the order of the constructor."""
        return (("F", self.F), ("I", self.I), ("W", self.W), ("B", self.B), ("hop", self.hop))


def in_whole_units(costs: Costs) -> tuple[dict[str, int], int]:
    """The costs as whole numbers of a common unit, and how many units make 1."""
    exact = {name: Fraction(str(value)) for name, value in costs.items()}
    unit = lcm(*(value.denominator for value in exact.values()))
    return {name: int(value * unit) for name, value in exact.items()}, unit
