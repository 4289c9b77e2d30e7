"""`spawn`: a function as several processes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from meshpar.launch.devices import gpus, parse_devices, platform_of, shared_out
from meshpar.launch.guard import Guard
from meshpar.launch.ports import free_ports, held_port
from meshpar.launch.rank import end_now
from meshpar.launch.team import Team, rank_variables

__all__ = ["SpawnContext", "SpawnError", "spawn"]

_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_OPTIONS = ("start_method", "gpus", "devices", "ips", "backend", "print_config")
_environ_lock = threading.Lock()
_jobs = itertools.count()


class SpawnError(RuntimeError):
    """A process that `spawn` started has failed.

    Attributes:
      rank: its rank.
      exit_code: its exit code; minus the number of the signal that killed it.
      remote: the traceback of what it raised, or an empty text.

    What it raised is the `__cause__`, where that can be pickled.
    """

    def __init__(self, rank: int, exit_code: int, remote: str, how: str) -> None:
        text = f"rank {rank} {how}"
        super().__init__(f"{text}\n\nOn rank {rank}:\n{remote}" if remote else text)
        self.rank, self.exit_code, self.remote = rank, exit_code, remote


class SpawnContext:
    """The processes that `spawn` started.

    Attributes:
      processes: one `multiprocessing` process per rank.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._reports: list[Any] = []  # connections, whose type depends on the system
        self._left: dict[int, BaseProcess] = {}
        self._guard = Guard()
        self._held = contextlib.ExitStack()

    def hold_port(self) -> int:
        """A port for the ranks, which nobody else gets until they have ended."""
        return self._held.enter_context(held_port("127.0.0.1"))

    def add(self, process: BaseProcess, report: Any) -> None:
        """Takes in the process of the next rank, which has started."""
        self._left[len(self.processes)] = process
        self.processes.append(process)
        self._reports.append(report)
        self._guard.add(process.pid or 0)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for all processes.

        Args:
          timeout: seconds; `None` waits as long as they run.

        Returns:
          Whether all have ended.

        Raises:
          SpawnError: one has failed; the others have been ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self._left:
                wait = None if deadline is None else max(deadline - time.monotonic(), 0)
                ended = connection.wait([p.sentinel for p in self._left.values()], wait)
                if not ended:
                    return False
                self._take(ended)
        except BaseException:  # Ctrl-C too: nothing that was started is left behind
            self.end()
            raise
        self._close()
        return True

    def _take(self, ended: Sequence[object]) -> None:
        failures: list[SpawnError] = []
        for rank, process in [*self._left.items()]:
            if process.sentinel in ended:
                _signal(process, signal.SIGKILL)  # what it left behind in its group
                process.join()
                del self._left[rank]
                self._guard.remove(process.pid or 0)
                error = _failure(rank, process.exitcode or 0, self._reports[rank])
                failures += [] if error is None else [error]
        if failures:
            # One that raised tells more than one that was lost with it.
            raise max(failures, key=lambda error: bool(error.remote))

    def end(self) -> None:
        """Ends all processes, with SIGTERM and, soon after, SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._left.values():
                if process.is_alive():
                    _signal(process, number)
            until = time.monotonic() + _GRACE
            for process in self._left.values():
                process.join(max(until - time.monotonic(), 0) if number == signal.SIGTERM else None)
        self._left.clear()
        self._close()

    def _close(self) -> None:
        self._guard.close()
        self._held.close()


def spawn(
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> SpawnContext:
    """Runs `func(*args)` in several new processes, which `mp.init_parallel_env()` joins.

    The processes are new interpreters, which import the caller's script: what starts them belongs
    under `if __name__ == "__main__":`. `func` and `args` are pickled.

    Args:
      func: a function of a module or of the script, not one made within another.
      args: its arguments, the same in every process; `mp.get_rank()` tells them apart.
      nprocs: how many; -1 for one per GPU, one on TPUs, one per CPU core elsewhere.
      join: wait for them; else the caller does, by the context's `join()`.
      daemon: end them when this process ends.
      **options: `start_method`, "spawn" or "forkserver"; `devices`, numbers as of the launcher's
        `--devices`, shared out to the processes; `gpus`, the same with as many numbers as
        processes; `backend`, "auto", or "gloo" on CPUs, "nccl" on GPUs; `ips`, one address;
        `print_config`, whether to print where the processes run.

    Returns:
      The context.

    Raises:
      SpawnError: with `join`, when a process fails; its message holds the remote traceback.
      ValueError: an unknown option, or options that do not fit.
      TypeError: `func` or `args` cannot be pickled.

    Example:
      >>> import os
      >>> spawn(os.getcwd, nprocs=2).processes[1].exitcode
      0

    Follows `paddle.distributed.spawn` (3.3.1). Deviations: what fails raises `SpawnError`; "fork"
    is refused, because JAX's threads do not survive it.
    """
    platform = platform_of(os.environ)
    _check_options(options, platform)
    devices = options.get("devices", options.get("gpus"))
    numbers = gpus(platform, os.environ) if devices is None else parse_devices(str(devices))
    if nprocs == -1:
        nprocs = 1 if platform == "tpu" else len(numbers or range(os.cpu_count() or 1))
    if nprocs < 1:
        raise ValueError(f"spawn(nprocs={nprocs}): at least 1, or -1")
    if "gpus" in options and numbers is not None and len(numbers) != nprocs:
        raise ValueError(
            f"spawn(gpus={options['gpus']!r}): {nprocs} processes need as many numbers"
        )
    shares = shared_out(numbers, nprocs)
    if options.get("print_config"):
        print(f"spawn: {nprocs} processes on {platform}, devices {devices or 'all'}")
    method = options.get("start_method", "spawn")
    context = _started(func, args, shares, platform, daemon, method)
    if join:
        context.join()
    return context


def _check_options(options: Mapping[str, Any], platform: str) -> None:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"spawn({unknown[0]}=...): the options are {', '.join(_OPTIONS)}")
    method, backend = options.get("start_method", "spawn"), options.get("backend", "auto")
    if method not in ("spawn", "forkserver"):
        raise ValueError(
            f"spawn(start_method={method!r}): it is 'spawn' or 'forkserver'; JAX's threads do not "
            "survive a fork"
        )
    fitting = {"cpu": "gloo", "cuda": "nccl", "rocm": "nccl"}.get(platform)
    if backend not in ("auto", fitting):
        raise ValueError(f"spawn(backend={backend!r}): on {platform} it is 'auto' or {fitting!r}")
    if "," in str(options.get("ips", "")):
        raise ValueError(
            f"spawn(ips={options['ips']!r}): it starts processes on this machine; "
            "python -m meshpar.launch --nnodes does on several"
        )


def _team(nprocs: int, port: int) -> Team:
    return Team(
        job_id=f"spawn-{os.getpid()}-{next(_jobs)}",
        restart=0,
        max_restart=0,
        coordinator=f"127.0.0.1:{port}",
        endpoints=tuple(f"127.0.0.1:{own}" for own in free_ports("127.0.0.1", nprocs)),
        nodes=(nprocs,),
    )


def _started(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    shares: Sequence[tuple[int, ...] | None],
    platform: str,
    daemon: bool,
    method: str,
) -> SpawnContext:
    maker: Any = multiprocessing.get_context(method)  # its Process has no common type
    try:
        work = pickle.dumps((func, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"spawn(func={getattr(func, '__name__', func)!r}): new processes get it and its "
            f"arguments by pickle, and {error}; define it at the top of a module or script"
        ) from None
    context = SpawnContext()
    try:
        team = _team(len(shares), context.hold_port())
        for rank, share in zip(team.ranks, shares, strict=True):
            report, sent = maker.Pipe(duplex=False)
            process = maker.Process(target=_run, args=(work, sent), daemon=daemon)
            with _environment(rank_variables(team, rank, share, platform, os.environ)):
                process.start()
            sent.close()
            context.add(process, report)
    except BaseException:
        context.end()
        raise
    return context


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """New processes begin with the environment of this one, and read some of it at once."""
    with _environ_lock:
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def _run(work: bytes, report: Any) -> None:
    """What a new process does."""
    with contextlib.suppress(PermissionError):  # it may lead a session already
        os.setpgid(0, 0)  # what it starts ends with it, and Ctrl-C comes to the parent only
    try:
        func, args = pickle.loads(work)
        func(*args)
    except SystemExit as error:
        if error.code in (None, 0):
            return
        _tell(report, error)
        end_now(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:  # whatever it is, the parent raises it
        _tell(report, error)
        end_now(1)


def _tell(report: Any, error: BaseException) -> None:
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the frame of _run
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # of whatever kind the user's class raises
        pickled = b""
    name = f"{type(error).__name__}: {error}"
    report.send((name, text, pickled))


def _failure(rank: int, code: int, report: Any) -> SpawnError | None:
    if code == 0:
        return None
    try:
        name, text, pickled = report.recv()
    except EOFError:  # it could not tell
        how = "failed before it ran func, with" if code > 0 else "was killed:"
        what = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        return SpawnError(rank, code, "", f"{how} {what}")
    error = SpawnError(rank, code, text, f"raised {name}")
    if pickled:
        error.__cause__ = pickle.loads(pickled)
    return error


def _signal(process: BaseProcess, number: int) -> None:
    if process.pid is None:
        return
    for send in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(process.pid, number)
