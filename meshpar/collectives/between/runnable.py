"""A compiled program over one device of every rank, run on this rank's blocks of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar._jax import layout_of, layouts_of, run_on_own

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
        self._structs = structs
        self._executable: Any = None
        self._layouts: list[object] = []
        self._form: Any = None  # of what `fn` returns

    def __call__(self, blocks: list[jax.Array]) -> list[jax.Array]:
        """Starts it on blocks that lie on this rank's device; gives the results' blocks."""
        if self._executable is None:
            self._compile()
        for i, layout in enumerate(self._layouts):
            if layout_of(blocks[i]) != layout:
                blocks[i] = jnp.copy(blocks[i])
        return run_on_own(self._executable, blocks)

    def formed(self, results: Sequence[Any]) -> Any:
        """Results as `fn` returns them."""
        return self._form.unflatten(results)

    def _compile(self) -> None:
        compiled = self.jitted.lower(*self._structs).compile()
        executable = compiled.runtime_executable()
        self._layouts, self._form = layouts_of(executable), compiled.out_tree
        self._executable = executable  # last: another thread may look
