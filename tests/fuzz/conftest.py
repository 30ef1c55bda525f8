"""The worker around fakes, as in its unit tests."""

from tests.unit.worker.conftest import serve

__all__ = ["serve"]
