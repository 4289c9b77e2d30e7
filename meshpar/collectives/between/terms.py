"""On what terms a call is made: how long it waits, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshpar.collectives.between.flight import Flight

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a caller waits.

    Args:
      timeout: seconds until the call raises; `None` leaves it to the watchdog.
      flights: where the caller does not wait, the list that takes what the call starts.
    """

    timeout: float | None = None
    flights: list[Flight] | None = None
