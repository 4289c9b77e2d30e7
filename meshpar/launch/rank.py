"""What runs in a launched process: the user's script, whose failure ends the process at once.

`python -m meshpar.launch.rank [-m] script args`. A process that fails must not run Python's exit
handlers: JAX's waits for the other processes, which may be waiting for this one.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import TracebackType
from typing import NoReturn

__all__ = ["end_now", "run"]


def run(argv: list[str]) -> None:
    """Runs `script args`, or `-m module args`, as Python itself would.

    Ends the process where the script raises or exits with another code than 0.
    """
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        code = _exit_code(error)
        if code:
            end_now(code)
        raise
    except KeyboardInterrupt as error:
        _show(error)
        end_now(130)
    except BaseException as error:  # whatever it is, it is the script's, and ends this process
        _show(error)
        end_now(1)


def end_now(code: int) -> NoReturn:
    """Ends this process without exit handlers; what was printed is kept."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _exit_code(error: SystemExit) -> int:
    """The exit code that Python gives to `sys.exit(...)`; a text is printed."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Prints the traceback, without the frames that stand before the script's."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name in (__file__, runpy.__file__, "<frozen runpy>")


if __name__ == "__main__":
    run(sys.argv[1:])
