"""How often each collective of a lowered module runs: calls and loops multiplied out."""

from __future__ import annotations

import re
from collections import defaultdict

from meshpar.compiler.hlo import KINDS, collectives_in_stablehlo

_FUNCTION = re.compile(r"^ *func\.func .*?@(\w+)\(")
_CALL = re.compile(r"(?:func\.)?call @(\w+)\(")
_OP = re.compile(rf'"stablehlo\.({"|".join(KINDS)})"')
_LIMIT = re.compile(r"stablehlo\.constant dense<(\d+)> : tensor<i32>")


def executed_collectives(text, others=()):
    """Triples of (kind, found, times), for loops that count to a constant.

    `others` says in text order how often each other loop runs, in one turn of the loop around it;
    those for which it says nothing count once.
    """
    others = iter(others)
    calls = defaultdict(list)  # function -> (caller, times in one run of it)
    ops = defaultdict(list)  # kind -> (function, times in one run of it), in text order
    function, loops, limit = "", [], 1
    for line in text.splitlines():
        started = _FUNCTION.match(line)
        if started:
            function, loops = started[1], []
        indent = len(line) - len(line.lstrip())
        body = line.strip()
        if body == "cond {":
            limit = None
        elif limit is None and _LIMIT.search(body):
            limit = int(_LIMIT.search(body)[1])
        elif body == "} do {":
            loops.append((indent, limit or next(others, 1)))
            limit = 1
        elif body == "}" and loops and loops[-1][0] == indent:
            loops.pop()
        times = 1
        for _, turns in loops:
            times *= turns
        for called in _CALL.findall(line):
            calls[called].append((function, times))
        for kind in _OP.findall(line):
            ops[kind].append((function, times))

    def runs(name):
        return 1 if name == "main" else sum(runs(caller) * n for caller, n in calls[name])

    for kind, found in collectives_in_stablehlo(text).items():
        for one, (where, times) in zip(found, ops[kind], strict=True):
            yield kind, one, runs(where) * times
