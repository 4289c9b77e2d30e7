"""The options of `python -m meshpar.launch`.

They are those of `python -m paddle.distributed.launch` that have a meaning here. The others are
refused by name, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from meshpar.launch.devices import parse_devices

__all__ = ["Options", "parse_options"]


@dataclass(frozen=True, slots=True)
class Options:
    """What to start, where, and what to do when it fails; `parse_options` says what each means."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    nproc_per_node: int | None = None
    nnodes: tuple[int, int] = (1, 1)
    master: str | None = None
    rank: int = -1
    host: str | None = None
    start_port: int | None = None
    devices: tuple[int, ...] | None = None
    job_id: str = "default"
    log_dir: str = "log"
    log_overwrite: bool = False
    log_level: str = "INFO"
    max_restart: int = 0
    elastic_timeout: float = 30
    grace: float = 5
    print_for: str | None = None
    image: str | None = None
    sbatch: tuple[str, ...] = ()
    resource: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """What a rank runs, without the interpreter."""
        return [*(["-m"] if self.module else []), self.script, *self.args]

    def argv(self, without: Sequence[str] = ()) -> list[str]:
        """A command line that gives these options, but for some and those of `--print`."""
        left_out = {
            *without,
            "script",
            "args",
            "module",
            "print_for",
            "image",
            "sbatch",
            "resource",
        }
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name in left_out:
                continue
            if field.name == "nnodes":
                value = ":".join(map(str, dict.fromkeys(value)))
            if field.name == "devices":
                value = ",".join(map(str, value))
            words += [f"--{field.name}"] if value is True else [f"--{field.name}", str(value)]
        return [*words, *self.command]


_TEXT = {
    "nproc_per_node": "processes on this node (default: one per number in --devices, else "
    "one per GPU, else 1)",
    "nnodes": "nodes, or LOW:HIGH: start with as many as are there after --elastic_timeout",
    "master": "HOST:PORT where the launchers of several nodes meet; a port of node 0 that is free",
    "rank": "number of this node; -1: the launcher that can listen at --master is node 0",
    "host": "address under which the other nodes reach this one (default: found out)",
    "start_port": "the first of the ports that the ranks of a node get (default: free ones)",
    "devices": "numbers of the devices of this node, as in 0,1 or 0-7, shared out to its "
    "processes; on CPUs as many are made (default: all GPUs; else each process sees all)",
    "job_id": "name of the job",
    "log_dir": "folder of the logs, workerlog.RANK",
    "log_overwrite": "empty old logs; by default new output is added to them",
    "log_level": "DEBUG, INFO, WARNING or ERROR: what the launcher itself says",
    "max_restart": "how often the whole job is started again after a failure (default: 0)",
    "elastic_level": "-1: --max_restart is 0 by default; 1: it is 3",
    "elastic_timeout": "seconds to wait for nodes that are late",
    "grace": "seconds between SIGTERM and SIGKILL for ranks that are to end",
    "module": "SCRIPT is the name of a module, as in python -m",
    "print_for": "write a batch script or manifest that starts this job there, and start nothing",
    "image": "--print k8s: the container image",
    "sbatch": "--print slurm: an option for sbatch, as in --sbatch=--partition=gpu; repeatable",
    "resource": "--print k8s: a limit of each pod, as in nvidia.com/gpu=8; repeatable",
}

_NO_SERVERS = "parameter servers are not supported; every rank holds its part of the parameters"
_ONE_NODE_LIST = "nodes meet at --master, and need no list"
_REFUSED = {
    "--legacy": "there is one launcher",
    "--sort_ip": "nodes are ordered by --rank, or as they come",
    "--enable_gpu_log": "nvidia-smi shows the state of GPUs",
    "--ips": _ONE_NODE_LIST,
    "--npus": "--devices names the devices",
    "--xpus": "--devices names the devices",
    "--auto_parallel_config": "the program says how it is laid out, by meshes and placements",
    "--auto_cluster_config": "JAX finds out what the cluster is",
    "--auto_tuner_json": "there is no tuner of jobs",
    "--servers": _NO_SERVERS,
    "--trainers": _NO_SERVERS,
    "--trainer_num": _NO_SERVERS,
    "--server_num": _NO_SERVERS,
    "--gloo_port": "JAX finds ports for gloo",
    "--with_gloo": "JAX uses gloo wherever it runs on CPUs",
}


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        option = rest[-1]
        parser.error(f"{option} has no meaning here: {_REFUSED[str(option)]}")


