"""The members of a group inside a region, as coordinates along the axes of a collective.

XLA's collectives run over whole axes. A group that is a part of a line takes part in a collective
over the line: the others bring nothing, and leave the result alone. So any ranks can be a group,
and groups may overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar._jax import varying_axes
from meshpar.collectives.region import Region, current_region
from meshpar.errors import CollectiveError
from meshpar.mesh import Group

__all__ = ["Members", "members_of", "position", "rank", "varying"]


@dataclass(frozen=True, slots=True)
class Members:
    """Which devices of a region belong to a group.

    Args:
      region: the region.
      axes: the axes that the group extends along; its collectives run over these.
      length: the number of devices along them.
      picks: the positions along `axes` that are members, in rank order.
      others: the coordinates of the members along the region's other axes; `None` where the group
        stands for every line.
    """

    region: Region
    axes: tuple[str, ...]
    length: int
    picks: tuple[int, ...]
    others: tuple[tuple[str, int], ...] = ()

    @property
    def count(self) -> int:
        """The number of members."""
        return len(self.picks)

    @property
    def whole(self) -> bool:
        """Whether all devices along the axes are members, in this order."""
        return self.picks == tuple(range(self.length))

    @property
    def everyone(self) -> bool:
        """Whether every device of the region is in the group, or in one like it."""
        return self.whole and not self.others

    def here(self) -> jax.Array:
        """The position of this device along the axes, int32."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def position(self) -> jax.Array:
        """The position of this device in the group, int32; -1 outside."""
        if self.everyone:
            return self.here()
        table = np.full(self.length, -1, np.int32)
        table[list(self.picks)] = np.arange(self.count)
        inside = jnp.asarray(table)[self.here()]
        for axis, coordinate in self.others:
            inside = jnp.where(lax.axis_index(axis) == coordinate, inside, -1)
        return inside

    def index_of(self, rank: int) -> int:
        """The position in the group of a rank, or of the member at its coordinate."""
        return self.picks.index(_position(self.region.coordinates(rank), self.axes, self.region))

    def only_members(self, result: jax.Array, outside: jax.Array) -> jax.Array:
        """A result where this device is a member, else another value."""
        if self.everyone:
            return result
        return jnp.where(self.position() >= 0, result, outside)


def members_of(group: Group) -> Members:
    """The members of a group in the current region.

    Raises:
      CollectiveError: the group follows another mesh or axes that the region does not cover, or
        has ranks that are not in the region.
    """
    region = current_region()
    assert region is not None, "only called inside a region"
    if group.mesh is not None:
        return _along_axes(group, region)
    missing = [r for r in group.ranks if r not in region.world.ranks]
    if missing:
        raise CollectiveError(
            f"rank {missing[0]} is not in the region.",
            because=f"{region} has the ranks {', '.join(map(str, region.world.ranks))}",
        )
    at = [region.coordinates(rank) for rank in group.ranks]
    axes = tuple(axis for axis in region.axes if len({one[axis] for one in at}) > 1)
    others = tuple(
        (axis, at[0][axis]) for axis in region.axes if axis not in axes and region.sizes[axis] > 1
    )
    picks = tuple(_position(one, axes, region) for one in at)
    return Members(region, axes, _length(axes, region), picks, others)


def _along_axes(group: Group, region: Region) -> Members:
    if group.mesh != region.mesh:
        raise CollectiveError(
            "the group belongs to another mesh.",
            because=f"it follows axes of {group.mesh!r}, and the region is over {region.mesh!r}",
            instead="mesh.group(axes) of the region's mesh, or mp.new_group(ranks)",
        )
    missing = [axis for axis in group.axes if axis not in region.axes]
    if missing:
        raise CollectiveError(
            f"the region does not cover the axis {missing[0]!r}.",
            because=f"it covers {', '.join(map(repr, region.axes))} of {region.mesh!s}",
            instead=f"a region over it: mp.spmd(..., axes=[{missing[0]!r}]), or without `axes`",
        )
    length = _length(group.axes, region)
    return Members(region, group.axes, length, tuple(range(length)))


def _length(axes: tuple[str, ...], region: Region) -> int:
    return math.prod(region.sizes[axis] for axis in axes)


def _position(at: Mapping[str, int], axes: tuple[str, ...], region: Region) -> int:
    out = 0
    for axis in axes:
        out = out * region.sizes[axis] + at[axis]
    return out


def rank() -> jax.Array:
    """The rank of this device, int32."""
    region = current_region()
    assert region is not None, "only called inside a region"
    here = lax.axis_index(region.axes)
    ranks = region.world.ranks
    return here if ranks == tuple(range(len(ranks))) else jnp.asarray(ranks, jnp.int32)[here]


def position(group: Group) -> jax.Array:
    """The position of this device in a group, int32; -1 outside."""
    return members_of(group).position()


def varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The same value, typed as one that may differ along some axes; gradients are summed there."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
