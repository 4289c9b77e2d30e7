"""All named schedules, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshpar.schedules.classic import eager_1f1b, fthenb, one_f_one_b
from meshpar.schedules.dualpipe import dualpipev
from meshpar.schedules.interleaved import interleaved_zb, vpp, zbh1
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.sizes import check_sizes
from meshpar.schedules.zigzag import zbvpp


@dataclass(frozen=True, slots=True)
class _Named:
    """A generator, the numbers of stages on a rank it is for, and what to use for others."""

    make: Callable[[int, int, int], Schedule]
    least: int = 1
    most: int | None = None
    below: str = ""
    above: str = ""

    def fits(self, V: int) -> bool:
        return self.least <= V <= (self.most or V)


_NAMED = {
    "FThenB": _Named(fthenb),
    "1F1B": _Named(lambda P, M, V: one_f_one_b(P, M), most=1, above="VPP"),
    "Eager1F1B": _Named(lambda P, M, V: eager_1f1b(P, M), most=1, above="VPP"),
    "ZBH1": _Named(lambda P, M, V: zbh1(P, M), most=1, above="InterleavedZB"),
    "VPP": _Named(vpp),
    "InterleavedZB": _Named(interleaved_zb),
    "ZBVPP": _Named(zbvpp, least=2, below="ZBH1"),
    "DualPipeV": _Named(
        lambda P, M, V: dualpipev(P, M), least=2, most=2, below="ZBH1", above="ZBVPP"
    ),
}

NAMES = tuple(_NAMED)
"""The names that `generate` knows."""


def generate(name: str, P: int, M: int, V: int = 1, *, split_backward: bool = False) -> Schedule:
    """A named schedule, for any number of ranks and microbatches.

    Args:
      name: one of `NAMES`.
      P: number of ranks.
      M: number of microbatches; it may be below P, and need not divide by it.
      V: stages on each rank.
      split_backward: replaces each full backward by I and then W, where the schedule has any.

    Raises:
      ValueError: an unknown name, a size below 1, or a V that the schedule is not for; the message
        names the schedule that is.

    Example:
      >>> generate("VPP", P=4, M=8, V=2).title
      'VPP (P=4, M=8, V=2)'
    """
    if name not in _NAMED:
        raise ValueError(f"generate({name!r}): unknown schedule; it is one of {', '.join(NAMES)}.")
    check_sizes("generate", P, M, V)
    named = _NAMED[name]
    if not named.fits(V):
        other = named.below if named.least > V else named.above
        only = "V = 1" if named.most == 1 else "V = 2" if named.most == 2 else "V >= 2"
        raise ValueError(
            f"generate({name!r}, P={P}, M={M}, V={V}): {name} is for {only}; "
            f"generate({other!r}, P={P}, M={M}, V={V}) is the schedule for V = {V}."
        )
    schedule = named.make(P, M, V)
    return schedule.split_backward() if split_backward else schedule


def named_schedules(P: int, M: int, V: int) -> list[Schedule]:
    """Every named schedule for these sizes."""
    return [named.make(P, M, V) for named in _NAMED.values() if named.fits(V)]
