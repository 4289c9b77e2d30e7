"""How often a loop runs that does something in some turns of another one only.

A jaxpr does not say how often a `while_loop` runs. Who writes one and knows it says so in the name
of its scope, where plans read it, and profiles show it.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import jax

from meshpar._jax import scope_names

__all__ = ["in_some_turns", "turns_of"]

_SHARE = re.compile(r"\[(\d+)/(\d+)\]$")


def in_some_turns(name: str, runs: int, turns: int) -> AbstractContextManager[Any]:
    """A scope for a loop that runs once in some turns of the loop around it.

    Args:
      name: the scope's name.
      runs: in how many turns at most, on any device.
      turns: of how many.
    """
    return jax.named_scope(f"{name}[{runs}/{turns}]")


def turns_of(eqn: Any) -> Fraction:
    """How often the body of a loop's equation runs, in one turn of the loop around it.

    That is not known of a `while_loop` in no such scope, which counts once.
    """
    if eqn.primitive.name == "scan":
        return Fraction(eqn.params["length"])
    if eqn.primitive.name == "while":
        for name in reversed(scope_names(eqn)):
            found = _SHARE.search(name)
            if found:
                return Fraction(int(found[1]), int(found[2]))
    return Fraction(1)
