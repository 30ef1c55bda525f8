"""The real broker of the integration tests, and a corner of it per test."""

import os
from collections.abc import AsyncIterator

import pytest

from tests.support.bus import Bus


@pytest.fixture(scope="session")
def bootstrap() -> str:
    """Where the broker is."""
    return os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:19092")


@pytest.fixture
async def bus(bootstrap: str) -> AsyncIterator[Bus]:
    """Topics and a group that no other test has."""
    corner = await Bus(bootstrap).create()
    yield corner
    await corner.delete()
