"""The public names: each resolves, is documented, and stands in the stub.

Run as a program, `python tests/test_public_names.py`, it writes the stub anew.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import meshpar as mp

STUB = Path(mp.__file__).with_suffix(".pyi")
MODULES = mp._MODULES
HOME = mp._HOME


def stub():
    """The text of the stub, from the table in `meshpar/__init__.py`."""
    names = sorted(HOME.items(), key=lambda item: (item[1], item[0]))
    lines = [
        '"""The public names for type checkers; at run time `__init__.py` imports them late."""',
        "",
        *(
            f"from {module.rpartition('.')[0]} import {name} as {name}"
            for name, module in sorted(MODULES.items())
        ),
        *(f"from {module} import {name} as {name}" for name, module in names),
        "",
        "__version__: str",
        "",
    ]
    return "\n".join(lines)


def test_the_stub_has_the_names_of_the_package():
    assert STUB.read_text() == stub(), f"python {__file__} writes it anew"
    assert sorted(mp.__all__) == sorted([*HOME, *MODULES])


@pytest.mark.parametrize("name", sorted(HOME))
def test_every_name_resolves_and_is_documented(name):
    value = getattr(mp, name)
    assert value is getattr(importlib.import_module(HOME[name]), name)
    assert value.__doc__, f"mp.{name} has no docstring"
    assert name in dir(mp)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_resolves_and_is_documented(name):
    assert getattr(mp, name) is importlib.import_module(MODULES[name])
    assert getattr(mp, name).__doc__


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


if __name__ == "__main__":
    STUB.write_text(stub())
