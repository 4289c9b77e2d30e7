"""Latency and bandwidth of the collectives between processes, beside torch.distributed and mpi4py.

    python -m benchmarks.collectives --processes 2 4 --torch /its/python --mpi4py /its/python

Each library runs in its own processes, one after the other, on the same sizes. Times are medians
over calls, of the slowest rank. The line below a table is meshpar's own part: the processor time of
a call less that of its compiled XLA program, called directly on an array that is in place.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).parents[1]
OPERATIONS = [
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "send_recv",
    "barrier",
]


def run(kind, python, processes, most):
    """Runs the ranks of a library; operation -> bytes -> seconds, and meshpar's own parts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "PADDLE_MASTER": f"127.0.0.1:{port}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PADDLE_TRAINERS_NUM": str(processes),
        }
        script = str(pathlib.Path(__file__).with_name("collectives_rank.py"))
        command = [python, script, kind, str(most), folder]
        if kind == "mpi4py":
            subprocess.run(["mpiexec", "-n", str(processes), *command], env=environment, check=True)
        else:
            ranks = [
                subprocess.Popen(command, env={**environment, "PADDLE_TRAINER_ID": str(rank)})
                for rank in range(processes)
            ]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise SystemExit(f"{kind}: exit codes {codes}")
        found = [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*.json")]
    return {
        name: {int(size): max(one[name][size] for one in found) for size in found[0][name]}
        for name in found[0]
    }


def show(console, processes, results, reference):
    table = Table(title=f"{processes} processes: median time of a call")
    for column in ("operation", "bytes", *results, "MB/s", *(f"/ {name}" for name in reference)):
        table.add_column(column, justify="left" if column == "operation" else "right")
    ours = results["meshpar"]
    for name in OPERATIONS:
        for size, seconds in ours[name].items():
            others = {kind: results[kind].get(name, {}).get(size) for kind in reference}
            shown = [f"{1e6 * seconds:.0f} us"] + [
                "" if other is None else f"{1e6 * other:.0f} us" for other in others.values()
            ]
            ratios = [
                "" if other is None else f"{seconds / other:.2f}" for other in others.values()
            ]
            table.add_row(name, f"{size:,}", *shown, f"{size / seconds / 1e6:,.1f}", *ratios)
    console.print(table)
    parts = ours["own part"].values()
    console.print(
        f"{processes} processes: meshpar's own part of an all_reduce of 4 B, 4 KiB and 64 KiB: "
        f"{', '.join(f'{1e6 * part:.0f} us' for part in parts)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--most", type=int, default=64 << 20, help="bytes of the largest array")
    parser.add_argument("--torch", help="a Python that has torch")
    parser.add_argument("--mpi4py", help="a Python that has mpi4py, with mpiexec")
    options = parser.parse_args()
    peers = {k: v for k in ("torch", "mpi4py") if (v := getattr(options, k)) is not None}
    console = Console(width=120)
    for processes in options.processes:
        results = {"meshpar": run("meshpar", sys.executable, processes, options.most)}
        for kind, python in peers.items():
            results[kind] = run(kind, python, processes, options.most)
        show(console, processes, results, list(peers))


if __name__ == "__main__":
    main()
