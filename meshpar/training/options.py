"""A group of options: a fixed set of typed fields, readable and writable, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Self

__all__ = ["Options", "default_of"]


@dataclass(slots=True, repr=False)
class Options:
    """Base of the groups of a `Strategy`; subclasses add fields with defaults.

    An unknown field raises, and so does a value of another type than the default's.
    """

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """A group with some fields set."""
        group = cls()
        for name, value in config.items():
            setattr(group, name, value)
        return group

    def to_dict(self) -> dict[str, Any]:
        """Every field -> its value."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def get(self, k: str, d: object = None) -> Any:
        """The field `k`, or `d` where there is none."""
        return getattr(self, k) if k in self._by_name() else d

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {
            name: getattr(self, name)
            for name, field in self._by_name().items()
            if getattr(self, name) != default_of(field)
        }

    def __setattr__(self, name: str, value: object) -> None:
        known = self._by_name()
        if name not in known:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}; its fields are {', '.join(known)}"
            )
        kind = type(default_of(known[name]))
        if not _fits(value, kind):
            raise TypeError(
                f"{type(self).__name__}.{name} = {value!r}: it takes a {kind.__name__}, as the "
                f"default {default_of(known[name])!r} is"
            )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.changed().items())
        return f"{type(self).__name__}({inner})"

    @classmethod
    def _by_name(cls) -> dict[str, Field[Any]]:
        return {field.name: field for field in fields(cls)}


def default_of(field: Field[Any]) -> Any:
    """The default of a dataclass field, whatever its type."""
    if field.default is not MISSING:
        return field.default
    assert field.default_factory is not MISSING, f"the option {field.name} has no default"
    return field.default_factory()


def _fits(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is type(None) or isinstance(value, kind)
