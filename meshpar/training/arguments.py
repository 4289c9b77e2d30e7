"""The arguments of a step: how many there must be, and what they are called."""

from __future__ import annotations

import inspect
from typing import Any

from meshpar.placements.values import describe
from meshpar.training.adapters import Adapter

__all__ = ["argument_names"]


def argument_names(adapter: Adapter, mode: str, args: tuple[Any, ...], labels: int) -> list[str]:
    """A name per argument: the parameters of the model's call, then the labels.

    Args:
      adapter: the model.
      mode: for the message.
      args: the inputs, then the labels.
      labels: how many of them are labels.

    Returns:
      The names; the one argument of a function model has none, its keys say enough.

    Raises:
      ValueError: a wrong number of arguments.
    """
    inputs = args[: len(args) - labels] if len(args) >= labels else ()
    try:
        bound = adapter.inputs.bind(*inputs).arguments if len(args) >= labels else None
    except TypeError:
        bound = None
    if bound is None:
        wanted = ", ".join(adapter.inputs.parameters)
        raise ValueError(
            f"DistModel in mode {mode!r}: {len(args)} argument(s) for the input(s) ({wanted}) "
            f"of {adapter.name} and {labels} label(s); given: "
            f"{', '.join(describe(arg) for arg in args) or 'nothing'}"
        )
    if adapter.whole_batch:
        return [""]
    names: list[str] = []
    for name, value in bound.items():
        kind = adapter.inputs.parameters[name].kind
        variadic = kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}.{i}" for i in range(len(value))] if variadic else [name]
    return names + (["labels"] if labels == 1 else [f"labels.{i}" for i in range(labels)])
