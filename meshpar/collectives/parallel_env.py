"""`ParallelEnv`: who this process is, as Paddle's scripts ask."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from meshpar.collectives.environment import patience, place

__all__ = ["ParallelEnv"]


@dataclass(frozen=True, slots=True, init=False)
class ParallelEnv:
    """What the environment says of this process; nothing is started.

    Args:
      rank: its rank; 0 for one alone.
      world_size: the number of processes; 1 for one alone.
      local_rank: its number among those of its node.
      trainer_endpoints: `host:port` of each process, where the launcher gave them.
      device_id: the first device that it may use.

    Example:
      >>> ParallelEnv().world_size
      1

    Follows `paddle.distributed.ParallelEnv` (3.3.1).
    """

    rank: int
    world_size: int
    local_rank: int
    trainer_endpoints: tuple[str, ...]
    device_id: int

    def __init__(self) -> None:
        where = place()
        values = {
            "rank": where.rank,
            "world_size": where.size,
            "local_rank": where.local_rank,
            "trainer_endpoints": where.endpoints,
            "device_id": where.devices[0] if where.devices else 0,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def nranks(self) -> int:
        """The number of processes."""
        return self.world_size

    @property
    def dev_id(self) -> int:
        """The first device that it may use."""
        return self.device_id

    @property
    def current_endpoint(self) -> str:
        """`host:port` of this process; empty where the launcher gave none."""
        return self.trainer_endpoints[self.rank] if self.rank < len(self.trainer_endpoints) else ""

    @property
    def device_type(self) -> str:
        """What JAX runs on: "cpu", "gpu" or "tpu". Starts JAX's backend."""
        return jax.default_backend()

    @property
    def pg_timeout(self) -> int:
        """Milliseconds after which the watchdog ends a process that waits in a collective."""
        return int(patience().collective * 1000)
