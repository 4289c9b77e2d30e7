"""Who takes part in one run of a job, and the environment variables that tell a rank so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshpar.launch.devices import device_variables

__all__ = ["Team", "rank_variables"]


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks of one run of a job, as one of its nodes sees them.

    Args:
      job_id: the name of the job.
      restart: 0 for the first run, then 1, 2, ...
      max_restart: how many restarts there may be.
      coordinator: `host:port` of the coordination service, which rank 0 runs.
      endpoints: `host:port` of each rank, for what it may want to serve.
      nodes: how many ranks each node has.
      node: which of the nodes this is.
    """

    job_id: str
    restart: int
    max_restart: int
    coordinator: str
    endpoints: tuple[str, ...]
    nodes: tuple[int, ...]
    node: int = 0

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = sum(self.nodes[: self.node])
        return range(first, first + self.nodes[self.node])


def rank_variables(
    team: Team,
    rank: int,
    devices: tuple[int, ...] | None,
    platform: str,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of a rank: that of the launcher, and who the rank is.

    Args:
      team: the ranks.
      rank: one of `team.ranks`.
      devices: those that it shall see; `None` for all.
      platform: as of `devices.platform_of`.
      environ: the launcher's environment.
    """
    local, world = rank - team.ranks.start, len(team.endpoints)
    host, _, port = team.coordinator.rpartition(":")
    return {
        **environ,
        "PYTHONUNBUFFERED": "1",  # a log shows what happened before a rank was killed
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(team.endpoints),
        "PADDLE_CURRENT_ENDPOINT": team.endpoints[rank],
        "PADDLE_MASTER": team.coordinator,
        "MASTER_ADDR": host.strip("[]"),  # these two win over PADDLE_MASTER where they are set
        "MASTER_PORT": port,
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_GLOBAL_SIZE": str(world),
        "PADDLE_LOCAL_RANK": str(local),
        "PADDLE_RANK_IN_NODE": str(local),
        "PADDLE_LOCAL_SIZE": str(len(team.ranks)),
        "PADDLE_NNODES": str(len(team.nodes)),
        "PADDLE_JOB_ID": team.job_id,
        "MESHPAR_JOB_ID": team.job_id,
        "MESHPAR_RESTART_COUNT": str(team.restart),
        "MESHPAR_MAX_RESTART": str(team.max_restart),
        **({} if devices is None else device_variables(devices, platform, environ)),
    }
