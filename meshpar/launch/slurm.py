"""A batch script for Slurm that starts a job: one launcher on each node."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from meshpar.launch.options import Options

__all__ = ["sbatch_script"]


def sbatch_script(options: Options, interpreter: str = "python") -> str:
    """The script to give to `sbatch`.

    Args:
      options: of the job. `--master` counts for its port only: the first node is the master.
      interpreter: the Python that the nodes have.

    Example:
      >>> text = sbatch_script(Options("train.py", nnodes=(2, 2), job_id="small"))
      >>> [line for line in text.splitlines() if line.startswith("#SBATCH")][:2]
      ['#SBATCH --job-name=small', '#SBATCH --nodes=2']
    """
    low, high = options.nnodes
    nodes = str(low) if low == high else f"{low}-{high}"
    given = "".join(f"#SBATCH {option}\n" for option in options.sbatch)
    # Jobs that share a node must not share a port.
    port = "$((10000 + SLURM_JOB_ID % 20000))"
    if options.master is not None:
        port = options.master.rpartition(":")[2]
    words = [interpreter, "-m", "meshpar.launch", *options.argv(without=("master", "rank", "host"))]
    command = _joined(words, ["--master", '"$MASTER"', "--rank", '"$SLURM_NODEID"'])
    script = f"""\
        #!/bin/bash
        #SBATCH --job-name={options.job_id}
        #SBATCH --nodes={nodes}
        #SBATCH --ntasks-per-node=1
        #SBATCH --output={options.job_id}-%j.out
        @given@
        set -euo pipefail
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        export MASTER="${{hosts%%$'\\n'*}}:{port}"
        # The command is one word to srun: each node fills in its own number.
        srun --kill-on-bad-exit=1 bash -c @command@
        """
    text = textwrap.dedent(script).replace("@given@\n", given)
    return text.replace("@command@", shlex.quote(command))


def _joined(words: Sequence[str], added: Sequence[str]) -> str:
    """A command line with `--master` and `--rank`, which the shell fills in, before the script."""
    at = words.index("meshpar.launch") + 1
    return " ".join(["exec", *map(shlex.quote, words[:at]), *added, *map(shlex.quote, words[at:])])
