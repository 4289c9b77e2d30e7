"""The job that this process has joined."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from meshpar.collectives.between.channel import Channel
from meshpar.collectives.between.lane import Lane
from meshpar.collectives.between.order import Order
from meshpar.collectives.between.peers import Peers
from meshpar.collectives.environment import Patience, Place
from meshpar.errors import CollectiveError
from meshpar.mesh import Group
from meshpar.store import Store

__all__ = ["World", "enter_world", "here", "joined"]


class World:
    """What a process keeps while it is one of a job.

    Args:
      place: who it is.
      patience: how long it waits.
      peers: the other ranks.
      store: what they tell each other; `None` in a job of one.

    Its `device` is the one whose collectives are this process's, its first one, and `home` the
    sharding of arrays there; `everyone` is the group of all ranks.
    """

    def __init__(
        self, place: Place, patience: Patience, peers: Peers | None, store: Store | None
    ) -> None:
        self.place, self.patience, self.peers, self.store = place, patience, peers, store
        self.departures = {} if peers is None else peers.gone
        self.channels: dict[tuple[bool, tuple[int, ...]], Channel] = {}
        self.lanes: dict[tuple[int, ...], Lane] = {}
        self.programs: OrderedDict[Any, Any] = OrderedDict()
        self.lock = threading.Lock()
        first = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self.devices = [first[rank] for rank in range(place.size)]
        self.rank = place.rank
        self.everyone = Group(tuple(range(place.size)), id=0)
        self.device: Any = self.devices[self.rank]
        self.home = SingleDeviceSharding(self.device)
        self.widened = jax.jit(
            lambda x: x.reshape(1), in_shardings=self.home, out_shardings=self.home
        )
        self.order = Order(self.device)
        self.has_lanes = self.device.platform == "cpu"

    def channel(self, ranks: tuple[int, ...], pair: bool = False) -> Channel:
        """The channel between some ranks."""
        found = self.channels.get((pair, ranks))
        if found is None:
            with self.lock:
                found = self.channels.setdefault((pair, ranks), Channel(ranks, pair))
        return found

    def lane(self, channel: Channel) -> Lane:
        """Where the messages of a pair run."""
        found = self.lanes.get(channel.ranks)
        if found is None:
            with self.lock:
                found = self.lanes.setdefault(channel.ranks, Lane(f"meshpar {channel}"))
        return found

    def gone(self, channel: Channel) -> list[Any]:
        """The members of a channel that are not there any more."""
        return [] if self.peers is None else self.peers.of(channel.ranks)


class _Holder:
    """Holds the one world of the process; its threads share it."""

    world: World | None = None


_holder = _Holder()


def enter_world(world: World | None) -> None:
    """Makes a world the one of this process; `None` leaves it."""
    _holder.world = world


def joined() -> World | None:
    """The world of this process, if it has joined one."""
    return _holder.world


def here() -> World:
    """The world of this process.

    Raises:
      CollectiveError: it has joined none.
    """
    if _holder.world is None:
        raise CollectiveError(
            "this process has not met the others of its job.",
            because="a collective outside a region is one between processes",
            instead="mp.init_parallel_env() first",
        )
    return _holder.world
