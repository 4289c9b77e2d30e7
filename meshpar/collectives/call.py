"""What every public collective does first and last: where it runs, between whom, how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import jax

from meshpar.collectives import between, inside
from meshpar.collectives.groups import check_member, process_group_of, seconds, world
from meshpar.collectives.processes import process_rank
from meshpar.collectives.region import Region, current_region
from meshpar.collectives.task import Task
from meshpar.errors import CollectiveError, MeshparError
from meshpar.mesh import Group
from meshpar.placements.values import describe

__all__ = ["Call", "calling"]

_WAITS = between.Terms()  # without a time limit


@dataclass(eq=False, slots=True)
class Call:
    """One call of a collective; a context whose errors name it and show its arguments.

    Args:
      name: the public function.
      region: the region it is called in; `None` between processes.
      group: the group; between processes one of process ranks.
      given: the group that the caller gave.
      terms: how it waits, between processes. A region is one program, which waits where it must.
      arguments: what errors show.
    """

    name: str
    region: Region | None
    group: Group
    given: Group | None
    terms: between.Terms
    arguments: Mapping[str, Any]

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, MeshparError):
            raise self.named(error) from None

    def named(self, error: MeshparError) -> MeshparError:
        """An error from inside, with this call's name and arguments."""
        return _named(error, self.name, self.given, self.arguments)

    def run(
        self, operation: str, *args: Any, terms: between.Terms | None = None, **named: Any
    ) -> Any:
        """An operation of the place of this call, which is `inside` or `between`.

        Args:
          operation: its name.
          *args, **named: its arguments.
          terms: on what terms between processes; the call's own where left out.
        """
        if self.region is not None:
            return getattr(inside, operation)(*args, self.group, **named)
        return getattr(between, operation)(*args, self.group, terms or self.terms, **named)

    def done(self, operation: Callable[..., Any], *args: Any) -> Any:
        """The result of a call, or a task that will have it.

        Args:
          operation: runs the call's operations, here and now, on its terms.
          *args: its arguments.
        """
        value = operation(*args)
        if self.terms.flights is None:
            return value
        if self.region is not None:
            return Task(value)
        return self.task(between.Started(value, self.terms.flights, self.terms.timeout))

    def task(self, started: between.Pending | between.Started) -> Task:
        """A task whose errors name this call."""
        return Task(started=_Started(started, self))

    def check_rank(self, what: str, rank: Any) -> None:
        """Checks that a rank is a member of the group; see `check_member`."""
        check_member(what, rank, self.group, self.region)

    def is_own_rank(self, rank: int) -> bool:
        """Whether this process has a rank."""
        return self.region is None and process_rank() == rank


@dataclass(frozen=True, slots=True, repr=False)
class _Started:
    """A call that was started, whose errors name it when it is waited for."""

    pending: between.Pending | between.Started
    call: Call

    def result(self) -> Any:
        try:
            return self.pending.result()
        except MeshparError as error:
            raise self.call.named(error) from None

    def done(self) -> bool:
        return self.pending.done()

    def __repr__(self) -> str:
        return f"<{self.call.name}, {'ended' if self.done() else 'on its way'}>"


def calling(
    name: str,
    group: Group | None,
    timeout: float | timedelta | None = None,
    sync_op: bool = True,
    **arguments: Any,
) -> Call:
    """The call of a public collective, for a `with`.

    Args:
      name: the public function.
      group: the group that was given; `None` is the world.
      timeout: the time limit that was given.
      sync_op: whether the caller waits.
      **arguments: what the error shall show, pytrees of arrays among them.
    """
    try:
        region = current_region()
        chosen = world(region) if group is None else group
        if not isinstance(chosen, Group):
            raise CollectiveError(
                f"group={group!r} is no group.",
                instead="mesh.group('dp'), mp.new_group([0, 1]), or None for all ranks",
            )
        if region is None:
            if group is not None:
                world(None)  # raises where there are no processes
                chosen = process_group_of(chosen)
        elif timeout is not None:
            raise CollectiveError(
                f"timeout={timeout!r} inside a region.",
                because="the region is one compiled program, and XLA cannot end a collective in it",
                instead="leave `timeout` out",
            )
        limit = chosen.timeout if timeout is None else seconds(timeout)
        terms = _WAITS
        if limit is not None or not sync_op:
            terms = between.Terms(limit, None if sync_op else [])
        return Call(name, region, chosen, group, terms, arguments)
    except MeshparError as error:
        raise _named(error, name, group, arguments) from None


def _named(
    error: MeshparError, name: str, group: Group | None, arguments: Mapping[str, Any]
) -> MeshparError:
    facts = {label: _described(value) for label, value in arguments.items()}
    return error.within(name, **facts, group="the world" if group is None else group)


def _described(value: Any) -> str:
    leaves = jax.tree.leaves(value, is_leaf=lambda x: x is None)
    shown = [describe(leaf) if hasattr(leaf, "shape") else repr(leaf) for leaf in leaves[:8]]
    more = ", ..." if len(leaves) > 8 else ""
    return shown[0] if len(leaves) == 1 else f"({', '.join(shown)}{more})"
