"""Names of pytree leaves: the keys of the path, joined by dots."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath, SequenceKey

__all__ = ["keys_of", "leaf_name", "named_leaves"]


def keys_of(path: KeyPath) -> tuple[str, ...]:
    """The keys of a path as words; the `.value` of a flax variable is none of them."""
    words: list[str] = []
    for key in path:
        match key:
            case DictKey(key=word) | FlattenedIndexKey(key=word):
                words.append(str(word))
            case SequenceKey(idx=word):
                words.append(str(word))
            case GetAttrKey(name=word):
                words.append(word)
            case _:
                words.append(str(key))
    return tuple(words[:-1] if words and words[-1] == "value" else words)


def leaf_name(path: KeyPath) -> str:
    """The dotted name, such as "layers.0.kernel"; empty for a tree that is one leaf."""
    return ".".join(keys_of(path))


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Name and value of each leaf of a pytree, in JAX's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(leaf_name(path), leaf) for path, leaf in leaves]
