"""Zero-bubble schedules on zigzag stages: ZBVPP, and ZB-V within it."""

from __future__ import annotations

from dataclasses import replace

from meshpar.schedules.actions import Action, Costs, Op
from meshpar.schedules.memory import peak_of
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.search import memory_limit_of, search
from meshpar.schedules.sizes import check_sizes
from meshpar.schedules.stages import zigzag_stages


def zbvpp(
    P: int,
    M: int,
    V: int = 2,
    memory_limit: int | None = None,
    costs: Costs = Costs(),  # noqa: B008 - frozen
) -> Schedule:
    """The zero-bubble schedule on zigzag stages, found by search.

    With `V = 2`, `M >= 2*P-1` and equal times it is ZB-V: bubble `(P-1)/(6*M+P-1)`, all of it
    before a rank's first and after its last action, at the memory of 1F1B.

    Args:
      P: number of ranks.
      M: number of microbatches.
      V: stages on each rank, at least 2.
      memory_limit: most stage activations on a rank; none where it is not given, but among equals
        the schedule with the least peak found is taken, `V*P` at most where that is enough.
      costs: the times to schedule for.

    Raises:
      ValueError: one stage on each rank, for which `zbh1` is made; or no schedule keeps the limit.

    Follows ZB-V of arXiv 2401.10241 and the pass `ZBVPP` of `paddle.distributed` (3.3.1).
    """
    check_sizes("zbvpp", P, M, V)
    if V < 2:
        raise ValueError("zbvpp(V=1): a zigzag has at least 2 stages on each rank; use ZBH1.")
    limit = memory_limit_of("zbvpp", memory_limit, V * M, V)
    references = v_references(P, M, V, limit)
    found = search(zigzag_stages(P, V), M, limit, costs, references)
    return replace(found, name="ZBVPP")


def v_references(P: int, M: int, V: int, limit: int) -> list[Schedule]:
    """ZB-V, where it has the right number of stages and keeps the limit."""
    schedules = [_zbv(P, M)] if V == 2 else []
    return [schedule for schedule in schedules if peak_of(schedule.orders) <= limit]


class _Rank:
    """One rank's order as it grows; each op takes the next microbatch of its chunk."""

    def __init__(self, microbatches: int) -> None:
        self.order: list[Action] = []
        self.left = dict.fromkeys([("F", 0), ("F", 1), ("I", 0), ("I", 1)], microbatches)
        self._microbatches = microbatches
        self._weights: list[Action] = []

    def run(self, op: Op, chunk: int) -> None:
        action = Action(op, chunk, self._microbatches - self.left[op, chunk])
        self.left[op, chunk] -= 1
        self.order.append(action)
        if op == "I":
            self._weights.append(replace(action, op="W"))

    def for_weight(self) -> None:
        self.order += self._weights[:1]
        del self._weights[:1]


def _zbv(P: int, M: int) -> Schedule:
    """The closed form; below `2*P-1` microbatches it is cut out of the one for so many."""
    orders = []
    for rank in range(P):
        r = _Rank(max(M, 2 * P - 1))
        for _ in range(2 * (P - rank) - 1):
            r.run("F", 0)
        for _ in range(rank):
            r.run("F", 1)
            r.run("F", 0)
        for step in range(r.left["F", 1]):
            if step >= P - rank:
                if r.left["F", 0]:
                    r.run("F", 0)
                r.run("I", 0)
                r.for_weight()
            r.run("F", 1)
            r.run("I", 1)
            r.for_weight()
        for _ in range(rank):
            r.run("I", 0)
            r.run("I", 1)
        for _ in range(P - rank):
            r.run("I", 0)
            r.for_weight()
        while len(r.order) < 6 * max(M, 2 * P - 1):
            r.for_weight()
        orders.append([action for action in r.order if action.microbatch < M])
    return Schedule.from_orders(orders, M, zigzag_stages(P, 2), "ZB-V")
