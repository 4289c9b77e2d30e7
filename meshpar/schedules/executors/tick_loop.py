"""What one pipeline rank runs: a loop over ticks, in each of which it does one action.

An action is a `while_loop` of no or one trip. That, unlike a `switch` over the buffers, updates
them in place on CPU (1F1B: 50 MB instead of 120), and on TPU as well. Values go to other ranks
between the actions only, where all ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.placements.axis_position import in_time
from meshpar.placements.turns import in_some_turns
from meshpar.schedules.executors.in_time import TIME
from meshpar.schedules.executors.local_actions import LocalActions
from meshpar.schedules.executors.rows import add, add_to_row, put_rows, row_of, rows_at
from meshpar.schedules.executors.slot_table import OPS, SlotTable
from meshpar.schedules.executors.step import Arrays

__all__ = ["State", "TickLoop"]

State = dict[str, list[Any]]
"""What goes from tick to tick: `pools` of slots; the `payload` that the last action made, and what
came `in` by each shift; the gradients of the `own`, `first` and `last` parameters; and for each
microbatch the `result` and the gradient of the input, `given`."""

Structs = Sequence[jax.ShapeDtypeStruct]


@dataclass(frozen=True, slots=True)
class _Row:
    """A rank's tick, as int32."""

    op: Any
    chunk: Any
    microbatch: Any
    stage: Any
    slots: Any  # (values,)
    received: Any  # (shifts, 1 + arrays of x)


