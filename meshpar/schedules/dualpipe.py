"""DualPipeV: forwards and backwards of the two arms of a V overlap in one combined action."""

from __future__ import annotations

from collections.abc import Sequence

from meshpar.schedules.actions import Action, Cell
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.sizes import check_sizes
from meshpar.schedules.stages import zigzag_stages


def dualpipev(P: int, M: int) -> Schedule:
    """DualPipeV, with two stages on each rank.

    Idle time `(P-1)*(FB + B - 3*W)`, FB the time of a combined action; peak `min(2*M, 2*P+1)`. With
    fewer than `2*P` microbatches, which its sources refuse, it is the schedule of `2*P` without the
    surplus. `Schedule.uncombined` runs the parts one after the other.

    Args:
      P: number of ranks.
      M: number of microbatches.

    Raises:
      ValueError: a size is below 1.

    Follows DualPipeV (github.com/deepseek-ai/DualPipe), the V form of the DualPipe of
    arXiv 2412.19437.
    """
    check_sizes("dualpipev", P, M)
    orders = [_rank_order(P, max(M, 2 * P), rank) for rank in range(P)]
    kept = [
        [tuple(action for action in cell if action.microbatch < M) for cell in order]
        for order in orders
    ]
    return Schedule.from_orders(kept, M, zigzag_stages(P, 2), "DualPipeV")


class _Rank:
    """One rank's order as it grows; each op takes the next microbatch of its chunk."""

    def __init__(self) -> None:
        self.order: list[Cell] = []
        self._next = {(op, chunk): 0 for op in "FB" for chunk in (0, 1)}
        self._weights: list[Action] = []

    def forward(self, chunk: int) -> Action:
        return Action("F", chunk, self._take("F", chunk))

    def backward(self, chunk: int) -> Action:
        return Action("B", chunk, self._take("B", chunk))

    def for_input(self, chunk: int) -> Action:
        m = self._take("B", chunk)
        self._weights.append(Action("W", chunk, m))
        return Action("I", chunk, m)

    def for_weight(self) -> Action:
        return self._weights.pop(0)

    def run(self, *actions: Action) -> None:
        self.order += [(action,) for action in actions]

    def _take(self, op: str, chunk: int) -> int:
        self._next[op, chunk] += 1
        return self._next[op, chunk] - 1


def _rank_order(P: int, M: int, rank: int) -> Sequence[Cell]:
    """The eight phases of one rank, for `M >= 2*P`."""
    r = _Rank()
    before, after = P - 1 - rank, rank + 1
    for _ in range(2 * before):
        r.run(r.forward(0))
    for _ in range(after):
        r.run(r.forward(0), r.forward(1))
    for _ in range(before):
        r.run(r.for_input(1), r.for_weight(), r.forward(1))
    for step in range(M - 2 * P + after):
        pair = r.forward(0), r.backward(1)
        # On the last rank the first pair would wait for itself: its forward feeds its neighbour.
        if step == 0 and rank == P - 1:
            r.run(*pair)
        else:
            r.order.append(pair)
        r.order.append((r.forward(1), r.backward(0)))
    for _ in range(before):
        r.run(r.backward(1))
        r.order.append((r.forward(1), r.backward(0)))
    for step in range(2 * after):
        # The second half of the drain is split, so that its W fill the waits that follow.
        split = step > after // 2 * 2 or (step == after // 2 * 2 and rank % 2 == 1)
        chunk = 1 - step % 2
        r.run(r.for_input(chunk) if split else r.backward(chunk))
    for _ in range(before):
        r.run(r.for_weight(), r.for_input(0))
    for _ in range(after):
        r.run(r.for_weight())
    return r.order
