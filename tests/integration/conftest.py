"""The real broker of the integration tests, and a corner of it per test."""

from collections.abc import AsyncIterator

import pytest

from deploy.local.broker import Broker
from tests.support.bus import Bus


@pytest.fixture(scope="session")
def bootstrap(broker: Broker) -> str:
    """Where the broker is."""
    return broker.bootstrap


@pytest.fixture
async def bus(bootstrap: str) -> AsyncIterator[Bus]:
    """Topics and a group that no other test has."""
    corner = await Bus(bootstrap).create()
    yield corner
    await corner.delete()