class TickLoop:
    """The loop over a table, inside `shard_map`.

    Args:
      table: what the ranks do.
      actions: how they do it.
      stages: the number of stages.
      ranks: the number of ranks.
      axis: the mesh axis along which they lie.
      microbatches: their number.
      inputs: this rank's blocks; batches have a dim of microbatches first, of size 1 for what all
        of them share.
      keep_given: whether the gradients of the microbatches are wanted.
    """

    def __init__(
        self,
        table: SlotTable,
        actions: LocalActions,
        stages: int,
        ranks: int,
        axis: str,
        microbatches: int,
        inputs: Arrays,
        *,
        keep_given: bool = False,
    ) -> None:
        self._table, self._actions, self._inputs = table, actions, inputs
        self._last_stage, self._ranks, self._axis = stages - 1, ranks, axis
        self._microbatches = microbatches
        self._keep_given = keep_given
        self._made = [use.made for use in actions.uses]
        self._values: dict[str, Sequence[int]] = {
            kind: [v for v, made in enumerate(self._made) if made == kind] for kind in "xg"
        }
        self._values |= {"F": actions.residuals, "I": actions.cut}

    def start(self, gradients: Mapping[str, Structs]) -> State:
        """The state before the first tick.

        Args:
          gradients: blocks of the gradients of `own`, `first` and `last` parameters.
        """
        x, microbatches = self._actions.x, self._microbatches

        def zeros(structs: Structs, *dims: int) -> list[jax.Array]:
            return [jnp.zeros((*dims, *s.shape), s.dtype) for s in structs]

        return {
            "pools": [jnp.zeros((n, *s.shape), s.dtype) for s, n in self._table.pools],
            "payload": zeros(x),
            "in": [leaf for _ in self._table.shifts for leaf in zeros(x)],
            "result": zeros(self._actions.result_blocks, microbatches),
            "given": zeros(x, microbatches) if self._keep_given else [],
            **{name: zeros(structs) for name, structs in gradients.items()},
        }

    def run(self, rows: jax.Array, state: State) -> State:
        """Goes through this rank's rows, of shape (ticks, columns)."""

        def tick(state: State, row: jax.Array) -> tuple[State, None]:
            return self._tick(state, self._row(row)), None

        return lax.scan(tick, state, rows)[0]

    def _row(self, row: jax.Array) -> _Row:
        values = len(self._actions.uses)
        received = row[4 + values :].reshape(len(self._table.shifts), -1)
        return _Row(row[0], row[1], row[2], row[3], row[4 : 4 + values], received)

    def _tick(self, state: State, row: _Row) -> State:
        ops = self._table.ops
        state = self._receive(state, row)
        is_first, is_last = row.stage == 0, row.stage == self._last_stage
        forward = row.op == OPS.index("F")
        once = self._once
        with self._scope("first", "F", 0):
            state = once(forward & is_first, self._enter, state, ("pools",), row)
        with self._scope("F"):
            state = once(forward, self._forward, state, ("pools", "payload"), row)
        with self._scope("last", "F", self._last_stage):
            keys = ("payload", "last", "result")
            state = once(forward & is_last, self._leave, state, keys, row)
        if "B" in ops:
            with self._scope("B"):
                keys = ("pools", "payload", "own")
                state = once(row.op == OPS.index("B"), self._full, state, keys, row)
        if "I" in ops:
            with self._scope("I"):
                keys = ("pools", "payload")
                state = once(row.op == OPS.index("I"), self._for_input, state, keys, row)
            with self._scope("W"):
                keys = ("pools", "payload", "own")
                state = once(row.op == OPS.index("W"), self._for_weight, state, keys, row)
        if ops != {"F"} and (self._actions.first_backward is not None or self._keep_given):
            backward = (row.op == OPS.index("B")) | (row.op == OPS.index("I"))
            keys = ("payload", "first", "given")
            with self._scope("first_backward", "BI", 0):
                state = once(backward & is_first, self._return, state, keys, row)
        return {**state, "in": self._sent(state["payload"])}

    def _scope(
        self, name: str, ops: str | None = None, stage: int | None = None
    ) -> AbstractContextManager[Any]:
        """A scope that tells in how many ticks, on the rank with the most, an action is done."""
        rows = self._table.rows
        done = np.isin(rows[:, :, 0], [OPS.index(op) for op in ops or name])
        if stage is not None:
            done &= rows[:, :, 3] == stage
        return in_some_turns(name, int(done.sum(1).max()), rows.shape[1])

    def _sent(self, payload: list[Any]) -> list[Any]:
        """What arrives by each shift."""
        out = []
        for shift in self._table.shifts:
            pairs = [(rank, (rank + shift) % self._ranks) for rank in range(self._ranks)]
            out += payload if not shift else [lax.ppermute(x, self._axis, pairs) for x in payload]
        return out

    def _receive(self, state: State, row: _Row) -> State:
        count = self._table.received
        for k in range(len(self._table.shifts)):
            arrived = state["in"][k * count : (k + 1) * count]
            slots = row.received[k]

            def store(state: State, row: _Row, arrived=arrived, slots=slots) -> State:  # noqa: ANN001
                values = self._values["x"]
                return self._written(state, values, arrived, slots[1:])

            state = self._once(slots[0] > 0, store, state, ("pools",), row)
        return state

    # --- the actions ------------------------------------------------------------------------------

    def _enter(self, state: State, row: _Row) -> State:
        microbatch = rows_at(self._inputs.microbatches, row.microbatch)
        first = self._actions.first
        x = microbatch if first is None else first.run(*self._inputs.first, *microbatch)
        return self._stored(state, "x", x, row)

    def _forward(self, state: State, row: _Row) -> State:
        x = self._read(state, "x", row)
        out = self._actions.forward.run(*self._given(row), *x)
        state = self._stored(state, "F", out[len(x) :], row)
        return {**state, "payload": out[: len(x)]}

    def _leave(self, state: State, row: _Row) -> State:
        target = rows_at(self._inputs.targets, row.microbatch)
        out = self._actions.last.run(*self._inputs.last, *state["payload"], *target)
        count, x = len(state["result"]), len(state["payload"])
        new = {"result": put_rows(state["result"], out[:count], row.microbatch)}
        if len(out) > count:  # in training
            new["payload"] = out[count : count + x]
            new["last"] = add(state["last"], out[count + x :])
        return {**state, **new}

    def _full(self, state: State, row: _Row) -> State:
        gradient = self._read(state, "g", row)
        run = _there(self._actions.full).run
        out = run(*self._given(row), *self._read(state, "F", row), *gradient)
        own = add_to_row(state["own"], out[len(gradient) :], row.chunk)
        return {**state, "payload": out[: len(gradient)], "own": own}

    def _for_input(self, state: State, row: _Row) -> State:
        gradient = self._read(state, "g", row)
        run = _there(self._actions.for_input).run
        out = run(*self._given(row), *self._read(state, "F", row), *gradient)
        state = self._stored(state, "I", out[len(gradient) :], row)
        return {**state, "payload": out[: len(gradient)]}

    def _for_weight(self, state: State, row: _Row) -> State:
        kept, cut = self._read(state, "F", row), self._read(state, "I", row)
        out = _there(self._actions.for_weight).run(*self._given(row), *kept, *cut)
        own = add_to_row(state["own"], out, row.chunk)
        return {**state, "own": own, "payload": _marked(state["payload"], own)}

    def _return(self, state: State, row: _Row) -> State:
        """The way back of `_enter`."""
        new: State = {}
        if self._keep_given:
            new["given"] = put_rows(state["given"], state["payload"], row.microbatch)
        if self._actions.first_backward is not None:
            microbatch = rows_at(self._inputs.microbatches, row.microbatch)
            run = self._actions.first_backward.run
            out = run(*self._inputs.first, *microbatch, *state["payload"])
            new["first"] = add(state["first"], out)
        made = [*new.get("first", ()), *new.get("given", ())]
        return {**state, **new, "payload": _marked(state["payload"], made)}

    def _once(
        self,
        condition: Any,
        action: Callable[[State, _Row], State],
        state: State,
        used: Sequence[str],
        row: _Row,
    ) -> State:
        """Does an action or not; `used` names what of the state it changes, and what it reads of
        the pools.

        A pool that a loop leaves as it is XLA takes for a constant, and what becomes of a constant
        is made before the loop: where products round it (to bfloat16 on TPUs), a copy of all slots
        in every tick. So no pool comes out of a loop as it was (ZBH1: 1.8 GB instead of 3.7).
        """

        def turn(carried: tuple[Any, State]) -> tuple[Any, State]:
            part = carried[1]
            if "pools" in part:
                part = {**part, "pools": lax.optimization_barrier(part["pools"])}
            with in_time(TIME, row.microbatch, self._microbatches):
                new = action({**state, **part}, row)
            return jnp.bool_(False), {name: new[name] for name in used}

        part = {name: state[name] for name in used}
        _, part = lax.while_loop(lambda carried: carried[0], turn, (condition, part))
        return {**state, **part}

    # --- blocks -----------------------------------------------------------------------------------

    def _given(self, row: _Row) -> list[Any]:
        """The parameters and extras that all programs of a stage take."""
        own, extras = self._inputs.own, self._inputs.extras
        return [*rows_at(own, row.chunk), *rows_at(extras, row.microbatch)]

    def _read(self, state: State, kind: str, row: _Row) -> list[Any]:
        pools, pool = state["pools"], self._table.pool
        return [row_of(pools[pool[v]], row.slots[v]) for v in self._values[kind]]

    def _stored(self, state: State, kind: str, blocks: Sequence[Any], row: _Row) -> State:
        """Puts blocks into slots; what an action got in one and keeps is in its slot already."""
        pairs = zip(self._values[kind], blocks, strict=True)
        new = [(v, block) for v, block in pairs if self._made[v] == kind]
        values = [v for v, _ in new]
        return self._written(state, values, [x for _, x in new], [row.slots[v] for v in values])

    def _written(
        self, state: State, values: Sequence[int], blocks: Sequence[Any], slots: Any
    ) -> State:
        pools = list(state["pools"])
        for k, (value, block) in enumerate(zip(values, blocks, strict=True)):
            number = self._table.pool[value]
            pools[number] = lax.dynamic_update_index_in_dim(pools[number], block, slots[k], 0)
        return {**state, "pools": pools}


def _marked(payload: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """The payload of an action that sends nothing, such that it waits for what the action makes.

    XLA on CPU runs side by side what does not depend on each other. A rank that waits for its
    neighbours while it still works would hold the thread that they need: two ranks took turns.
    """
    mark = sum((jnp.real(x[(0,) * x.ndim]).astype(jnp.float32) for x in made if x.size), 0.0)
    return [x.at[(0,) * x.ndim].set(jnp.asarray(mark, x.dtype)) if x.size else x for x in payload]


def _there(program: Any) -> Any:
    assert program is not None, "a table with backwards has the programs for them"
    return program
