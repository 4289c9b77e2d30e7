"""Collectives inside a region: a rank is a device, a collective is one of `jax.lax`.

`members` says which axes a group runs over and which of their coordinates are in it; `combine`,
`move`, `exchange` and `permute` hold the operations.
"""

from meshpar.collectives.inside.combine import all_reduce, reduce, reduce_scatter
from meshpar.collectives.inside.exchange import alltoall, alltoall_single
from meshpar.collectives.inside.members import position, rank
from meshpar.collectives.inside.move import all_gather, broadcast, gather, scatter
from meshpar.collectives.inside.permute import batch_isend_irecv, recv, send

__all__ = [
    "all_gather",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "position",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
