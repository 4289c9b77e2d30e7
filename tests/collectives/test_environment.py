"""Who a process is, from the variables of launchers and clusters."""

import pytest

import meshpar as mp
from meshpar.collectives.environment import patience, place, set_place

VARIABLES = [
    "PADDLE_",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "FLAGS_",
    "MESHPAR_",
    "JAX_COORD",
    "KUBERNETES",
    "TPU_",
]


@pytest.fixture
def variables(monkeypatch):
    """Sets variables, where none of a launcher or cluster is set."""
    import os

    for name in list(os.environ):
        if any(name.startswith(start) for start in VARIABLES):
            monkeypatch.delenv(name)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return put


def test_a_process_alone(variables):
    assert (place().rank, place().size, place().master) == (0, 1, None)
    assert mp.ParallelEnv().nranks == 1


def test_paddles_variables(variables):
    endpoints = "a:1,b:2,c:3"
    variables(
        PADDLE_TRAINER_ID=2,
        PADDLE_TRAINERS_NUM=3,
        PADDLE_TRAINER_ENDPOINTS=endpoints,
        PADDLE_LOCAL_RANK=1,
    )
    assert (place().rank, place().size, place().master, place().local_rank) == (2, 3, "a:1", 1)
    environment = mp.ParallelEnv()
    assert (
        environment.trainer_endpoints == ("a:1", "b:2", "c:3")
        and environment.current_endpoint == "c:3"
    )
    variables(PADDLE_MASTER="d:4")
    assert place().master == "d:4"
    variables(MASTER_ADDR="e", MASTER_PORT="5")
    assert place().master == "e:5"


def test_the_number_of_endpoints_is_the_size(variables):
    variables(
        PADDLE_TRAINER_ENDPOINTS="a:1,b:2", PADDLE_TRAINER_ID=1, PADDLE_LOCAL_DEVICE_IDS="2,3"
    )
    assert (place().rank, place().size, place().devices) == (1, 2, (2, 3))


def test_slurm(variables):
    variables(
        SLURM_JOB_ID=4097,
        SLURM_STEP_NODELIST="node[003-005],other",
        SLURM_NTASKS=6,
        SLURM_PROCID=4,
        SLURM_LOCALID=1,
    )
    found = place()
    assert (found.rank, found.size, found.local_rank) == (4, 6, 1)
    assert found.master == f"node003:{65535 - 4096 + 1 + 1}" and "Slurm" in found.by


def test_open_mpi(variables):
    uri = f"{7 * 4096}.0;tcp://10.96.0.1,10.148.0.1:34911"
    variables(
        OMPI_MCA_orte_hnp_uri=uri,
        OMPI_COMM_WORLD_SIZE=2,
        OMPI_COMM_WORLD_RANK=1,
        OMPI_COMM_WORLD_LOCAL_RANK=0,
    )
    found = place()
    assert (found.rank, found.size, found.master) == (1, 2, f"10.96.0.1:{65535 - 4096 + 1 + 7}")


def test_what_a_cluster_says_is_set_for_scripts_that_read_paddles_variables(variables, monkeypatch):
    import os

    variables(
        SLURM_JOB_ID=1, SLURM_STEP_NODELIST="n1,n2", SLURM_NTASKS=2, SLURM_PROCID=1, SLURM_LOCALID=0
    )
    for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_MASTER", "PADDLE_LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that they are taken away afterwards
        monkeypatch.delenv(name)
    set_place(place())
    assert (os.environ["PADDLE_TRAINER_ID"], os.environ["PADDLE_TRAINERS_NUM"]) == ("1", "2")
    assert os.environ["PADDLE_MASTER"] == place().master


@pytest.mark.parametrize(
    "values, text",
    [
        ({"PADDLE_TRAINERS_NUM": "two"}, "PADDLE_TRAINERS_NUM is no number"),
        (
            {"PADDLE_TRAINERS_NUM": 2, "PADDLE_TRAINER_ID": 2, "PADDLE_MASTER": "a:1"},
            "the rank is 2, and 2 processes have the ranks 0 to 1",
        ),
        ({"PADDLE_TRAINERS_NUM": 2, "PADDLE_TRAINER_ID": 0}, "no address to meet at"),
    ],
)
def test_variables_that_contradict_each_other(variables, values, text):
    variables(**values)
    with pytest.raises(mp.CollectiveError, match=text):
        place()


def test_waiting_times(variables):
    assert (patience().collective, patience().report, patience().meet) == (1800, 30, 900)
    assert mp.ParallelEnv().pg_timeout == 1_800_000
    variables(PADDLE_PG_TIMEOUT=5000, MESHPAR_REPORT_SECONDS="0.5", FLAGS_stop_check_timeout=7)
    assert (patience().collective, patience().report, patience().meet) == (5, 0.5, 7)
    variables(MESHPAR_TICK_SECONDS="-1")
    with pytest.raises(mp.CollectiveError, match="MESHPAR_TICK_SECONDS is no duration"):
        patience()
