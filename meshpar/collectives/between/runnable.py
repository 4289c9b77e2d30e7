"""A compiled program over one device of every rank, run on this rank's blocks of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar._jax import layout_of, layouts_of, run_on_own, unbinder

__all__ = ["Runnable"]


class Runnable:
    """A program, compiled when it is first run: until then the ranks may not have agreed on it.

    Args:
      fn: what it does, of arrays.
      structs: the arrays' types, with their shardings.
    """

    def __init__(self, fn: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct]) -> None:
        # An argument that is not used is given all the same.
        self.jitted = jax.jit(fn, keep_unused=True)
        self.structs = structs
        self._executable: Any = None
        self._layouts: list[tuple[int, object]] = []  # of arguments that may have several
        self._form: Any = None  # of what `fn` returns
        self._unbinders: list[Callable[[jax.Array], jax.Array]] = []

    def __call__(self, blocks: list[jax.Array], bound: bool) -> Any:
        """Starts it; gives this rank's blocks of what `fn` returns.

        Args:
          blocks: those of its arguments, on this rank's device.
          bound: whether the results are bound to the device.
        """
        if self._executable is None:
            self._compile()
        for i, layout in self._layouts:
            if layout_of(blocks[i]) != layout:
                blocks = [*blocks[:i], jnp.copy(blocks[i]), *blocks[i + 1 :]]
        results = run_on_own(self._executable, blocks)
        if not bound:
            if not self._unbinders:
                self._unbinders = [unbinder(y) for y in results]
            for i, unbind in enumerate(self._unbinders):
                results[i] = unbind(results[i])
        return self._form.unflatten(results)

    def _compile(self) -> None:
        compiled = self.jitted.lower(*self.structs).compile()
        executable = compiled.runtime_executable()
        layouts = enumerate(layouts_of(executable))
        self._layouts = [(i, layout) for i, layout in layouts if len(self.structs[i].shape) > 1]
        self._form = compiled.out_tree
        self._executable = executable  # last: another thread may look
