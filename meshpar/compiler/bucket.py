"""Small reshards of one kind together: one collective for all that are there when one is needed.

A collective of few bytes takes its latency and hardly more. So each one that is needed takes along
those of its kind, axes and dtype that could run by then: the gradients of biases and norms are
reduced at once, as are the parameters of ZeRO gathered. Nothing waits for another. A sum over
several axes that would go alone, as that of the loss, goes axis by axis with sums over one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, permutations

from meshpar.compiler.planned import Move, PlannedProgram
from meshpar.placements.apply_bucket import BucketKey, bucket_key
from meshpar.placements.layout import Layout

__all__ = ["bucket_moves"]

FULL = 32
"""A bucket takes this many times the bytes up to which a collective is small."""


@dataclass(frozen=True, slots=True)
class _Guest:
    """A move that may share its collective."""

    key: BucketKey
    move: Move
    bytes: int
    first: int  # the node before which it can run at the earliest
    needed: int  # the node before which it runs


@dataclass(slots=True)
class _Party:
    """Moves that share a collective, at the node that needs the host's."""

    host: _Guest
    room: int  # how many bytes more may come along
    taken: list[_Guest] = field(default_factory=list)

    def admits(self, guest: _Guest) -> bool:
        return guest.first <= self.host.needed <= guest.needed and guest.bytes <= self.room

    def take(self, guest: _Guest) -> None:
        self.taken.append(guest)
        self.room -= guest.bytes


def bucket_moves(planned: PlannedProgram, small: int) -> PlannedProgram:
    """The same program, with small moves that can run together next to each other and numbered.

    Args:
      planned: the program.
      small: up to how many bytes sent a collective is worth sharing.
    """
    waiting: dict[BucketKey, list[_Guest]] = {}
    for guest in _guests(planned, small):
        waiting.setdefault(guest.key, []).append(guest)
    parties = {key: list(_parties(guests, small * FULL)) for key, guests in waiting.items()}
    gone = {guest for party in chain(*parties.values()) for guest in party.taken}
    for party in list(chain(*parties.values())):
        stages = [] if party.taken else _axis_by_axis(planned, party.host, parties)
        for other, guest in stages:
            other.take(guest)
        if stages:
            gone.add(party.host)
    return _arranged(planned, list(chain(*parties.values())), gone)


def _parties(guests: list[_Guest], full: int) -> Iterator[_Party]:
    """Moves of one key, in the order in which they are needed -> who goes with whom."""
    while guests:
        host, *others = guests
        party = _Party(host, full - host.bytes)
        guests = []
        for guest in others:
            if party.admits(guest):
                party.take(guest)
            else:
                guests.append(guest)
        yield party


def _axis_by_axis(
    planned: PlannedProgram, lone: _Guest, parties: Mapping[BucketKey, list[_Party]]
) -> list[tuple[_Party, _Guest]]:
    """The parties of one axis each with which a sum over several axes can go, if there are any."""
    kind, axes, reduce, dtype = lone.key
    if kind != "all_reduce" or len(axes) == 1:
        return []
    for order in permutations(axes):
        stages: list[tuple[_Party, _Guest]] = []
        src, first = lone.move.src, lone.first
        for axis in order:
            move = replace(lone.move, src=src, dst=src.without_partial([axis]))
            guest = replace(lone, key=(kind, (axis,), reduce, dtype), move=move, first=first)
            party = next((p for p in parties.get(guest.key, ()) if p.admits(guest)), None)
            if party is None:
                break
            assert bucket_key(planned.steps(move), planned.program.aval(move.value).dtype) == (
                guest.key
            ), "a part of a sum is a sum"
            stages.append((party, guest))
            src, first = move.dst, party.host.needed + 1
        else:
            return stages
    return []


def _arranged(
    planned: PlannedProgram, parties: Sequence[_Party], gone: set[_Guest]
) -> PlannedProgram:
    """The program with each party at its host's place and the others' places empty."""
    hosts = {(party.host.needed, party.host.move): party for party in parties if party.taken}
    empty = {(guest.needed, guest.move) for guest in gone}
    if not hosts:
        return planned
    numbers = iter(range(len(hosts)))

    def arranged(at: int, moves: tuple[Move, ...]) -> Iterator[Move]:
        for move in moves:
            party = hosts.get((at, move))
            if party is not None:
                together = (move, *(guest.move for guest in party.taken))
                number = next(numbers)
                yield from (replace(each, bucket=number) for each in together)
            elif (at, move) not in empty:
                yield move

    nodes = tuple(
        replace(node, moves=tuple(arranged(i, node.moves))) if node.moves else node
        for i, node in enumerate(planned.nodes)
    )
    return replace(planned, nodes=nodes, moves=tuple(arranged(len(nodes), planned.moves)))


def _guests(planned: PlannedProgram, small: int) -> Iterator[_Guest]:
    """The moves that may share a collective, in the order in which they are needed."""
    there: dict[tuple[int, Layout], int] = {}
    backward = next((i for i, n in enumerate(planned.nodes) if n.node.backward), 0)
    for i, moves in enumerate([*(node.moves for node in planned.nodes), planned.moves]):
        for move in moves:
            steps = planned.steps(move)
            key = bucket_key(steps, planned.program.aval(move.value).dtype)
            if key is not None and steps[0].bytes <= small:
                first = there.get((move.value, move.src), 0)
                # What the backward pass gathers again is not to be there in between.
                first = max(first, backward) if move.again else first
                yield _Guest(key, move, steps[0].bytes, first, i)
            there[move.value, move.dst] = i + 1
        if i < len(planned.nodes):
            node = planned.nodes[i]
            there.update(
                ((value, layout), i + 1)
                for value, layout in zip(node.node.outs, node.results, strict=True)
            )
