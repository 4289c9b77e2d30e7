"""The batch script and the manifest start the job that the options describe."""

import re
import subprocess

import pytest
import yaml

from meshpar.launch.command import main
from meshpar.launch.kubernetes import jobset_manifest
from meshpar.launch.options import Options, parse_options
from meshpar.launch.slurm import sbatch_script

OPTIONS = [
    Options("train.py", job_id="one"),
    Options("pkg.train", ("--name", "it's $(x) \"y\"", "--", "z"), module=True, nnodes=(2, 2), nproc_per_node=4, devices=tuple(range(8)), max_restart=3),
    Options("train.py", nnodes=(2, 5), master="ignored:7777", job_id="Elastic_1", log_dir="/a b"),
]  # fmt: skip


def described(words, **known):
    """The options of a launcher's command line, but for those that differ from node to node."""
    assert words[:3] == ["python", "-m", "meshpar.launch"]
    found = parse_options(["--print", "slurm", *words[3:]], prog="launch", environ={})
    return {f: getattr(found, f) for f in found.__slots__ if f not in known} | {"print_for": None}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o.job_id)
def test_sbatch_script(options, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(sbatch_script(options))
    subprocess.run(["bash", "-n", path], check=True)
    # The script is run with stand-ins for Slurm's commands: what does a node's shell get to start?
    for name, body in {
        "scontrol": "echo node7; echo node8",
        "srun": 'test "$1" = --kill-on-bad-exit=1; shift; exec "$@"',
        "python": 'printf "%s\\0" python "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "20005", "SLURM_NODEID": "1"}  # fmt: skip
    done = subprocess.run(["bash", path], env=environ, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    port = 7777 if options.master else 10005
    assert words[3:7] == ["--master", f"node7:{port}", "--rank", "1"]
    known = {"master": 0, "rank": 0}
    assert described([*words[:3], *words[7:]], **known) == {
        f: getattr(options, f) for f in options.__slots__ if f not in known
    }
    heads = re.findall(r"^#SBATCH --(\S+?)=(\S+)$", path.read_text(), re.M)
    low, high = options.nnodes
    assert dict(heads)["nodes"] == (f"{low}-{high}" if low < high else str(low))
    assert dict(heads)["ntasks-per-node"] == "1"


def test_options_for_sbatch_come_before_the_commands():
    lines = sbatch_script(Options("a.py", sbatch=("--partition=gpu", "--time=1:00"))).splitlines()
    assert lines.index("#SBATCH --time=1:00") < lines.index("set -euo pipefail")
    assert "#SBATCH --partition=gpu" in lines and not any("@" in line for line in lines)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o.job_id)
def test_jobset_manifest(options):
    given = {f: getattr(options, f) for f in options.__slots__} | {
        "image": "here/image:1",
        "resource": ("nvidia.com/gpu=8",),
    }
    manifest = yaml.safe_load(jobset_manifest(Options(**given)))
    name = options.job_id.lower().replace("_", "-")
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("JobSet", name)
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    nodes = options.nnodes[1]
    assert (
        spec["completions"] == spec["parallelism"] == nodes and spec["completionMode"] == "Indexed"
    )
    (container,) = spec["template"]["spec"]["containers"]
    assert container["image"] == "here/image:1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    words = container["command"]
    if nodes > 1:
        port = "7777" if options.master else "6170"
        assert words[3:7] == [
            "--master",
            f"{name}-nodes-0-0.{name}:{port}",
            "--rank",
            "$(JOB_COMPLETION_INDEX)",
        ]
        words = [*words[:3], *words[7:]]
    words = [word.replace("$$(", "$(") for word in words]
    known = {"master": 0, "rank": 0}
    assert described(words, **known) == {
        f: getattr(options, f) for f in options.__slots__ if f not in known
    }


def test_what_a_manifest_needs():
    with pytest.raises(ValueError, match="--image names the container image"):
        jobset_manifest(Options("a.py"))
    with pytest.raises(ValueError, match="--job_id 1st: a name of letters"):
        jobset_manifest(Options("a.py", job_id="1st", image="i"))


def test_printing_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--print", "slurm", "not_here.py"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=default\n")
    assert not any(tmp_path.iterdir())
    assert main(["--print", "k8s", "not_here.py"]) == 2
    assert "meshpar.launch: --print k8s: --image" in capsys.readouterr().err
