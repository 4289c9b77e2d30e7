"""Schedules with one forward-backward wave: FThenB, 1F1B and Eager1F1B."""

from __future__ import annotations

from meshpar.schedules.actions import Action
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.sizes import check_sizes
from meshpar.schedules.stages import loop_stages


def fthenb(P: int, M: int, V: int = 1) -> Schedule:
    """All forwards, then all backwards; with several chunks the looped form.

    Bubble `(P-1)/(V*M+P-1)`, peak `V*M` on every rank.

    Args:
      P: number of ranks.
      M: number of microbatches.
      V: stages on each rank.

    Raises:
      ValueError: a size is below 1.

    Follows GPipe (arXiv 1811.06965) and, for `V > 1`, looped breadth-first pipelining
    (arXiv 2211.05953).
    """
    check_sizes("fthenb", P, M, V)
    order = [Action("F", chunk, m) for chunk in range(V) for m in range(M)]
    order += [Action("B", chunk, m) for chunk in reversed(range(V)) for m in range(M)]
    return Schedule.from_orders([order] * P, M, loop_stages(P, V), "FThenB")


def one_f_one_b(P: int, M: int) -> Schedule:
    """One forward, one backward in turn, after as few forwards as keep the ranks busy.

    Bubble `(P-1)/(M+P-1)`, peak `min(M, P-r)` on rank r.

    Args:
      P: number of ranks.
      M: number of microbatches.

    Raises:
      ValueError: a size is below 1.

    Follows PipeDream-Flush (arXiv 2006.09503).
    """
    check_sizes("one_f_one_b", P, M)
    orders = [_one_f_one_b(M, ahead=P - 1 - rank) for rank in range(P)]
    return Schedule.from_orders(orders, M, name="1F1B")


def eager_1f1b(P: int, M: int) -> Schedule:
    """1F1B with twice the forwards in advance, so that a hop's time hides behind a forward.

    Bubble `(P-1)/(M+P-1)`, peak `min(M, 2*(P-r)-1)` on rank r.

    Args:
      P: number of ranks.
      M: number of microbatches.

    Raises:
      ValueError: a size is below 1.

    Follows the pass `Eager1F1B` of `paddle.distributed` (3.3.1), which asks for `M >= 2*P-1`.
    """
    check_sizes("eager_1f1b", P, M)
    orders = [_one_f_one_b(M, ahead=2 * (P - 1 - rank)) for rank in range(P)]
    return Schedule.from_orders(orders, M, name="Eager1F1B")


def _one_f_one_b(M: int, ahead: int) -> list[Action]:
    order = [Action("F", 0, m) for m in range(min(ahead, M))]
    for m in range(M):
        if m + ahead < M:
            order.append(Action("F", 0, m + ahead))
        order.append(Action("B", 0, m))
    return order