def parse_options(
    argv: Sequence[str], *, prog: str, environ: Mapping[str, str] = os.environ
) -> Options:
    """The options of a command line.

    Args:
      argv: the command line.
      prog: how the program is called, for messages.
      environ: Paddle's variables, such as `PADDLE_NNODES`, are defaults of the options; a rank of
        another job has those of that job, which do not count.

    Raises:
      SystemExit: as argparse does, after a message.
    """
    parser = _parser(prog)
    if "MESHPAR_JOB_ID" not in environ:
        parser.set_defaults(**_defaults(parser, environ))
    given = vars(parser.parse_args(argv))
    try:
        return _checked(given)
    except ValueError as error:
        parser.error(str(error))


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Starts a script as several processes, which mp.init_parallel_env() joins.",
        usage=f"{prog} [options] SCRIPT [ARGS ...]",
        epilog="Paddle's environment variables, such as PADDLE_NNODES, are the defaults.",
        allow_abbrev=False,
    )

    def add(name: str, *aliases: str, **kwargs: object) -> None:
        parser.add_argument(f"--{name}", *aliases, help=_TEXT[name], **kwargs)  # pyright: ignore[reportArgumentType]

    add("nproc_per_node", type=int, metavar="N")
    add("nnodes", default="1", metavar="N")
    add("master", metavar="HOST:PORT")
    add("rank", type=int, default=-1, metavar="N")
    add("host")
    add("start_port", type=int, metavar="PORT")
    add("devices", "--gpus", metavar="LIST")
    add("job_id", default="default", metavar="NAME")
    add("log_dir", default="log", metavar="DIR")
    add("log_overwrite", action="store_true")
    add("log_level", default="INFO", type=str.upper, choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    add("max_restart", type=int, metavar="N")
    add("elastic_level", type=int, default=-1, metavar="N")
    add("elastic_timeout", type=float, default=30, metavar="SECONDS")
    add("grace", type=float, default=5, metavar="SECONDS")
    add("module", "-m", action="store_true")
    parser.add_argument(
        "--print", dest="print_for", choices=["slurm", "k8s"], help=_TEXT["print_for"]
    )
    add("image")
    add("sbatch", action="append", default=[], metavar="OPTION")
    add("resource", action="append", default=[], metavar="NAME=N")
    parser.add_argument("--run_mode", default="collective", help=argparse.SUPPRESS)
    for option in _REFUSED:
        parser.add_argument(
            option, nargs="?", action=_Refuse, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or another program")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _defaults(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> dict[str, object]:
    """What Paddle's variables say; argparse converts texts as it does those of the command line."""
    names = {f"PADDLE_{name.upper()}": name for name in _TEXT} | {"POD_IP": "host"}
    found: dict[str, object] = {n: environ[v] for v, n in names.items() if environ.get(v)}
    if "log_overwrite" in found:
        found["log_overwrite"] = str(found["log_overwrite"]).lower() in ("1", "true")
    return found


def _checked(given: dict[str, object]) -> Options:
    """Raises `ValueError` for what does not go together."""
    mode, level = given.pop("run_mode"), given.pop("elastic_level")
    if mode != "collective":
        raise ValueError(f"--run_mode {mode} has no meaning here: {_NO_SERVERS}")
    if level not in (-1, 1):
        raise ValueError(f"--elastic_level {level} is not supported: it is -1 or 1")
    if given["max_restart"] is None:
        given["max_restart"] = 3 if level == 1 else 0
    low, colon, high = str(given["nnodes"]).partition(":")
    try:
        given["nnodes"] = (int(low), int(high if colon else low))
    except ValueError:
        raise ValueError(f"--nnodes {given['nnodes']}: it is a number or LOW:HIGH") from None
    if given["devices"] is not None:
        try:
            given["devices"] = parse_devices(str(given["devices"]))
        except ValueError as error:
            raise ValueError(f"--devices: {error}") from None
    for name in ("args", "sbatch", "resource"):
        given[name] = tuple(given[name])  # pyright: ignore[reportArgumentType]
    options = Options(**given)  # pyright: ignore[reportArgumentType]
    _check_numbers(options)
    return options


def _check_numbers(options: Options) -> None:
    low, high = options.nnodes
    if not 1 <= low <= high:
        raise ValueError(f"--nnodes {low}:{high}: at least 1, and the lower number first")
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        raise ValueError(f"--nproc_per_node {options.nproc_per_node}: at least 1")
    if options.max_restart < 0 or options.grace < 0 or options.elastic_timeout < 0:
        raise ValueError("--max_restart, --grace and --elastic_timeout are not negative")
    if high > 1 and options.master is None and options.print_for is None:
        raise ValueError(
            f"--nnodes {high}: launchers of several nodes meet at --master, such as "
            "--master node0:6170"
        )
    if options.rank >= high:
        raise ValueError(f"--rank {options.rank}: nodes are numbered 0 to {high - 1}")
    if options.master is not None and not options.master.rpartition(":")[2].isdecimal():
        raise ValueError(f"--master {options.master}: it is HOST:PORT")
    if not options.job_id or any(not (c.isalnum() or c in "-_.") for c in options.job_id):
        raise ValueError(f"--job_id {options.job_id!r}: letters, digits and '-_.'")
    if not all("=" in pair for pair in options.resource):
        raise ValueError(f"--resource {' '.join(options.resource)}: it is NAME=N")
    if options.print_for is None and not options.module and not Path(options.script).exists():
        raise ValueError(
            f"there is no file {options.script}; -m {shlex.quote(options.script)} runs a module"
        )
