"""`python -m meshpar.launch`: the life of a job on this node, from its options to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from meshpar.launch.devices import gpus, platform_of, shared_out
from meshpar.launch.events import Events, Interrupted, Signalled
from meshpar.launch.guard import Guard
from meshpar.launch.kubernetes import jobset_manifest
from meshpar.launch.logs import open_log, shown
from meshpar.launch.options import Options, parse_options
from meshpar.launch.party import party
from meshpar.launch.slurm import sbatch_script
from meshpar.launch.supervise import Start, supervise
from meshpar.launch.team import Team, rank_variables

__all__ = ["main"]

_LOG = logging.getLogger("meshpar.launch")
_PRINTED = {"slurm": sbatch_script, "k8s": jobset_manifest}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str], *, prog: str = "meshpar launch") -> int:
    """Runs a launcher.

    Args:
      argv: the command line; `--help` lists the options.
      prog: how the program is called, for messages.

    Returns:
      The exit code: 0, that of the rank that failed first (128 + the signal where one killed it),
      or 2 for options that do not fit.
    """
    options = parse_options(argv, prog=prog)
    _set_up_log(options.log_level)
    events = Events()
    try:
        if options.print_for is not None:
            print(_PRINTED[options.print_for](options), end="")
            return 0
        with _signals_to(events), Guard() as guard:
            return _run(options, events, guard)
    except Interrupted as error:
        _LOG.error("%s", error)
        return 128 + error.number
    except (OSError, ValueError, NotImplementedError) as error:
        _LOG.error("%s", error)
        return 2


def _run(options: Options, events: Events, guard: Guard) -> int:
    with party(options, events) as nodes:
        restart = 0
        while True:
            with ExitStack() as stack:
                team = nodes.gather(restart, len(_shares(options)), stack)
                starts = _starts(options, team, stack)
                ended = supervise(starts, team.restart, events, guard, options.grace)
            verdict = nodes.settle(ended)
            if verdict.text:
                _LOG.error("%s", verdict.text)
            if not verdict.again:
                return verdict.code
            restart = team.restart + 1
            _LOG.warning("restart %d of at most %d", restart, options.max_restart)


def _shares(options: Options) -> list[tuple[int, ...]] | list[None]:
    """The devices of each rank of this node."""
    devices = options.devices
    if devices is None:
        devices = gpus(platform_of(os.environ), os.environ)
    count = options.nproc_per_node
    if count is None:
        count = 1 if devices is None else len(devices)
    return shared_out(devices, count)


def _starts(options: Options, team: Team, stack: ExitStack) -> list[Start]:
    platform = platform_of(os.environ)
    headline = f"job {team.job_id}, restart {team.restart}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    starts: list[Start] = []
    for rank, devices in zip(team.ranks, _shares(options), strict=True):
        environ = rank_variables(team, rank, devices, platform, os.environ)
        overwrite = options.log_overwrite and team.restart == 0
        log = open_log(Path(options.log_dir), rank, overwrite, headline)
        starts.append(Start(rank, _command(options), environ, log))
        if rank == 0:
            stack.enter_context(shown(log))
    _LOG.info(
        "job %s: ranks %d to %d of %d, coordinator %s, logs in %s",
        *(team.job_id, team.ranks[0], team.ranks[-1], len(team.endpoints), team.coordinator),
        options.log_dir,
    )
    return starts


def _command(options: Options) -> list[str]:
    if options.module or options.script.endswith(".py"):
        return [sys.executable, "-u", "-m", "meshpar.launch.rank", *options.command]
    return [os.path.abspath(options.script), *options.args]


def _set_up_log(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("meshpar.launch: %(message)s"))
    _LOG.handlers[:] = [handler]
    _LOG.propagate = False
    _LOG.setLevel(level)


@contextmanager
def _signals_to(events: Events) -> Iterator[None]:
    """Turns SIGINT and SIGTERM into events, as long as the context lasts."""

    def put(number: int, frame: FrameType | None) -> None:
        events.put(Signalled(number))

    before = {number: signal.signal(number, put) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
