"""Which stages live on which rank.

A placement is a table `stages[rank][chunk]`; stages are numbered in forward order.
"""

from __future__ import annotations

Stages = tuple[tuple[int, ...], ...]


def loop_stages(P: int, V: int) -> Stages:
    """The loop: chunk `c` of rank `r` is stage `c*P + r`, so a value always goes to the next rank.

    Example:
      >>> loop_stages(2, 3)
      ((0, 2, 4), (1, 3, 5))
    """
    return tuple(tuple(c * P + r for c in range(V)) for r in range(P))


def zigzag_stages(P: int, V: int) -> Stages:
    """The zigzag (a V when `V` is 2): odd chunks run from the last rank back to the first.

    Example:
      >>> zigzag_stages(2, 3)
      ((0, 3, 4), (1, 2, 5))
    """
    return tuple(tuple(c * P + (P - 1 - r if c % 2 else r) for c in range(V)) for r in range(P))


def rank_of_stage(stages: Stages) -> list[int]:
    """The rank of every stage.

    Example:
      >>> rank_of_stage(zigzag_stages(2, 2))
      [0, 1, 1, 0]
    """
    owners = {stage: rank for rank, row in enumerate(stages) for stage in row}
    return [owners[stage] for stage in range(len(owners))]
