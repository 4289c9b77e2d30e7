"""The fixture that launches processes."""

from tests.processes.conftest import launched

__all__ = ["launched"]
