"""Interleaved schedules, several stages on each rank in a loop: VPP, InterleavedZB and ZBH1."""

from __future__ import annotations

from itertools import pairwise

from meshpar.schedules.actions import Action
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.sizes import check_sizes
from meshpar.schedules.stages import loop_stages


def vpp(P: int, M: int, V: int) -> Schedule:
    """Interleaved 1F1B ("virtual pipeline parallelism").

    Bubble `(P-1)/(V*M+P-1)`; peak `min(V*M, (V-1)*P + 2*(P-1-r) + 1)` on rank r where P divides M,
    elsewhere with the largest group of microbatches (see `_groups`) for P. With one chunk it is
    `eager_1f1b`.

    Args:
      P: number of ranks.
      M: number of microbatches.
      V: stages on each rank.

    Raises:
      ValueError: a size is below 1.

    Follows Megatron-LM's interleaved schedule (arXiv 2104.04473).
    """
    check_sizes("vpp", P, M, V)
    forwards, backwards, size = _sequences(P, M, V)
    orders = []
    for rank in range(P):
        ahead = min(V * M, (V - 1) * size + 2 * (P - 1 - rank))
        order = [Action("F", *work) for work in forwards[:ahead]]
        for done, work in enumerate(backwards):
            order += [Action("F", *next_one) for next_one in forwards[ahead + done :][:1]]
            order.append(Action("B", *work))
        orders.append(order)
    return Schedule.from_orders(orders, M, loop_stages(P, V), "VPP")


def interleaved_zb(P: int, M: int, V: int) -> Schedule:
    """Interleaved 1F1B with split backwards: the W that is left over fills the last bubbles.

    Bubble `(P-1)/(3*V*M+P-1)` where F, I and W take the same time; the peak is `min(V*M, V*P)`
    where P divides M.

    Args:
      P: number of ranks.
      M: number of microbatches.
      V: stages on each rank.

    Raises:
      ValueError: a size is below 1.

    Follows `ScheduleInterleavedZeroBubble` of torch (2.13), which asks for M to divide by
    `max(1, M // P)`, and the ZB-H1 of arXiv 2401.10241, which it is with one chunk.
    """
    check_sizes("interleaved_zb", P, M, V)
    return _zero_bubble(P, M, V, "InterleavedZB")


def zbh1(P: int, M: int) -> Schedule:
    """The zero-bubble schedule that needs no more memory than 1F1B.

    Bubble `(P-1)/(3*M+P-1)` where F, I and W take the same time, peak `min(M, P)` on every rank.

    Args:
      P: number of ranks.
      M: number of microbatches.

    Raises:
      ValueError: a size is below 1.

    Follows ZB-H1 of arXiv 2401.10241.
    """
    check_sizes("zbh1", P, M)
    return _zero_bubble(P, M, 1, "ZBH1")


def _zero_bubble(P: int, M: int, V: int, name: str) -> Schedule:
    forwards, backwards, size = _sequences(P, M, V)
    orders = []
    for rank in range(P):
        ahead = min(V * M, (V - 1) * size + P - 1 - rank)
        order = [Action("F", *work) for work in forwards[:ahead]]
        for done, work in enumerate(backwards):
            order += [Action("F", *next_one) for next_one in forwards[ahead + done :][:1]]
            order.append(Action("I", *work))
            # Rank r lags its W by r: so much must be left to fill the time after its last I.
            if done >= rank:
                order.append(Action("W", *backwards[done - rank]))
        order += [Action("W", *work) for work in backwards[max(0, V * M - rank) :]]
        orders.append(order)
    return Schedule.from_orders(orders, M, loop_stages(P, V), name)


def _sequences(P: int, M: int, V: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """Forwards and backwards of every rank as (chunk, microbatch), and the largest group."""
    groups = _groups(P, M)
    forwards = [(chunk, m) for group in groups for chunk in range(V) for m in group]
    backwards = [(chunk, m) for group in groups for chunk in reversed(range(V)) for m in group]
    return forwards, backwards, max(map(len, groups))


def _groups(P: int, M: int) -> list[range]:
    """Microbatches that go through one chunk together: `M // P` groups, as equal as can be.

    No group is smaller than P (unless M is), or a rank would wait for its own next chunk.
    """
    count = max(1, M // P)
    cuts = [-(-M * i // count) for i in range(count + 1)]
    return [range(lo, hi) for lo, hi in pairwise(cuts)]
