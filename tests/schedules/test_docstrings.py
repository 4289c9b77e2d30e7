"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import meshpar.schedules

MODULES = [
    importlib.import_module(f"meshpar.schedules.{name}")
    for _, name, _ in pkgutil.iter_modules(meshpar.schedules.__path__)
]
EXAMPLES = [
    test for module in MODULES for test in doctest.DocTestFinder().find(module) if test.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_example_runs(example):
    assert doctest.DocTestRunner().run(example).failed == 0
