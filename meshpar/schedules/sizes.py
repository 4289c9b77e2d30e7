"""The sizes every schedule is made from."""

from __future__ import annotations


def check_sizes(call: str, P: int, M: int, V: int = 1) -> None:
    """Refuses what is no size.

    Args:
      call: the function that was called, for the message.
      P: number of ranks.
      M: number of microbatches.
      V: stages on each rank.

    Raises:
      ValueError: one of them is below 1.
      TypeError: one of them is not an int.
    """
    for name, value in (("P", P), ("M", M), ("V", V)):
        if not isinstance(value, int):
            raise TypeError(f"{call}({name}={value!r}): {name} is an int.")
        if value < 1:
            raise ValueError(
                f"{call}({name}={value}): P ranks, M microbatches and V stages on each rank are at "
                f"least 1, as in {call}(P=4, M=8)."
            )
