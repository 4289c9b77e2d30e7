"""`P2POp`: one operation of `batch_isend_irecv`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["P2POp", "Peer"]

Peer = int | Sequence[int | None] | Mapping[int, int] | Callable[[int], int | None]


@dataclass(frozen=True, slots=True, eq=False)
class P2POp:
    """One array to send or receive, for `batch_isend_irecv`.

    Args:
      op: `mp.isend` or `mp.irecv`.
      tensor: what is sent; for `irecv` an array like what is received.
      peer: the rank that gets it, or that it comes from. Inside a region, where all ranks run one
        program, a function or table rank -> peer, `None` where a rank takes no part.
      group: the ranks; `None` is the world.

    Raises:
      CollectiveError: another operation.

    Example:
      >>> import meshpar as mp
      >>> P2POp(mp.isend, 1.0, peer=lambda rank: rank + 1).kind
      'isend'

    Follows `paddle.distributed.P2POp` (3.3.1).
    """

    op: Callable[..., Any]
    tensor: Any
    peer: Peer
    group: Group | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("isend", "irecv"):
            raise CollectiveError(f"P2POp(op={self.op!r}): op is mp.isend or mp.irecv.")

    @property
    def kind(self) -> str:
        """The name of the operation, `isend` or `irecv`."""
        return getattr(self.op, "__name__", "")
