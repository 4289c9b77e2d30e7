"""`launched`: a script as several processes."""

import functools

import pytest

from tests.processes.launching import launch


@pytest.fixture
def launched(tmp_path):
    """`launch` in a folder of its own: `launched(script, processes=2, devices=1, ...) -> Run`."""
    return functools.partial(launch, tmp_path)
