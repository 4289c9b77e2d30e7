"""What scripts of ranks in the tests begin with: `from tests.processes.ranks import give, start`."""

import os
import pathlib
import pickle

import meshpar as mp


def start():
    """Joins the processes of the job."""
    mp.init_parallel_env()


def give(**values):
    """Hands values to the test, which finds them in `Run.results[rank]`; anything that pickles."""
    rank = os.environ["PADDLE_TRAINER_ID"]
    path = pathlib.Path(os.environ["MESHPAR_TEST_RESULTS"], rank)
    old = pickle.loads(path.read_bytes()) if path.exists() else {}
    path.write_bytes(pickle.dumps({**old, **values}))
