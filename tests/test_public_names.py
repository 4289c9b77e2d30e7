"""The public names: each resolves, is documented, and stands in the stub."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import meshpar as mp

STUB = Path(mp.__file__).with_suffix(".pyi")


def stub_names():
    """Name -> the module that the stub takes it from."""
    names = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, f"{alias.name} is no re-export"
                names[alias.name] = node.module
    return names


def test_the_stub_has_the_names_of_the_package():
    assert sorted(stub_names()) == sorted(mp.__all__)


@pytest.mark.parametrize("name", sorted(mp.__all__))
def test_every_name_resolves_and_is_documented(name):
    value = getattr(mp, name)
    assert value is getattr(importlib.import_module(stub_names()[name]), name)
    assert value.__doc__, f"mp.{name} has no docstring"
    assert name in dir(mp)


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'shard_tensors'"):
        mp.shard_tensors  # noqa: B018


def test_import_loads_neither_flax_nor_optax_nor_orbax():
    program = (
        "import sys, meshpar as mp; mp.ProcessMesh([0]);"
        "print([m for m in ('flax', 'optax', 'orbax') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout.strip() == "[]"
