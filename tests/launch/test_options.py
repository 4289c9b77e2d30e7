"""Options: Paddle's names and variables, refusals, and command lines that give them back."""

import pytest

from meshpar.launch.options import Options, parse_options


def parse(*argv, **environ):
    return parse_options([*argv, __file__], prog="launch", environ=environ)


def refused(capsys, *argv, **environ):
    with pytest.raises(SystemExit) as exit_:
        parse(*argv, **environ)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_defaults_and_values():
    assert parse() == Options(__file__)
    given = parse("--nproc_per_node", "2", "--nnodes=1:3", "--master", "a:1", "--devices", "0,4-6")
    assert (given.nproc_per_node, given.nnodes, given.devices) == (2, (1, 3), (0, 4, 5, 6))
    assert parse("--gpus", "1,0").devices == (1, 0)


def test_what_follows_the_script_is_its_own():
    given = parse_options([__file__, "--nnodes", "9", "-m", "--", "x"], prog="launch", environ={})
    assert given.args == ("--nnodes", "9", "-m", "--", "x") and given.nnodes == (1, 1)
    given = parse_options(["-m", "a.module", "--rank", "3"], prog="launch", environ={})
    assert (
        given.module
        and given.script == "a.module"
        and given.command == ["-m", "a.module", "--rank", "3"]
    )


def test_paddles_variables_are_defaults_except_in_a_rank_of_another_job():
    environ = {
        "PADDLE_NNODES": "2",
        "PADDLE_MASTER": "h:1",
        "PADDLE_LOG_OVERWRITE": "true",
        "POD_IP": "10.0.0.1",
    }
    given = parse(**environ)
    assert (given.nnodes, given.master, given.log_overwrite, given.host) == (
        (2, 2),
        "h:1",
        True,
        "10.0.0.1",
    )
    assert parse("--nnodes", "1", **environ).nnodes == (1, 1)
    assert parse(MESHPAR_JOB_ID="outer", **environ) == Options(__file__)


@pytest.mark.parametrize(("level", "restarts"), [("-1", 0), ("1", 3)])
def test_elastic_level_is_the_default_of_max_restart(level, restarts):
    assert parse("--elastic_level", level).max_restart == restarts
    assert parse("--elastic_level", level, "--max_restart", "5").max_restart == 5


@pytest.mark.parametrize(
    "option",
    [
        "--legacy",
        "--sort_ip",
        "--enable_gpu_log",
        "--ips",
        "--npus",
        "--xpus",
        "--auto_parallel_config",
        "--auto_tuner_json",
        "--auto_cluster_config",
        "--servers",
        "--trainers",
        "--trainer_num",
        "--server_num",
        "--gloo_port",
        "--with_gloo",
    ],
)
def test_options_without_a_meaning_are_refused_by_name(capsys, option):
    assert f"{option} has no meaning here:" in refused(capsys, option, "1")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--run_mode", "ps"], "--run_mode ps has no meaning here: parameter servers"),
        (["--elastic_level", "0"], "--elastic_level 0 is not supported"),
        (["--nnodes", "2"], "launchers of several nodes meet at --master"),
        (["--nnodes", "3:2"], "--nnodes 3:2"),
        (["--nnodes", "two"], "--nnodes two: it is a number or LOW:HIGH"),
        (["--nproc_per_node", "0"], "--nproc_per_node 0: at least 1"),
        (["--rank", "1"], "--rank 1: nodes are numbered 0 to 0"),
        (["--master", "node0"], "--master node0: it is HOST:PORT"),
        (["--devices", "0-x"], "--devices: '0-x' is no list of device numbers"),
        (["--devices", "1,1"], "names no device, or one of them twice"),
        (["--max_restart", "-1"], "--max_restart, --grace and --elastic_timeout are not negative"),
        (["--job_id", "a b"], "--job_id 'a b'"),
        (["--resource", "gpu"], "--resource gpu: it is NAME=N"),
        (["nothing.py"], "there is no file nothing.py; -m nothing.py runs a module"),
    ],
)
def test_options_that_do_not_fit(capsys, argv, words):
    assert words in refused(capsys, *argv)


@pytest.mark.parametrize(
    "options",
    [
        Options(__file__),
        Options(
            "a.module", ("--x", "a b"), module=True, nproc_per_node=2, devices=(0, 1), max_restart=2
        ),
        Options(
            __file__,
            nnodes=(1, 4),
            master="h:1",
            rank=1,
            log_overwrite=True,
            grace=1.5,
            job_id="j-1",
        ),
    ],
)
def test_a_command_line_that_gives_the_options_back(options):
    assert parse_options(options.argv(), prog="launch", environ={}) == options
