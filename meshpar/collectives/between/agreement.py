"""A call that is new to its ranks is agreed on before it runs.

XLA's collectives take for granted that all ranks make the same call: of other shapes gloo ends the
process, and of other operations it may give wrong numbers. So the first time each rank puts the
text of its call into the key-value store and reads those of the others. A call that has been agreed
on costs nothing any more; that a rank is alone in finding one new is seen from what the others do.
"""

from __future__ import annotations

from meshpar.collectives.between.channel import Channel, Moment
from meshpar.collectives.between.faults import contradiction
from meshpar.collectives.between.rendezvous import wait_for
from meshpar.collectives.between.world import World
from meshpar.errors import CollectiveTimeout

__all__ = ["agree"]


def agree(world: World, channel: Channel, moment: Moment) -> None:
    """Waits until all ranks of a channel have said that this is their next call.

    Raises:
      CollectiveError: they have not: a rank makes another call, or is gone. All ranks that find the
        call new raise.
    """
    store = world.store
    if store is None or len(channel.ranks) == 1:
        return
    key = f"calls/{channel.key}/{moment.number}"
    store.put(f"{key}/{world.rank}", moment.text.encode())
    try:
        said = wait_for(world, channel, moment, key, len(channel.ranks))
    except CollectiveTimeout:
        # Whoever comes later must not take it that this rank is there.
        store.put(f"{key}/{world.rank}", b"has given the call up after its time limit")
        raise
    store.read_by(key, len(channel.ranks))
    ranks_of: dict[str, list[int]] = {}
    for rank in channel.ranks:
        ranks_of.setdefault(said[str(rank)].decode(), []).append(rank)
    if len(ranks_of) > 1:
        facts = tuple(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
            for text, ranks in ranks_of.items()
        )
        raise contradiction(channel, moment, facts)
