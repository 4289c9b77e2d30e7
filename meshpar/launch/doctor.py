"""`meshpar doctor`: versions, devices, the environment, and whether a collective works.

Under a launcher, `python -m meshpar.launch --nnodes 4 ... -m meshpar.launch.doctor` looks at a
whole cluster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from meshpar.collectives.start import init_parallel_env
from meshpar.errors import MeshparError
from meshpar.mesh import ProcessMesh, ranked_devices
from meshpar.placements.local import dtensor_from_local
from meshpar.placements.reshard import unshard_dtensor
from meshpar.placements.types import Partial

__all__ = ["main"]

_PACKAGES = (
    *("meshpar", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "libtpu"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin"),
)
_PREFIXES = ("PADDLE_", "MESHPAR_", "MASTER_", "JAX_", "XLA_", "NCCL_", "TPU_", "SLURM_", "OMPI_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LIBTPU_INIT_ARGS", "POD_IP")


def main(argv: Sequence[str]) -> int:
    """Runs the doctor; the exit code is 0 where the collective gave the right sum."""
    parser = argparse.ArgumentParser(
        prog="meshpar doctor",
        description="Shows versions, devices and environment, and runs one collective.",
    )
    parser.parse_args(argv)
    try:
        init_parallel_env()
        console = Console(soft_wrap=True, quiet=jax.process_index() > 0)
    except (MeshparError, RuntimeError) as error:
        Console(soft_wrap=True).print(_versions(), _environment(os.environ), error, sep="\n")
        return 1
    console.print(_versions(), _environment(os.environ))
    try:
        console.print(_devices())
    except RuntimeError as error:
        console.print(f"[red]JAX has no devices:[/] {error}")
        return 1
    try:
        text = _collective()
    except (MeshparError, RuntimeError) as error:
        console.print(f"[red]A collective fails:[/] {error}")
        return 1
    console.print(text)
    return 0


def _versions() -> Table:
    table = Table("package", "version", title="Versions", title_justify="left")
    table.add_row("python", platform.python_version())
    for name in _PACKAGES:
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return table


def _environment(environ: Mapping[str, str]) -> Table:
    table = Table("variable", "value", title="Environment", title_justify="left")
    for name in sorted(environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            table.add_row(name, environ[name])
    if not table.rows:
        table.add_row("none that meshpar or JAX read", "")
    return table


def _devices() -> Table:
    table = Table("rank", "device", "kind", "process", "memory", title="Devices")
    for rank, device in enumerate(ranked_devices()):
        here = device.process_index == jax.process_index()
        stats = (device.memory_stats() or {}) if here else {}
        limit = stats.get("bytes_limit")
        memory = "" if limit is None else f"{limit / 2**30:.1f} GiB"
        kind = f"{device.platform} {device.device_kind}"
        table.add_row(str(rank), str(device), kind, str(device.process_index), memory)
    return table


def _collective() -> str:
    """Sums the numbers of all ranks over them.

    Raises:
      RuntimeError: the sum is wrong.
    """
    devices = ranked_devices()
    mesh = ProcessMesh(np.arange(len(devices)), ["all"])
    mine = [r for r, d in enumerate(devices) if d.process_index == jax.process_index()]
    began = time.perf_counter()
    pieces = [np.full(1024, rank, np.float32) for rank in mine]
    total = np.asarray(unshard_dtensor(dtensor_from_local(pieces, mesh, [Partial()])))
    seconds = time.perf_counter() - began
    expected = len(devices) * (len(devices) - 1) / 2
    if not (total == expected).all():
        raise RuntimeError(f"the sum over ranks is {total[:4]}..., and {expected} is right")
    return f"An all-reduce over {len(devices)} device(s) is right; {seconds:.2f} s with compilation"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
