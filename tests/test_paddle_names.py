"""Paddle's names of collectives, environment and launching: each is here, with its parameters.

`tests/data/paddle_collectives.json` holds them as PaddlePaddle 3.3.1 has them: the parameters in
order, with defaults as source text, and the constants and public members of classes.
"""

import ast
import enum
import inspect
import json
import operator
import pathlib
import types

import pytest

import meshpar as mp

NAMES = json.loads(
    (pathlib.Path(__file__).parent / "data/paddle_collectives.json").read_text(encoding="utf-8")
)
OTHER = {  # what is another thing here, and why
    "launch": "a module, run as python -m meshpar.launch; Paddle's function reads sys.argv",
    "Group": "a value of ranks, made by mp.new_group and mesh.group; Paddle's holds a communicator",
}
DEFAULTS = {  # (name, parameter): why the default is another one
    ("new_group", "timeout"): "None is PADDLE_PG_TIMEOUT, whose default are the same 30 minutes",
}
MEMBERS = {  # (class, member): why it is not here
    ("ParallelEnv", "nrings"): "the number of NCCL's rings, which XLA decides",
    ("Group", "rank"): "mp.get_rank(group): a value does not know who asks",
    ("Group", "is_member"): "mp.get_rank(group) >= 0",
    ("Group", "backend"): "mp.get_backend(group)",
    ("Group", "name"): "str(group)",
    ("Group", "process_group"): "Paddle's communicator; XLA keeps its own",
    ("DataParallel", "forward"): "flax's modules are called",
    ("DataParallel", "init_reducer"): "there is none: gradients are averaged as they come",
    ("DataParallel", "scale_loss"): "does nothing in Paddle",
    ("DataParallel", "apply_collective_grads"): "does nothing in Paddle; average_gradients",
}


def found(name):
    return operator.attrgetter(name)(mp)


def parameters_of(value):
    if not isinstance(value, type):
        return list(inspect.signature(value).parameters.values())
    if value.__init__ is object.__init__ or issubclass(value, enum.Enum):
        return []
    return list(inspect.signature(value.__init__).parameters.values())[1:]  # without self


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_here_and_documented(name):
    assert found(name).__doc__


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER])
def test_parameters_and_defaults_are_paddles(name):
    """Ours may take more, by keyword, and may do without what Paddle's needs."""
    ours = parameters_of(found(name))
    for theirs, own in zip(NAMES[name]["parameters"], ours, strict=False):
        parameter, *default = theirs
        if parameter.startswith("**"):
            assert own.kind is own.VAR_KEYWORD
            continue
        assert own.name == parameter and own.kind is own.POSITIONAL_OR_KEYWORD
        if default and (name, parameter) not in DEFAULTS:
            assert own.default == ast.literal_eval(default[0]), parameter
    rest = ours[len(NAMES[name]["parameters"]) :]
    assert len(ours) >= len(NAMES[name]["parameters"])
    assert all(own.kind is own.KEYWORD_ONLY for own in rest)


@pytest.mark.parametrize("name", [name for name in NAMES if "constants" in NAMES[name]])
def test_constants_are_paddles(name):
    for constant, value in NAMES[name]["constants"].items():
        assert getattr(found(name), constant) == value


@pytest.mark.parametrize("name", [name for name in NAMES if "members" in NAMES[name]])
def test_members_are_here(name):
    for member in NAMES[name]["members"]:
        if (name, member) not in MEMBERS:
            assert hasattr(found(name), member), member


def test_what_is_not_here_is_still_not():
    assert isinstance(mp.launch, types.ModuleType)
    assert not any(hasattr(found(name), member) for name, member in MEMBERS)


@pytest.mark.parametrize(
    "call, instead",
    [
        (mp.shutdown_process_group, "mp.destroy_process_group"),
        (mp.restart_process_group, "mp.init_parallel_env"),
        (lambda: mp.split(None, (4, 4), "linear"), "mp.shard_tensor"),
    ],
    ids=["shutdown_process_group", "restart_process_group", "split"],
)
def test_what_has_no_meaning_says_what_to_use(call, instead):
    with pytest.raises(NotImplementedError, match=instead):
        call()


def test_nccl_is_not_configured_where_it_is_not():
    assert mp.create_nccl_config({"commName": "tp"}) is None
