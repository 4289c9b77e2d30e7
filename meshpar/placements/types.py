"""Placements: how a tensor lies along one axis of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Partial", "Placement", "ReduceType", "Replicate", "Shard"]


class ReduceType(IntEnum):
    """How the contributions of a `Partial` tensor become its value.

    Follows `paddle.distributed.ReduceType` (3.3.1), numbers included.
    """

    kRedSum = 0
    kRedMax = 1
    kRedMin = 2
    kRedProd = 3
    kRedAvg = 4
    kRedAny = 5
    kRedAll = 6

    def __repr__(self) -> str:
        return f"ReduceType.{self.name}"

    @property
    def word(self) -> str:
        """The short lower-case name: sum, max, min, prod, avg, any or all."""
        return self.name.removeprefix("kRed").lower()

    @classmethod
    def of(cls, kind: ReduceType | str | int) -> ReduceType:
        """The member for a member, a number, or a name such as `"sum"`.

        Raises:
          ValueError: no reduction has that name or number.
        """
        for member in cls:
            if kind == member or kind in (member.word, member.name):
                return member
        words = ", ".join(repr(member.word) for member in cls)
        raise ValueError(f"Partial({kind!r}): the reductions are {words}, or a ReduceType")


class Placement:
    """Base of `Shard`, `Replicate` and `Partial`; compared and hashed by value.

    Follows `paddle.distributed.Placement` (3.3.1).
    """

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it is a `Shard`, of the tensor dim `dim` if one is given."""
        return False

    def is_replicated(self) -> bool:
        """Whether it is `Replicate`."""
        return False

    def is_partial(self) -> bool:
        """Whether it is a `Partial`."""
        return False


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Shard(Placement):
    """The tensor dim is cut into one block for each coordinate of the mesh axis.

    A dim of size n over k coordinates gives blocks of `ceil(n / k)` rows; the last ones may be
    shorter or empty.

    Args:
      dim: the tensor dim; a negative one counts from the last.
      shard_order: where several mesh axes cut one dim, they nest by this number, the lowest
        outermost; equal ones by the order of the axes.
      split_factor: only 1 acts.

    Raises:
      TypeError: `dim` is not an int.
      NotImplementedError: `split_factor` is not 1.

    Example:
      >>> Shard(0).is_shard(0), Shard(1, shard_order=1)
      (True, Shard(1, shard_order=1))

    Follows `paddle.distributed.Shard` (3.3.1); negative dims, which crash there, are allowed.
    """

    dim: int
    shard_order: int

    def __init__(self, dim: int, *, shard_order: int = 0, split_factor: int = 1) -> None:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"Shard(dim): dim is {dim!r}; it must be an int, such as Shard(0)")
        if split_factor != 1:
            raise NotImplementedError(
                f"Shard({dim}, split_factor={split_factor}): re-ordered blocks are not "
                "implemented; only split_factor=1 acts"
            )
        object.__setattr__(self, "dim", int(dim))
        object.__setattr__(self, "shard_order", int(shard_order))

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def get_dim(self) -> int:
        """The tensor dim."""
        return self.dim

    def get_co_shard_order(self) -> int:
        """The `shard_order`."""
        return self.shard_order

    def get_split_factor(self) -> int:
        """Always 1."""
        return 1

    def __repr__(self) -> str:
        order = f", shard_order={self.shard_order}" if self.shard_order else ""
        return f"Shard({self.dim}{order})"


@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """Every coordinate of the mesh axis holds the same value.

    Follows `paddle.distributed.Replicate` (3.3.1).
    """

    def is_replicated(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Partial(Placement):
    """Each coordinate holds a contribution of the full shape; the value is their reduction.

    Args:
      reduce_type: a `ReduceType`, or its short name such as `"sum"` or `"max"`.

    Example:
      >>> Partial(), Partial("max")
      (Partial(), Partial(ReduceType.kRedMax))

    Follows `paddle.distributed.Partial` (3.3.1).
    """

    kind: ReduceType

    def __init__(self, reduce_type: ReduceType | str | int = ReduceType.kRedSum) -> None:
        object.__setattr__(self, "kind", ReduceType.of(reduce_type))

    def is_partial(self) -> bool:
        return True

    def reduce_type(self) -> ReduceType:
        """The reduction."""
        return self.kind

    def __repr__(self) -> str:
        return "Partial()" if self.kind is ReduceType.kRedSum else f"Partial({self.kind!r})"
