"""SPMD rules: how the dims of each operation relate, a file per family of primitives.

A rule says nothing about meshes, costs or devices. To add one for a primitive of your own, register
a function from the operands' avals and the equation's parameters to a `Rule`:

    from meshpar import rules

    @rules.rule_for("my_matmul")
    def my_matmul(lhs, rhs, **params):
        return rules.einsum("mk,kn->mn", [lhs, rhs])

Equal letters are cut alike, a letter that the result lacks leaves it pending a sum. `rules.rule`
has the rest: which pending reductions pass through, which dims must be whole, how parameters that
name sizes change for local blocks, and how a device learns where its block begins.
"""

from meshpar.rules import (
    contraction,
    convolution,
    dynamic_slices,
    elementwise,
    gather,
    linalg,
    ordering,
    random,
    reduction,
    scans,
    scatter,
    shape,
    slicing,
    windows,
)
from meshpar.rules.registry import find_rule, register, rule_for
from meshpar.rules.rule import Pass, Rule, einsum

__all__ = [
    "Pass",
    "Rule",
    "contraction",
    "convolution",
    "dynamic_slices",
    "einsum",
    "elementwise",
    "find_rule",
    "gather",
    "linalg",
    "ordering",
    "random",
    "reduction",
    "register",
    "rule_for",
    "scans",
    "scatter",
    "shape",
    "slicing",
    "windows",
]
