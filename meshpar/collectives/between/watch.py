"""The watchdog: a thread that sees to it that no process waits for ever without a word.

It tells the others where this rank is, says who is behind once a call has taken long, and ends the
process when a call can not end any more or its time is over: Python cannot interrupt XLA. So it
does when the ranks have made different calls and go on with what these gave.
"""

from __future__ import annotations

import sys
import threading
import time

from meshpar.collectives.between.behind import publish, who_is_behind
from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.same_calls import first_other_call
from meshpar.collectives.between.world import World

__all__ = ["Watch"]


class Watch:
    """The thread.

    Args:
      world: what it watches.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._over = threading.Event()
        self._told: tuple[object, ...] = ()
        self._due: dict[str, tuple[int, float]] = {}  # channel -> call, seconds until a look at it
        self._thread = threading.Thread(target=self._run, name="meshpar watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and looks a last time whether the ranks have made the same calls."""
        self._over.set()
        self._thread.join(timeout=5)
        if all(departure.how == "left" for departure in self._world.departures.values()):
            publish(self._world)
            self._compare()

    def _run(self) -> None:
        while not self._over.wait(self._world.patience.tick):
            channels = list(self._world.channels.values())
            for channel in channels:
                channel.settle()
            now = tuple((channel.moment, channel.state) for channel in channels)
            if now != self._told:
                publish(self._world)
                self._told = now
                self._compare()
            for channel in channels:
                first = next(iter(list(channel.open.values())), None)
                if first is not None and not first.timed:
                    self._look_at(channel, first.moment)

    def _compare(self) -> None:
        for channel in list(self._world.channels.values()):
            difference = first_other_call(self._world, channel)
            if difference is not None and self._world.peers is not None:
                self._world.peers.fail(difference)

    def _look_at(self, channel: Channel, moment: Moment) -> None:
        waited = time.monotonic() - moment.since
        patience = self._world.patience
        over = waited > patience.collective
        gone = self._world.gone(channel)
        # XLA raises by itself in most processes when a peer dies, and the call's error is better.
        lost = bool(gone) and time.monotonic() - min(d.at for d in gone) > patience.grace
        number, due = self._due.get(channel.key, (0, 0.0))
        if number != moment.number:
            due = min(patience.grace, patience.report)
        if not (over or lost or waited > due):
            return
        later = 2 * waited if waited > patience.report else min(2 * waited, patience.report)
        self._due[channel.key] = (moment.number, later)
        waiting = who_is_behind(self._world, channel, moment)
        if moment.number not in channel.open or self._over.is_set():
            return  # it has ended meanwhile
        line = f"it has waited {waited:.0f} s in {moment} of {channel}: {waiting}"
        hopeless = waiting.hopeless and (lost or not gone)
        if self._world.peers is not None and (hopeless or over):
            self._world.peers.fail(line)
        if waited > patience.report:
            print(f"meshpar: rank {self._world.rank}: {line}", file=sys.stderr, flush=True)
