"""Where the user splits a model into stages, by the names of its modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flax import nnx

from meshpar.training.strategy_groups import PipelineConfig

__all__ = ["AtModules", "OverModules", "SplitPoint", "read_splits"]


class SplitPoint(Enum):
    """On which side of a module the model is split, in `Strategy.pipeline.split_spec`.

    `END`: the module belongs to the stage before; `BEGINNING`: to the stage after.

    Example:
      >>> import meshpar as mp
      >>> spec = {"layers.1": SplitPoint.END}
      >>> mp.Strategy({"pipeline": {"enable": True, "split_spec": spec}}).pipeline.split_spec
      {'layers.1': <SplitPoint.END: 1>}

    Follows `paddle.distributed.SplitPoint` (3.3.1), where `BEGINNING` is refused.
    """

    BEGINNING = 0
    END = 1


@dataclass(frozen=True, slots=True)
class AtModules:
    """A split at each of some modules, in order.

    Args:
      points: name of a module, and the side.
    """

    points: tuple[tuple[str, SplitPoint], ...]


@dataclass(frozen=True, slots=True)
class OverModules:
    """Modules that are shared out evenly over the stages, in the order in which they run.

    Args:
      prefixes: each stands for the modules `prefix.0`, `prefix.1` and so on.
      names: the modules themselves, where they are known.
      asked: what the user wrote.
    """

    prefixes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    asked: str = ""


def read_splits(asked: PipelineConfig, model: Any) -> AtModules | OverModules | None:
    """What `split_spec` and `vpp_seg_method` ask for; `None` leaves it to meshpar.

    Args:
      asked: the options.
      model: the user's model, of whatever form.

    Raises:
      ValueError: both are given, or one has another form than it may have.
      TypeError: class names, of a model that is no nnx module.
    """
    method, spec = asked.vpp_seg_method, asked.split_spec
    by_class = method not in ("", "uniform")
    if by_class and not method.startswith("layer:"):
        raise ValueError(
            f"Strategy.pipeline.vpp_seg_method = {method!r}: it is 'uniform', or 'layer:' and a "
            "pattern of class names, such as 'layer:DecoderLayer'"
        )
    if by_class and spec is not None:
        raise ValueError(
            "Strategy.pipeline: split_spec names the modules where stages end and vpp_seg_method "
            "their classes; set one of them"
        )
    if by_class:
        return OverModules(
            names=_of_class(model, method.removeprefix("layer:")),
            asked=f"vpp_seg_method = {method!r}",
        )
    if spec is None:
        return None
    shown = f"split_spec = {spec!r}"
    if isinstance(spec, str):
        return OverModules((spec,), asked=shown)
    if isinstance(spec, (list, tuple)) and spec and all(isinstance(s, str) for s in spec):
        return OverModules(tuple(spec), asked=shown)
    if isinstance(spec, Mapping) and all(
        isinstance(k, str) and isinstance(v, SplitPoint) for k, v in spec.items()
    ):
        return AtModules(tuple(spec.items()))
    raise ValueError(
        f"Strategy.pipeline.split_spec = {spec!r}: it is a dict from names of modules to "
        'SplitPoint, such as {"layers.1": mp.SplitPoint.END}, or the name of a list of modules, '
        'such as "layers"'
    )


def _of_class(model: Any, pattern: str) -> tuple[str, ...]:
    """The names of the modules whose class matches a pattern, outermost only."""
    asked = f"Strategy.pipeline.vpp_seg_method = 'layer:{pattern}'"
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"{asked}: a {type(model).__name__} tells no classes of its modules, as an nnx.Module "
            'does; split_spec="layers" names them'
        )
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{asked}: {error}") from None
    modules = [(path, type(module).__name__) for path, module in nnx.iter_modules(model) if path]
    found = [path for path, name in modules if wanted.search(name)]
    outer = [p for p in found if not any(q != p and p[: len(q)] == q for q in found)]
    if not outer:
        classes = ", ".join(sorted({name for _, name in modules}))
        raise ValueError(f"{asked}: no module has such a class; there are {classes}")
    return tuple(".".join(map(str, path)) for path in outer)
