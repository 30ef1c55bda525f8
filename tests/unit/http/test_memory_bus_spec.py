"""The bus of HTTP passes what every bus passes; it keeps no log, so nothing outlives who asked."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.base import Headers, Origin
from service.http.memory_bus import Exchange, InMemoryBus
from tests.support.bus_spec import *  # noqa: F403


class Askers:
    """Those who ask over HTTP, each on a connection of its own."""

    def __init__(self, connections: contextlib.ExitStack) -> None:
        self._connections = connections
        self._bus = InMemoryBus(max_requests=100, max_bytes=1 << 20, backlog=100)
        self._asked: dict[Origin, Exchange] = {}

    @contextlib.asynccontextmanager
    async def member(self, name: str = "one", **limits: Any) -> AsyncIterator[InMemoryBus]:
        yield self._bus

    async def produce(self, *values: bytes | None, headers: Headers = (), alias: str | None = None) -> list[Origin]:
        return [self._ask(value, headers) for value in values]

    def _ask(self, value: bytes | None, headers: Headers) -> Origin:
        exchange = self._connections.enter_context(self._bus.ask(value or b"", headers, id_=str(len(self._asked))))
        self._asked[exchange.record.origin] = exchange
        return exchange.record.origin

    async def answered(self) -> Counter[Origin]:
        return Counter(origin for origin, exchange in self._asked.items() if exchange.settled)


@pytest.fixture
async def bus() -> AsyncIterator[Askers]:
    with contextlib.ExitStack() as connections:
        yield Askers(connections)
