"""Messages from one rank to another.

Each pair and direction has a lane of its own, so that messages that go both ways at once, or were
started in another order on the other side, do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.between import bodies
from meshpar.collectives.between.engine import Action, Pending, perform, start
from meshpar.collectives.between.world import here
from meshpar.collectives.p2p_op import P2POp
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["batch_isend_irecv", "recv", "send"]

_ACTION = Action("message()", bodies.passed_on)


def send(x: jax.Array, dst: int, group: Group, timeout: float | None) -> None:
    """Gives an array to `dst`; returns once it has it."""
    perform(_ACTION, x, _pair(here().rank, dst), timeout, pair=True)


def recv(like: jax.Array, src: int, group: Group, timeout: float | None) -> jax.Array:
    """The array that `src` sends, of the shape and dtype of `like`."""
    return perform(_ACTION, jnp.asarray(like), _pair(src, here().rank), timeout, pair=True)


def batch_isend_irecv(operations: Sequence[P2POp], timeout: float | None) -> list[Pending]:
    """Sends and receives together: all are started before any is waited for.

    Args:
      operations: each with arrays, a group, and a peer that is a rank of it.
      timeout: seconds until waiting for one raises.

    Returns:
      One for each operation; the result of a receive is what came, that of a send what was sent.
    """
    rank = here().rank
    pairs = [_pair_of(operation, rank) for operation in operations]

    def started(i: int) -> Pending:
        def run() -> Any:
            moved = jax.tree.map(
                lambda x: perform(_ACTION, x, pairs[i], timeout, pair=True), operations[i].tensor
            )
            return operations[i].tensor if operations[i].kind == "isend" else moved

        return start(run, pairs[i], timeout, pair=True)

    order = range(len(pairs))
    if here().device.platform != "cpu":
        # Such a device runs one program after the other: all ranks start theirs in one order.
        order = sorted(order, key=lambda i: pairs[i])
    pending = {i: started(i) for i in order}
    return [pending[i] for i in range(len(pairs))]


def _pair_of(operation: P2POp, rank: int) -> tuple[int, int]:
    """Sender and receiver."""
    assert isinstance(operation.peer, int), "outside a region a peer is a rank"
    peer = operation.peer
    return _pair(rank, peer) if operation.kind == "isend" else _pair(peer, rank)


def _pair(src: int, dst: int) -> tuple[int, int]:
    if src == dst:
        raise CollectiveError(
            f"rank {src} sends to itself.", because="a message goes to another rank"
        )
    return src, dst
