"""Small reshards of one kind together: one collective for all that are there when one is needed.

A collective of few bytes takes its latency and hardly more. So each one that is needed takes along
those of its kind, axes and dtype that could run by then: the gradients of biases and norms are
reduced at once, as are the parameters of ZeRO gathered. Nothing waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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


def bucket_moves(planned: PlannedProgram, small: int) -> PlannedProgram:
    """The same program, with small moves that can run together next to each other and numbered.

    Args:
      planned: the program.
      small: up to how many bytes sent a collective is worth sharing.
    """
    waiting: dict[BucketKey, list[_Guest]] = {}
    for guest in _guests(planned, small):
        waiting.setdefault(guest.key, []).append(guest)
    buckets: dict[int, dict[Move, list[Move]]] = {}  # node -> what takes along what
    gone: set[tuple[int, Move]] = set()
    for guests in waiting.values():
        for host, taken in _parties(guests, small * FULL):
            buckets.setdefault(host.needed, {})[host.move] = [guest.move for guest in taken]
            gone.update((guest.needed, guest.move) for guest in taken)
    if not buckets:
        return planned
    numbers = iter(range(len(gone)))

    def arranged(at: int, moves: tuple[Move, ...]) -> Iterator[Move]:
        hosted = buckets.get(at, {})
        for move in moves:
            if move in hosted:
                number = next(numbers)
                yield from (replace(each, bucket=number) for each in (move, *hosted[move]))
            elif (at, move) not in gone:
                yield move

    nodes = tuple(
        replace(node, moves=tuple(arranged(i, node.moves))) if node.moves else node
        for i, node in enumerate(planned.nodes)
    )
    return replace(planned, nodes=nodes, moves=tuple(arranged(len(nodes), planned.moves)))


def _parties(guests: list[_Guest], full: int) -> Iterator[tuple[_Guest, list[_Guest]]]:
    """Moves of one key, in the order in which they are needed -> each host and whom it takes."""
    while guests:
        host, *others = guests
        taken: list[_Guest] = []
        left: list[_Guest] = []
        room = full - host.bytes
        for guest in others:
            comes = guest.first <= host.needed and guest.bytes <= room
            (taken if comes else left).append(guest)
            room -= guest.bytes if comes else 0
        if taken:
            yield host, taken
        guests = left


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
