"""Collectives between processes: a rank is a process, and its arrays are its own.

The operations take and give single arrays on this process's devices, a group of process ranks and a
time limit in seconds; they are what `meshpar.collectives.inside` has for regions.

A call is agreed on once (`agreement`), compiled once (`programs`), started in program order
(`engine`, `order`; messages on CPUs: `lanes`) and watched (`watch`). Processes first meet by socket
(`meeting`); the connections stay, so that a rank that dies is noticed and named at once (`peers`).
What else they tell each other goes through the key-value store of `jax.distributed` (`store`).
"""

from meshpar.collectives.between.exchange import alltoall, alltoall_single
from meshpar.collectives.between.flight import Started
from meshpar.collectives.between.lanes import Pending
from meshpar.collectives.between.messages import batch_isend_irecv, recv, runs_here, send, start
from meshpar.collectives.between.movement import all_gather, broadcast, gather, scatter
from meshpar.collectives.between.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from meshpar.collectives.between.reductions import all_reduce, barrier, reduce, reduce_scatter
from meshpar.collectives.between.terms import Terms

__all__ = [
    "Pending",
    "Started",
    "Terms",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "runs_here",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "start",
]
