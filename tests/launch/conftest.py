"""Launchers that a failed test leaves behind are ended with it."""

import pytest

from tests.launch import job


@pytest.fixture(autouse=True)
def _no_launcher_outlives_its_test():
    yield
    while job.started:
        process = job.started.pop()
        if process.poll() is None:
            process.kill()  # its guard ends the ranks
            process.communicate()
