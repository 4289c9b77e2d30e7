"""Joining a job of several processes, and leaving it."""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import jax
from jax.extend.backend import clear_backends

from meshpar._jax import backend_is_up, coordinator_address
from meshpar.collectives.between.ending import finish
from meshpar.collectives.between.meeting import Line, loopback, meet
from meshpar.collectives.between.peers import Peers
from meshpar.collectives.between.watch import Watch
from meshpar.collectives.between.world import World, enter_world, joined
from meshpar.collectives.environment import Patience, Place, patience, place, set_place
from meshpar.errors import CollectiveError
from meshpar.mesh import Group
from meshpar.store import Store

__all__ = ["init_parallel_env", "join", "leave"]


class _Job:
    """What lives as long as this process is in a job; `starts` counts its jobs."""

    watch: Watch | None = None
    starts = 0
    exits_are_ours = False


_job = _Job()


def init_parallel_env(
    nccl_config: object = None, *, timeout: float | timedelta | None = None
) -> Group:
    """Joins the processes of this job; afterwards collectives outside a region run between them.

    It starts `jax.distributed`, so it comes before anything that uses JAX's devices. Called again
    it gives the same group. A process alone (no variables, no cluster) is a world of one and needs
    no service. Where the user's program has started `jax.distributed` itself, that job is joined.

    Who this process is comes from the environment: `PADDLE_TRAINER_ID`, `PADDLE_TRAINERS_NUM` and
    `PADDLE_MASTER` (or `MASTER_ADDR` with `MASTER_PORT`), as `python -m meshpar.launch` and
    `mp.spawn` set them; else Slurm, Open MPI, Kubernetes or Cloud TPU say it, and Paddle's
    variables are set to the same.

    From here on an error that nobody catches ends this process at once and tells the others, and a
    watchdog names ranks that keep the others waiting; see `Patience` for its times.

    Args:
      nccl_config: taken, as in Paddle; XLA configures NCCL, by `NCCL_*` variables.
      timeout: seconds to wait for the others; `FLAGS_stop_check_timeout`, else 900.

    Returns:
      The world.

    Raises:
      CollectiveError: not all processes came in time (it names the missing ranks), their addresses
        or numbers contradict each other, or JAX's devices are in use already.

    Example:
      >>> import meshpar as mp
      >>> mp.init_parallel_env().ranks
      (0,)

    Follows `paddle.distributed.init_parallel_env` (3.3.1), which gives `None` to a process alone.
    """
    world = joined()
    if world is not None:
        return Group(tuple(range(world.place.size)), id=0)
    return join(None, timeout)


def join(where: Place | None, timeout: float | timedelta | None = None) -> Group:
    """Joins a job.

    Args:
      where: who this process is; the environment says it where left out.
      timeout: as of `init_parallel_env`.

    Returns:
      The world.
    """
    wait = patience()
    if timeout is not None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        wait = Patience(seconds, wait.collective, wait.report, wait.grace, wait.tick)
    _job.starts += 1
    if where is None and jax.distributed.is_initialized():
        where, lines = _adopted(wait)
    else:
        where, lines = _met(where or place(), wait)
    if where.size == 1:
        enter_world(World(where, wait, None, None))
        return Group((0,), id=0)
    set_place(where)
    world = World(where, wait, Peers(where.rank, lines), _store())
    enter_world(world)
    _job.watch = Watch(world)
    _take_exits()
    return Group(tuple(range(where.size)), id=0)


def leave() -> None:
    """Leaves the job: all its processes do, and wait for each other."""
    world = joined()
    if world is None:
        return
    _part(world)
    if world.place.size > 1:
        jax.distributed.shutdown()


def _part(world: World) -> None:
    finish(world)
    enter_world(None)
    if _job.watch is not None:
        _job.watch.close()
        _job.watch = None
    for lane in world.lanes.values():
        lane.close()
    if world.peers is not None:
        world.peers.say("left")
        world.peers.close()


def _met(where: Place, wait: Patience) -> tuple[Place, dict[int, Line]]:
    """Meets the others and starts `jax.distributed`."""
    if where.size == 1:
        return where, {}
    if backend_is_up():
        if _job.starts == 1:
            raise CollectiveError(
                "init_parallel_env() comes too late.",
                because="JAX's backend has started without the other processes",
                instead="call it before anything makes an array or asks for devices",
            )
        # A second job of this process: its devices are numbered anew.
        clear_backends()
        jax.clear_caches()
    assert where.master is not None, "a place among several has a master"
    lines = meet(where.master, where.rank, where.size, wait.meet, held=where.held)
    host, _, port = where.master.rpartition(":")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with _clear_errors(where):
        jax.distributed.initialize(
            where.master,
            where.size,
            where.rank,
            local_device_ids=where.devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{host}:{port}" if loopback(host) else None,
        )
    return where, lines


def _adopted(wait: Patience) -> tuple[Place, dict[int, Line]]:
    """Joins the job that the user's program has started."""
    size, rank = jax.process_count(), jax.process_index()
    master = coordinator_address()
    if size == 1 or master is None:
        return Place(by="jax.distributed"), {}
    where = Place(rank, size, master, by="jax.distributed")
    store = _store()
    host = master.rpartition(":")[0]
    if rank == 0:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        store.put("meeting/address", f"{host}:{port}".encode())
    until = time.monotonic() + wait.meet
    while not (found := store.under("meeting")):
        if time.monotonic() > until:
            raise CollectiveError(
                "init_parallel_env(): rank 0 did not call it.", because=f"{wait.meet:g} s passed"
            )
        time.sleep(0.05)
    return where, meet(found["address"].decode(), rank, size, wait.meet)


def _store() -> Store:
    store = Store.of_this_process(f"meshpar/{_job.starts}")
    assert store is not None, "jax.distributed runs"
    return store


@contextlib.contextmanager
def _clear_errors(where: Place) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            "init_parallel_env(): jax.distributed did not start.",
            place=f"rank {where.rank} of {where.size} at {where.master}, by {where.by}",
            because=error,
        ) from error


def _take_exits() -> None:
    """From now on this process says so when it goes away."""
    if _job.exits_are_ours:
        return
    _job.exits_are_ours = True
    before = sys.excepthook

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        world = joined()
        if world is None or world.peers is None:
            return
        first = f"{error}".partition("\n")[0]
        world.peers.fail(f"{kind.__name__}: {first}")

    sys.excepthook = fail
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Runs before JAX's handler, which waits until all processes end."""
    world = joined()
    if world is None or world.peers is None:
        return
    finish(world)
    lost = [d for d in world.peers.gone.values() if d.how != "left"]
    if _job.watch is not None:
        _job.watch.close()
    # The lines stay: rank 0 passes on what the others still say, until JAX lets it end.
    if lost:
        world.peers.fail("; ".join(map(str, lost)))
    world.peers.say("left")
