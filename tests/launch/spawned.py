"""Functions that the tests of `spawn` run in new processes."""

import os
import pathlib
import subprocess
import sys
import time


def rank():
    return int(os.environ["PADDLE_TRAINER_ID"])


def write(folder, text):
    names = ("PADDLE_TRAINERS_NUM", "PADDLE_MASTER", "MESHPAR_RESTART_COUNT")
    words = [text, *(os.environ[n] for n in names), os.environ.get("XLA_FLAGS", "")]
    pathlib.Path(folder, str(rank())).write_text("\n".join(words))


class OwnError(Exception):
    def __init__(self, number, word):
        super().__init__(f"{number} {word}")
        self.number = number


def fail(how):
    if rank() != 1:
        time.sleep(60)
    elif how == "raise":
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("boo") from error
    elif how == "unpicklable":
        raise OwnError(3, "things")
    elif how == "exit":
        sys.exit(5)
    elif how == "kill":
        os.kill(os.getpid(), 9)


def leave_a_child(folder):
    subprocess.Popen(["sleep", "300"])
    pathlib.Path(folder, f"up{rank()}").touch()
    time.sleep(300 if rank() == 0 else 0)


def total(folder):
    import numpy as np

    from tests.processes.ranks import start

    start()
    import meshpar as mp

    mesh = mp.ProcessMesh([0, 1, 2, 3], ["x"])
    pieces = [np.full(3, 2 * rank() + i) for i in range(2)]
    value = mp.unshard_dtensor(mp.dtensor_from_local(pieces, mesh, [mp.Partial()]))
    pathlib.Path(folder, str(rank())).write_text(str(np.asarray(value).tolist()))
