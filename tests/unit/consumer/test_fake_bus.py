"""The fake bus passes what the real one passes: else the worker's tests would say nothing of it."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas.base import Headers, Origin
from service.consumer.in_flight import Limits
from service.settings import TopicSettings
from tests.support.bus_spec import *  # noqa: F403
from tests.support.fake_bus import FakeBus
from tests.support.fake_kafka import FakeBroker
from tests.support.log_spec import *  # noqa: F403

PARTITIONS = 2


class Memory:
    """A pool of fake buses on one broker in memory."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.topics = TopicSettings()
        self._members: list[FakeBus] = []
        self._next = 0

    @asynccontextmanager
    async def member(self, name: str = "one", *, max_waiting: int = 4096) -> AsyncIterator[FakeBus]:
        limits = Limits(requests=max_waiting, bytes=256 << 20, tokens=4_000_000)
        bus = FakeBus(topics=self.topics, broker=self.broker, limits=limits)
        self._members.append(bus)
        try:
            yield bus
        finally:
            if bus in self._members:
                self._members.remove(bus)
                bus.member.flush()

    async def produce(self, *values: bytes | None, headers: Headers = (), alias: str | None = None) -> list[Origin]:
        topic = self.topics.for_alias(alias) if alias else self.topics.named(self.topics.requests)
        return [self._append(topic, value, headers) for value in values]

    def _append(self, topic: str, value: bytes | None, headers: Headers) -> Origin:
        self._next += 1
        return self.broker.append(topic, value, headers, partition=self._next % PARTITIONS)

    async def withdraw_interest(self, origin: Origin) -> None:
        self._members[-1].lose(origin)

    async def answered(self) -> Counter[Origin]:
        return Counter(self.broker.results)

    async def forget(self, origin: Origin) -> None:
        self.broker.forget_before(origin.topic, origin.offset, partition=origin.partition)

    async def skip(self) -> None:
        for partition in range(PARTITIONS):
            self.broker.skip(self.topics.named(self.topics.requests), 3, partition=partition)

    async def share(self, first: FakeBus, second: FakeBus) -> None:
        there = sorted(self.broker.logs)
        first.assign(there[::2])
        second.assign(there[1::2])

    async def kept(self) -> set[Origin]:
        return set(self.broker.progress)

    async def kept_sessions(self) -> set[str]:
        return {name for (_, name), progress in self.broker.sessions.items() if progress.parts}

    async def kill(self, member: FakeBus) -> None:
        self._members.remove(member)


@pytest.fixture
def bus() -> Memory:
    return Memory()
