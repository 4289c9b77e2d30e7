"""The environment variables that tell a process who it is; nothing else reads or sets them.

`python -m meshpar.launch` and `mp.spawn` set Paddle's, so scripts that read those go on working.
Where none is set, `jax.distributed` knows Slurm, Open MPI, Kubernetes and Cloud TPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from meshpar._jax import detected_cluster
from meshpar.errors import CollectiveError

__all__ = ["Patience", "Place", "patience", "place", "set_place"]

_PLACE = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_MASTER", "PADDLE_LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class Place:
    """Who a process is among the processes of its job.

    Args:
      rank: 0 to `size - 1`.
      size: the number of processes.
      master: `host:port` at which they meet; `None` for a process alone.
      local_rank: its number among those of its node.
      endpoints: `host:port` of each process, where the launcher gave them.
      devices: the local devices that it may use; `None` means all.
      by: what told it, for messages.
      held: meshpar's launcher started it, and holds the master's port.
    """

    rank: int = 0
    size: int = 1
    master: str | None = None
    local_rank: int = 0
    endpoints: tuple[str, ...] = ()
    devices: tuple[int, ...] | None = None
    by: str = "no variable"
    held: bool = False


def place() -> Place:
    """Who this process is, by Paddle's variables, else by the cluster's.

    `PADDLE_TRAINER_ID` is the rank and `PADDLE_TRAINERS_NUM` the size (`PADDLE_GLOBAL_RANK`,
    `PADDLE_GLOBAL_SIZE` and the length of `PADDLE_TRAINER_ENDPOINTS` stand in for them);
    `MASTER_ADDR` with `MASTER_PORT`, else `PADDLE_MASTER`, else the first endpoint is the master.

    Raises:
      CollectiveError: a variable is no number, or they contradict each other.
    """
    endpoints = tuple(filter(None, os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")))
    size = _number("PADDLE_TRAINERS_NUM", _number("PADDLE_GLOBAL_SIZE", len(endpoints) or None))
    if size is None:
        return _place_in_cluster()
    rank = _number("PADDLE_TRAINER_ID", _number("PADDLE_GLOBAL_RANK", 0)) or 0
    if not 0 <= rank < size:
        raise CollectiveError(
            "init_parallel_env(): the environment names a rank outside the job.",
            because=f"the rank is {rank}, and {size} processes have the ranks 0 to {size - 1}",
            instead=f"PADDLE_TRAINER_ID=0 PADDLE_TRAINERS_NUM={size} python script.py, or "
            f"python -m meshpar.launch --nproc_per_node {size} script.py",
        )
    master = _master(endpoints)
    if size > 1 and master is None:
        raise CollectiveError(
            "init_parallel_env(): the processes have no address to meet at.",
            because=f"PADDLE_TRAINERS_NUM is {size}, and none of MASTER_ADDR with MASTER_PORT, "
            "PADDLE_MASTER and PADDLE_TRAINER_ENDPOINTS is set",
            instead="PADDLE_MASTER=127.0.0.1:6070 on all of them, or python -m meshpar.launch",
        )
    devices = os.environ.get("PADDLE_LOCAL_DEVICE_IDS") or os.environ.get(
        "FLAGS_selected_gpus"  # noqa: SIM112
    )
    return Place(
        rank,
        size,
        master if size > 1 else None,
        _number("PADDLE_LOCAL_RANK", _number("PADDLE_RANK_IN_NODE", rank)) or 0,
        endpoints,
        tuple(int(d) for d in devices.split(",")) if devices else None,
        "PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM and PADDLE_MASTER",
        "MESHPAR_JOB_ID" in os.environ,
    )


def set_place(where: Place) -> None:
    """Sets Paddle's variables to what another cluster's said, for scripts that read them."""
    values = (where.rank, where.size, where.master or "", where.local_rank)
    for name, value in zip(_PLACE, values, strict=True):
        os.environ.setdefault(name, str(value))


def _place_in_cluster() -> Place:
    try:
        found = detected_cluster()
    except (RuntimeError, OSError) as error:  # from a cluster's API, or its metadata server
        raise CollectiveError(
            "init_parallel_env(): the cluster does not tell this process its place.",
            because=error,
            instead="PADDLE_TRAINERS_NUM=1 for a process alone, or python -m meshpar.launch",
        ) from error
    if found is None or found.num_processes == 1:
        return Place()
    return Place(
        found.process_id,
        found.num_processes,
        found.coordinator_address,
        found.local_process_id or 0,
        devices=None if found.local_device_ids is None else tuple(found.local_device_ids),
        by=f"{found.name}, as jax.distributed sees it",
    )


def _master(endpoints: tuple[str, ...]) -> str | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        return f"{host}:{port}"
    named = os.environ.get("PADDLE_MASTER", "").removeprefix("http://")
    return named or (endpoints[0] if endpoints else None)


def _number(name: str, default: int | None) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise CollectiveError(
            f"init_parallel_env(): the environment variable {name} is no number.",
            because=f"it is {text!r}",
        ) from None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long processes wait for each other, in seconds; each has its environment variable.

    Args:
      meet: for all to come to `init_parallel_env`; `FLAGS_stop_check_timeout`.
      collective: in a collective without `timeout=`, after which the process ends;
        `PADDLE_PG_TIMEOUT`, which is in milliseconds.
      report: in a collective until the watchdog first says who is behind;
        `MESHPAR_REPORT_SECONDS`.
      grace: for XLA to notice by itself that a peer has died; `MESHPAR_GRACE_SECONDS`.
      tick: between two looks of the watchdog; `MESHPAR_TICK_SECONDS`.
    """

    meet: float = 900.0
    collective: float = 1800.0
    report: float = 30.0
    grace: float = 3.0
    tick: float = 0.5


def patience() -> Patience:
    """The waiting times, from the environment."""
    usual = Patience()
    return Patience(
        meet=_seconds("FLAGS_stop_check_timeout", usual.meet),
        collective=_seconds("PADDLE_PG_TIMEOUT", usual.collective * 1000) / 1000,
        report=_seconds("MESHPAR_REPORT_SECONDS", usual.report),
        grace=_seconds("MESHPAR_GRACE_SECONDS", usual.grace),
        tick=_seconds("MESHPAR_TICK_SECONDS", usual.tick),
    )


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if value <= 0:
        raise CollectiveError(
            f"init_parallel_env(): the environment variable {name} is no duration.",
            because=f"it is {text!r}, and a positive number is needed",
        )
    return value
