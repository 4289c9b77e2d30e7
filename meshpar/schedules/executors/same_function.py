"""When two functions are the same, for what is compiled once and used again.

A lambda is a new object each time its line runs, so functions are compared by code and by what
they close over.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["function_key"]

_BY_VALUE = (int, float, complex, str, bytes, bool, type(None), type, ModuleType)


class _Itself:
    """An object that equals only itself, whatever it says of equality; kept alive by its key."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def function_key(fn: Any, _outer: tuple[Any, ...] = ()) -> Hashable:
    """Equal for functions with the same code, defaults and closed-over values.

    Numbers and strings that are closed over are compared by value, functions as here, all else by
    identity: an array is the same only if it is the same object.
    """
    if isinstance(fn, partial):
        parts = (fn.func, *fn.args, *fn.keywords.values())
        return ("partial", *fn.keywords, *(_value_key(part, _outer) for part in parts))
    if isinstance(fn, MethodType):
        return "method", function_key(fn.__func__, _outer), _Itself(fn.__self__)
    if not isinstance(fn, FunctionType) or any(fn is outer for outer in _outer):
        return _Itself(fn)
    inner = (*_outer, fn)
    values = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    values += [cell.cell_contents for cell in fn.__closure__ or ()]
    return fn.__code__, id(fn.__globals__), *(_value_key(value, inner) for value in values)


def _value_key(value: Any, outer: tuple[Any, ...]) -> Hashable:
    if isinstance(value, (FunctionType, MethodType, partial, BuiltinFunctionType)):
        return function_key(value, outer)
    return (type(value), value) if type(value) in _BY_VALUE else _Itself(value)
