"""The console command `meshpar`."""

from __future__ import annotations

import sys

import meshpar
from meshpar.launch import command, doctor

__all__ = ["main"]

_HELP = """\
usage: meshpar COMMAND ...

  launch   start a script as several processes; meshpar launch --help
  doctor   show versions, devices and environment, and run one collective

  --version, --help
"""


def main() -> int:
    """Runs `meshpar launch ...` or `meshpar doctor`; the exit code."""
    name, *rest = sys.argv[1:] or ["--help"]
    match name:
        case "launch":
            return command.main(rest)
        case "doctor":
            return doctor.main(rest)
        case "--version":
            print(f"meshpar {meshpar.__version__}")
            return 0
        case "--help" | "-h":
            print(_HELP, end="")
            return 0
    print(f"meshpar: there is no command {name!r}\n\n{_HELP}", end="", file=sys.stderr)
    return 2
