"""The warning about operations without a rule, which every device computes whole."""

from __future__ import annotations

import warnings

from meshpar.compiler.planned import PlannedNode, PlannedProgram
from meshpar.rules.registry import RULES

__all__ = ["NoRuleWarning", "warn_of_missing_rules"]

_told: set[str] = set()  # primitives that this process was warned of


class NoRuleWarning(UserWarning):
    """A primitive has no rule: its operands are gathered, and every device computes it whole.

    The result is right. Shown once for each primitive; `plan.replicated` lists every such
    operation, and `mp.rules.register` adds a rule.
    """


def warn_of_missing_rules(planned: PlannedProgram, call: str, stacklevel: int) -> None:
    """Warns of each primitive of a program that has no rule, once in the life of the process.

    Args:
      planned: the program.
      call: what planned it.
      stacklevel: as of `warnings.warn`, from the caller.
    """
    for node in _without_rule(planned):
        name, where = node.node.name, node.node.where or "an unknown line"
        if name not in _told:
            _told.add(name)
            warnings.warn(
                f"{call}: no rule for {name!r} at {where}, so every device computes it whole; "
                f"plan.replicated lists such operations, and meshpar.rules.register({name!r}, "
                "rule) adds one",
                NoRuleWarning,
                stacklevel=stacklevel + 1,
            )


def _without_rule(planned: PlannedProgram) -> list[PlannedNode]:
    """The operations whose primitive no rule is registered for, effects excepted."""
    if all(size == 1 for size in planned.sizes.values()):
        return []
    found = [
        node
        for node in planned.nodes
        if node.rule is None
        and node.why.startswith("no rule")
        and node.node.name not in RULES
        and not node.node.eqn.effects  # an effect happens once, on the first device
    ]
    return [*found, *(n for node in planned.nodes for b in node.bodies for n in _without_rule(b))]
