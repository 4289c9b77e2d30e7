"""The one table of rules: primitive name -> function from avals and parameters to a `Rule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshpar.rules.rule import Rule

__all__ = ["RULES", "register", "rule_for"]

RuleFn = Callable[..., Rule | None]
"""(*operand avals, **parameters) -> the rule, or `None` where it has none for these."""

RULES: dict[str, RuleFn] = {}


def register(name: str, fn: RuleFn) -> None:
    """Adds the rule of a primitive, known by its name.

    Args:
      name: the primitive's name, as a jaxpr prints it.
      fn: called with the operands' avals and, by keyword, the equation's parameters.

    Raises:
      ValueError: the primitive has a rule already.

    Example:
      >>> from meshpar.rules.rule import einsum
      >>> register("my_scale", lambda x, s, **_: einsum("ij,->ij", [x, s]))
    """
    if name in RULES:
        raise ValueError(
            f"rules.register({name!r}): it has a rule already, {RULES[name].__module__}."
            f"{RULES[name].__qualname__}"
        )
    RULES[name] = fn


def rule_for(*names: str) -> Callable[[RuleFn], RuleFn]:
    """Registers the decorated function as the rule of the named primitives."""

    def decorate(fn: RuleFn) -> RuleFn:
        for name in names:
            register(name, fn)
        return fn

    return decorate


def find_rule(name: str, avals: Any, params: dict[str, Any]) -> Rule | None:
    """The rule of an equation, or `None` where its primitive has none."""
    fn = RULES.get(name)
    return None if fn is None else fn(*avals, **params)
