"""Messages from one rank to another.

On CPUs each pair and direction has a lane of its own. GPUs and TPUs run one program after the
other, so that there both sides start their messages in the same order; `batch_isend_irecv` does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.between import bodies
from meshpar.collectives.between.begun import agreed, check_member
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.engine import Action, perform
from meshpar.collectives.between.flight import Flight, Started
from meshpar.collectives.between.lanes import Pending, in_lane, later
from meshpar.collectives.between.placed import placed
from meshpar.collectives.between.programs import program_of
from meshpar.collectives.between.terms import Terms
from meshpar.collectives.between.world import World, here
from meshpar.collectives.p2p_op import P2POp
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["batch_isend_irecv", "recv", "runs_here", "send", "start"]

_NAME = "message()"


def send(x: jax.Array, dst: int, group: Group, terms: Terms) -> None:
    """Gives an array to `dst`; returns once it has it."""
    _pass_on(x, _pair(here().rank, dst), terms)


def recv(like: jax.Array, src: int, group: Group, terms: Terms) -> jax.Array:
    """The array that `src` sends, of the shape and dtype of `like`."""
    return _pass_on(jnp.asarray(like), _pair(src, here().rank), terms)


def runs_here() -> bool:
    """Whether a message that is waited for may be sent in the caller's thread.

    Behind a program that is on its way it may not, nor may an array for it be made there.
    """
    world = here()
    return not world.has_lanes or world.order.is_idle


def start(
    work: Callable[[Terms], Any], pair: tuple[int, int], timeout: float | None
) -> Pending | Started:
    """Lets something that sends messages run behind those that are on their way.

    Args:
      work: takes the terms of its calls.
      pair: sender and receiver.
      timeout: seconds from when it is waited for until it raises.
    """
    if here().has_lanes:
        return later(lambda: work(Terms(timeout)), pair, timeout)
    flights: list[Flight] = []
    return Started(work(Terms(timeout, flights)), flights, timeout)


def batch_isend_irecv(
    operations: Sequence[P2POp], timeout: float | None
) -> list[Pending | Started]:
    """Sends and receives together: all are started before any is waited for.

    Args:
      operations: each with arrays, a group, and a peer that is a rank of it.
      timeout: seconds until waiting for one raises.

    Returns:
      One for each operation; the result of a receive is what came, that of a send what was sent.
    """
    rank = here().rank
    pairs = [_pair_of(operation, rank) for operation in operations]

    def started(i: int) -> Pending | Started:
        def run(terms: Terms) -> Any:
            moved = jax.tree.map(lambda x: _pass_on(x, pairs[i], terms), operations[i].tensor)
            return operations[i].tensor if operations[i].kind == "isend" else moved

        return start(run, pairs[i], timeout)

    order = range(len(pairs))
    if not here().has_lanes:
        order = sorted(order, key=lambda i: pairs[i])  # the same on all ranks
    pending = {i: started(i) for i in order}
    return [pending[i] for i in range(len(pairs))]


def _pass_on(x: jax.Array, pair: tuple[int, int], terms: Terms) -> Any:
    world = here()
    if not world.has_lanes:
        return perform(Action(_NAME, bodies.passed_on, (0,)), x, pair, terms, pair=True)
    check_member(world, pair)
    x = placed(x, world)
    # A message runs beside other programs, and gloo tells sets of devices apart by their order.
    # That of a mesh ascends as a rule, so that this one descends.
    ranks = (max(pair), min(pair))
    program = program_of(world, bodies.passed_on, (ranks.index(pair[0]),), ranks, x)

    def work(world: World, channel: Channel, moment: Moment) -> Any:
        agreed(world, channel, moment)
        return jax.block_until_ready(program(x))

    return in_lane(world, program.text(_NAME), work, pair, terms)


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
