"""The schedule of a pipeline: a table of what every rank does in every tick."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from meshpar.schedules.actions import Action, Cell, Costs, Op, Order, Row
from meshpar.schedules.stages import Stages, loop_stages
from meshpar.schedules.timeline import Timeline, timeline
from meshpar.schedules.timing import one_tick, play
from meshpar.schedules.validation import validate


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each of `P` pipeline ranks does, tick by tick.

    Args:
      name: a label, for titles and messages.
      M: number of microbatches.
      stages: `stages[rank][chunk]` is the stage; see `loop_stages` and `zigzag_stages`.
      table: `table[rank][tick]` is a tuple of actions: empty for idle, one, or several that run as
        one combined action. All rows have the same length.

    A table is not checked when it is made: `validate` does that. `Schedule.from_orders` makes one
    from each rank's order, which is all that an asynchronous executor needs; its ticks are for the
    lockstep one.

    Example:
      >>> from meshpar.schedules import Action, Schedule
      >>> order = [Action("F", 0, 0), Action("B", 0, 0)]
      >>> Schedule.from_orders([order, order], M=1, name="mine").table[1]
      ((), (Action(op='F', chunk=0, microbatch=0),), (Action(op='B', chunk=0, microbatch=0),), ())
    """

    name: str
    M: int
    stages: Stages
    table: tuple[Row, ...]

    def __post_init__(self) -> None:
        if not self.stages or not self.stages[0] or len(set(map(len, self.stages))) != 1:
            raise ValueError(
                f"Schedule(stages={self.stages!r}): a row of stages for each rank, all of one "
                "length, as loop_stages(P, V) makes."
            )
        if self.M < 1:
            raise ValueError(f"Schedule(M={self.M}): at least one microbatch.")
        if len(self.table) != self.P or len(set(map(len, self.table))) != 1:
            raise ValueError(
                f"Schedule(table=...) has rows of {list(map(len, self.table))} ticks for {self.P} "
                "ranks: one row for each rank, all equally long. Schedule.from_orders(...) pads."
            )

    @property
    def P(self) -> int:
        """Number of ranks."""
        return len(self.stages)

    @property
    def V(self) -> int:
        """Number of stages ("chunks") on each rank."""
        return len(self.stages[0])

    @property
    def ticks(self) -> int:
        """Length of the table."""
        return len(self.table[0])

    @property
    def title(self) -> str:
        """Name and size, as in `1F1B (P=4, M=8, V=1)`."""
        return f"{self.name} (P={self.P}, M={self.M}, V={self.V})"

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """`(rank, chunk)` of every stage, in forward order."""
        places = {
            stage: (rank, chunk)
            for rank, row in enumerate(self.stages)
            for chunk, stage in enumerate(row)
        }
        return tuple(places[stage] for stage in range(self.P * self.V))

    @property
    def orders(self) -> tuple[Row, ...]:
        """Each rank's cells without the idle ones."""
        return tuple(tuple(cell for cell in row if cell) for row in self.table)

    @classmethod
    def from_orders(
        cls,
        orders: Sequence[Order],
        M: int,
        stages: Stages | None = None,
        name: str = "custom",
    ) -> Schedule:
        """Lays orders out in ticks, each cell as early as its inputs and its rank allow.

        Args:
          orders: for each rank its actions in order; a sequence of actions among them is combined,
            `None` is left out.
          M: number of microbatches.
          stages: the placement; one stage on each rank where it is not given.
          name: the new schedule's name.

        Raises:
          ScheduleError: the orders break a law that `validate` names.
        """
        stages = stages or loop_stages(len(orders), 1)
        rows = [tuple(cell for cell in map(_cell, order) if cell) for order in orders]
        dense = cls(name, M, stages, tuple(zip(*zip_longest(*rows, fillvalue=()), strict=True)))
        validate(dense, slots=False)
        return replace(dense, table=_in_ticks(rows, stages, M))

    def split_backward(self) -> Schedule:
        """The same orders with every `B` as an `I` and then a `W`: another table.

        In a combined cell both take the place of the `B`.
        """
        orders = [[part for cell in order for part in _split(cell)] for order in self.orders]
        return Schedule.from_orders(orders, self.M, self.stages, self.name)

    def uncombined(self) -> Schedule:
        """The same orders with the parts of every combined cell one after the other."""
        orders = [[action for cell in order for action in cell] for order in self.orders]
        return Schedule.from_orders(orders, self.M, self.stages, self.name)

    def forwards(self) -> Schedule:
        """The forwards of the same orders, for evaluation: not a schedule that `validate` takes."""
        orders = [
            [(action,) for cell in order for action in cell if action.op == "F"]
            for order in self.orders
        ]
        return replace(self, table=_in_ticks(orders, self.stages, self.M))

    def plot(self, costs: Costs = Costs()) -> Timeline:  # noqa: B008 - frozen
        """A timeline under `costs`: ranks down, time across, colour by action.

        Returns:
          A value that shows itself in Jupyter, holds its SVG text in `svg`, and `save`s to a file.
        """
        return timeline(self, costs)

    def _repr_html_(self) -> str:
        return self.plot().svg

    def to_json(self) -> str:
        """The schedule as a JSON text, which `Schedule.from_json` reads back to an equal one."""
        table = [[[list(_fields(a)) for a in cell] for cell in row] for row in self.table]
        value = {"name": self.name, "M": self.M, "stages": self.stages, "table": table}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: the text is no JSON, or not of a schedule.
        """
        value = json.loads(text)
        try:
            table = tuple(
                tuple(tuple(Action(*fields) for fields in cell) for cell in row)
                for row in value["table"]
            )
            stages = tuple(map(tuple, value["stages"]))
            return cls(value["name"], value["M"], stages, table)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Schedule.from_json: not a schedule ({error!r}). It is an object with name, M, "
                'stages [rank][chunk] and table [rank][tick] of [["F", chunk, microbatch], ...].'
            ) from error


def _in_ticks(rows: Sequence[Sequence[Cell]], stages: Stages, M: int) -> tuple[Row, ...]:
    """Each cell in a tick of its own, as early as its inputs and its rank allow."""
    starts, ends = play(rows, stages, M, one_tick)
    table: list[list[Cell]] = [[()] * max(max(end, default=0) for end in ends) for _ in rows]
    for row, cells, begin in zip(table, rows, starts, strict=True):
        for cell, tick in zip(cells, begin, strict=True):
            row[tick] = cell
    return tuple(map(tuple, table))


def _cell(item: Action | Sequence[Action] | None) -> Cell:
    if item is None:
        return ()
    return (item,) if isinstance(item, Action) else tuple(item)


def _fields(action: Action) -> tuple[str, int, int]:
    return action.op, action.chunk, action.microbatch


def _split(cell: Cell) -> list[Cell]:
    halves: dict[Op, tuple[Op, ...]] = {"B": ("I", "W")}
    parts = [replace(part, op=op) for part in cell for op in halves.get(part.op, (part.op,))]
    return [tuple(parts)] if len(cell) > 1 else [(part,) for part in parts]
