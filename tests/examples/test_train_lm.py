"""The training example: it goes on bit for bit, stops at Ctrl-C and at NaN, and says so."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import meshpar as mp
from meshpar.examples import train_lm

SMALL = [
    "--batch-size",
    "4",
    "--seq-len",
    "8",
    "--warmup",
    "2",
    "--eval-batches",
    "1",
    "--sample",
    "2",
]


def run(*options):
    return train_lm.main([*SMALL, *map(str, options)])


def saved(path):
    """Everything in the newest checkpoint, on the host."""
    state = mp.checkpoint_contents(path)
    mp.load_state_dict(state, path)
    return state


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("--steps", 5, "--save", whole, "--seed", 3) == 0
    text = capsys.readouterr().out
    for expected in ("8 cpu device(s): ProcessMesh(dp=2, tp=4)", "all_reduce", "checkpoint in"):
        assert expected in text
    loss = float(re.search(r"validation loss (\S+) nats", text)[1])
    assert 0 < loss < 6
    assert re.search(r"head\.kernel .*\(128, 256\) .*Replicate\(\) .*Shard\(1\)", text)
    assert re.search(r"5/5 .*loss \d+\.\d+, [\d,]+ tokens/s", text)

    assert run("--steps", 2, "--save", parts, "--seed", 3) == 0
    capsys.readouterr()
    # The options of the first part come from its checkpoint, but for --steps.
    assert train_lm.main(["--resume", str(parts), "--steps", "5"]) == 0
    text = capsys.readouterr().out
    assert "steps 3 to 5" in text and f"validation loss {loss:.3f}" in text
    lhs, rhs = saved(whole), saved(parts)
    assert lhs.keys() == rhs.keys() and lhs["done"] == rhs["done"] == 5
    for name, value in lhs.items():
        assert np.array_equal(value, rhs[name]), name
    assert any(name.startswith("opt.") and np.any(value) for name, value in lhs.items())

    assert train_lm.main(["--resume", str(parts)]) == 0
    assert "has 5 steps already; a larger --steps" in capsys.readouterr().out


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path, capsys):
    command = [sys.executable, "-m", "meshpar.examples.train_lm", *SMALL, "--steps=1000000"]
    with subprocess.Popen(
        [*command, "--save", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        seen = ""
        while "tokens/s" not in seen:
            piece = process.stdout.read(1)
            assert piece, seen  # it ended by itself
            seen += piece
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 130, text
    done = int(re.search(r"Ctrl-C: stopped after (\d+) of 1000000 steps", text)[1])
    assert f"--resume {tmp_path}" in text
    assert mp.checkpoint_contents(tmp_path)["done"] == done
    assert train_lm.main(["--resume", str(tmp_path), "--steps", str(done + 1)]) == 0
    assert f"{done + 1}/{done + 1}" in capsys.readouterr().out


@pytest.mark.parametrize("nan", ["stop", "continue"])
def test_a_loss_that_is_nan(tmp_path, capsys, nan):
    status = run("--learning-rate", "nan", "--nan", nan, "--steps", 4, "--save", tmp_path / "run")
    text = capsys.readouterr().out
    if nan == "continue":
        assert status == 0 and "validation loss nan" in text
        assert mp.checkpoint_contents(tmp_path / "run")["done"] == 4
    else:
        # The first step's loss is that of the fresh parameters.
        assert status == 1 and "The loss of step 2 is nan" in text and "--nan=continue" in text
        assert not (tmp_path / "run").exists()


def test_a_folder_with_checkpoints_is_not_mixed_with_another_run(tmp_path, capsys):
    (tmp_path / "3").mkdir()
    with pytest.raises(SystemExit):
        run("--save", tmp_path)
    assert f"--resume {tmp_path} goes on there" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="there is none"):
        train_lm.main(["--resume", str(tmp_path / "nothing")])
