"""Every layout of a tensor on a mesh, every order of the axes on a dim included."""

from __future__ import annotations

import itertools

from meshpar.placements.layout import Layout
from meshpar.placements.types import ReduceType

SUM, MAX = ReduceType.kRedSum, ReduceType.kRedMax


def all_layouts(axes, ndim, kinds=(SUM, MAX)):
    """All layouts in which an axis cuts a dim, has one of `kinds` pending, or is idle."""
    out = []
    for roles in itertools.product([None, *kinds], repeat=len(axes)):
        pending = tuple(sorted((a, k) for a, k in zip(axes, roles, strict=True) if k is not None))
        rest = [a for a, k in zip(axes, roles, strict=True) if k is None]
        for count in range(len(rest) + 1 if ndim else 1):
            for order in itertools.permutations(rest, count):
                for chosen in itertools.combinations_with_replacement(range(ndim), count):
                    dims = [()] * ndim
                    for axis, dim in zip(order, chosen, strict=True):
                        dims[dim] += (axis,)
                    out.append(Layout(tuple(dims), pending))
    assert len(set(out)) == len(out)
    return out
