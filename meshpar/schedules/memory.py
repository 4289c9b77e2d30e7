"""How many stage activations each rank holds, which the order alone decides."""

from __future__ import annotations

from collections.abc import Sequence

from meshpar.schedules.actions import Cell


def peak_activations(order: Sequence[Cell], released_by: str) -> int:
    """Most activations one rank holds while it works through its cells.

    Args:
      order: the rank's cells; the parts of a combined one hold what they need together.
      released_by: `"W"`: an activation lives from the start of its F to the end of its B or W;
        `"I"`: to the end of its B or I.
    """
    live = peak = 0
    for cell in order:
        ops = [action.op for action in cell]
        live += ops.count("F")
        peak = max(peak, live)
        live -= ops.count("B") + ops.count("W" if released_by == "W" else "I")
    return peak


def peak_of(orders: Sequence[Sequence[Cell]]) -> int:
    """The largest of the ranks' peaks until W, which a memory limit is compared with."""
    return max(peak_activations(order, "W") for order in orders)
