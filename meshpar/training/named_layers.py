"""The layers of a traced model under the names of their parameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshpar.compiler.program import Program
from meshpar.schedules.executors.evaluate import values_of
from meshpar.schedules.executors.layers import LayerError, Layers

__all__ = ["NamedLayers", "is_under"]


def is_under(parameter: str, module: str) -> bool:
    """Whether a parameter belongs to a module, or is the one of that name.

    Example:
      >>> is_under("layers.1.kernel", "layers.1"), is_under("layers.10.kernel", "layers.1")
      (True, False)
    """
    return parameter == module or parameter.startswith(f"{module}.")


@dataclass(frozen=True, slots=True)
class NamedLayers:
    """A run of layers, and who has which parameters.

    Args:
      count: how many layers there are.
      own: for each layer the names of its parameters; those of stacked layers are the same.
      before: the names of other parameters that are used before the layers.
      after: the names of other parameters that are used after them.
      stacked: whether the layers are turns of a loop, whose parameters have a leading dim.
    """

    count: int
    own: tuple[frozenset[str], ...]
    before: frozenset[str]
    after: frozenset[str]
    stacked: bool

    @classmethod
    def of(cls, layers: Layers, program: Program, names: Mapping[int, str]) -> NamedLayers:
        """Names layers.

        Args:
          layers: the layers.
          program: the program that they are in.
          names: the trained inputs of the program -> their names.
        """
        own = tuple(frozenset(names[v] for v in row if v in names) for row in layers.own)
        own = own * layers.count if layers.stacked else own
        rest = set(names.values()).difference(*own)

        def used(makes: set[int], stop: int | None) -> frozenset[str]:
            needed = _needed(program, makes, stop)
            return frozenset(names[v] for v in needed & names.keys()) & rest

        before, after = used({layers.x}, None), used(values_of(program.outputs), layers.out)
        return cls(layers.count, own, before, after, layers.stacked)

    def bounds(self, module: str) -> tuple[int, int]:
        """The layers that a module makes up, as a range; an empty one beside the layers.

        Raises:
          LayerError: no such module, or it is a part of a layer.
        """
        found = [k for k, names in enumerate(self.own) if any(is_under(n, module) for n in names)]
        found = self._turn(module) if not found and self.stacked else found
        if not found:
            return self._beside(module)
        if self.stacked and len(found) == 1:
            return found[0], found[0] + 1
        cut = [k for k in found if not all(is_under(name, module) for name in self.own[k])]
        if cut:
            rest = sorted(name for name in self.own[cut[0]] if not is_under(name, module))
            raise LayerError(
                f"{module!r} is a part of a layer, and a stage has whole ones.",
                layer=f"it has {', '.join(rest[:3])} too",
                instead="split after the layer, or fewer stages",
            )
        return found[0], found[-1] + 1

    def matching(self, prefixes: Sequence[str]) -> list[str]:
        """The modules `prefix.0`, `prefix.1`, ... of some prefixes, or of all turns of a loop."""
        out: dict[str, None] = {}
        for prefix in prefixes:
            start = len(out)
            for name in sorted(self._all()):
                index, _, _ = name.removeprefix(f"{prefix}.").partition(".")
                if name.startswith(f"{prefix}.") and index.isdigit():
                    out[f"{prefix}.{index}"] = None
            if len(out) == start and self.stacked and self.own and self._has_stack(prefix):
                out |= dict.fromkeys(f"{prefix}.{k}" for k in range(self.count))
            if len(out) == start:
                self._unknown(f"{prefix}.0")
        return list(out)

    # --- inside -----------------------------------------------------------------------------------

    def _all(self) -> set[str]:
        return {*self.before, *self.after}.union(*self.own)

    def _has_stack(self, prefix: str) -> bool:
        return all(is_under(name, prefix) for name in self.own[0])

    def _turn(self, module: str) -> list[int]:
        """The turn of a loop, for a name such as "layers.3"."""
        prefix, _, index = module.rpartition(".")
        if prefix and index.isdigit() and int(index) < self.count and self._has_stack(prefix):
            return [int(index)]
        return []

    def _beside(self, module: str) -> tuple[int, int]:
        if any(is_under(name, module) for name in self.before):
            return 0, 0
        if not any(is_under(name, module) for name in self.after):
            self._unknown(module)
        return self.count, self.count

    def _unknown(self, module: str) -> None:
        names = self._all()
        modules = {".".join(n.split(".")[:k]) for n in names for k in range(1, n.count(".") + 1)}
        if self.stacked:
            stems = {m for m in modules if self._has_stack(m)}
            modules |= {f"{stem}.{k}" for stem in stems for k in range(self.count)}
        close = difflib.get_close_matches(module, sorted(modules), 3) or sorted(modules)[:3]
        raise LayerError(
            f"the model has no module {module!r} with parameters.",
            modules=", ".join(sorted(m for m in modules if m.count(".") < 2)[:12]),
            instead=" or ".join(map(repr, close)),
        )


def _needed(program: Program, makes: set[int], stop: int | None) -> set[int]:
    """The values that some values are made from, but for what only `stop` is made from."""
    needed = makes - {stop}
    for node in reversed(program.nodes):
        if not needed.isdisjoint(node.outs):
            needed |= values_of(node.ins) - {stop}
    return needed
