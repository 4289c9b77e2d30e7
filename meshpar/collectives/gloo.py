"""Paddle's short way to a job of CPU processes."""

from __future__ import annotations

import jax

from meshpar.collectives.environment import Place
from meshpar.collectives.processes import is_initialized
from meshpar.collectives.start import join, leave
from meshpar.collectives.synchronize import barrier
from meshpar.errors import CollectiveError

__all__ = ["gloo_barrier", "gloo_init_parallel_env", "gloo_release"]


def gloo_init_parallel_env(rank_id: int, rank_num: int, server_endpoint: str) -> None:
    """Joins a job of CPU processes, whatever the environment says; see `init_parallel_env`.

    Args:
      rank_id: who this process is, 0 to `rank_num - 1`.
      rank_num: how many there are, at least 2.
      server_endpoint: `host:port`, the same on all, where rank 0 listens.

    Raises:
      CollectiveError: a rank or a number that cannot be, a process that has joined a job already,
        or what `init_parallel_env` raises.

    Follows `paddle.distributed.gloo_init_parallel_env` (3.3.1).
    """
    facts = {"rank_id": rank_id, "rank_num": rank_num, "server_endpoint": repr(server_endpoint)}
    if rank_num < 2 or not 0 <= rank_id < rank_num:
        raise CollectiveError(
            "gloo_init_parallel_env(): there are no such ranks.",
            **facts,
            because="a job has two processes or more, ranks 0 to rank_num - 1",
        )
    if is_initialized():
        raise CollectiveError(
            "gloo_init_parallel_env(): this process has joined a job.",
            **facts,
            instead="mp.gloo_release() first",
        )
    jax.config.update("jax_platforms", "cpu")
    join(Place(rank_id, rank_num, server_endpoint, by="gloo_init_parallel_env"))


def gloo_barrier() -> None:
    """Waits for all processes of the job.

    Raises:
      CollectiveError: this process has joined none.

    Follows `paddle.distributed.gloo_barrier` (3.3.1).
    """
    barrier()


def gloo_release() -> None:
    """Leaves the job, as `destroy_process_group` does; nothing happens where there is none.

    Example:
      >>> gloo_release()

    Follows `paddle.distributed.gloo_release` (3.3.1).
    """
    leave()
