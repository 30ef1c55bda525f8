"""The real consumer of requests passes what the fake bus and the one of HTTP pass."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from schemas.base import Headers, Origin
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.requests import RequestConsumer
from service.consumer.transactions import PartitionTransactions
from service.kafka.connection import close_consumer
from tests.support.bus import Bus
from tests.support.bus_spec import *  # noqa: F403
from tests.support.log_spec import *  # noqa: F403
from tests.support.pool import kept_progress

pytestmark = pytest.mark.broker

PARTITIONS = 2


class Corner:
    """A pool of real consumers, on topics that no other test has."""

    def __init__(self, corner: Bus, producer: AIOKafkaProducer) -> None:
        self._corner = corner
        self._producer = producer
        self._turn = itertools.count()
        self._killed: list[RequestConsumer] = []

    @contextlib.asynccontextmanager
    async def member(self, name: str = "one", **limits: Any) -> AsyncIterator[RequestConsumer]:
        async with contextlib.AsyncExitStack() as stack:
            member = self._corner.intake(name, **limits)
            stack.push_async_exit(await self._opened(member))
            yield member

    async def _opened(self, member: RequestConsumer) -> Callable[..., Awaitable[None]]:
        """Open it, and give how it is closed: as a worker that stops, unless it was killed before."""
        await member.__aenter__()

        async def close(*_: object) -> None:
            if member not in self._killed:
                await member.__aexit__(None, None, None)

        return close

    async def produce(self, *values: bytes | None, headers: Headers = (), alias: str | None = None) -> list[Origin]:
        topic = self._corner.topics.for_alias(alias) if alias else self._corner.requests
        sent = [
            await self._producer.send(
                topic, value, key=b"k", partition=next(self._turn) % PARTITIONS, headers=list(headers)
            )
            for value in values
        ]
        return [Origin(topic=topic, partition=one.partition, offset=one.offset) for one in await asyncio.gather(*sent)]

    async def withdraw_interest(self, origin: Origin) -> None:
        """Another owner comes, settles it, and goes."""
        where, settings = TopicPartition(origin.topic, origin.partition), self._corner.all_settings()
        stranger = PartitionTransactions(
            settings=settings, partition=where, ledgers_topic=LedgersTopic(settings=settings)
        )
        await stranger.fence()
        ledger = Ledger()
        ledger.deliver(origin.offset)
        await stranger.commit([], *ledger.encode([origin.offset]))
        await stranger.close()

    async def answered(self) -> Counter[Origin]:
        return Counter(result.origin for result in await self._corner.read_results())

    async def forget(self, origin: Origin) -> None:
        await self._corner.forget_before(origin.offset, origin.partition)

    async def skip(self) -> None:
        name = f"{self._corner.prefix}aborting"
        async with AIOKafkaProducer(bootstrap_servers=self._corner.bootstrap, transactional_id=name) as producer:
            await producer.begin_transaction()
            for partition in range(PARTITIONS):
                await producer.send_and_wait(self._corner.requests, b"aborted", partition=partition)
            await producer.abort_transaction()

    async def share(self, first: RequestConsumer, second: RequestConsumer) -> None:
        """The group sees to it as both go on reading."""

    async def kept(self) -> set[Origin]:
        places = [key.rsplit("/", 3)[1:] for key in await self._kept() if "/session/" not in key]
        return {
            Origin(topic=of.partition("@")[0], partition=int(part), offset=int(offset)) for of, part, offset in places
        }

    async def kept_sessions(self) -> set[str]:
        return {key.rpartition("/")[2] for key in await self._kept() if "/session/" in key}

    async def _kept(self) -> set[str]:
        return {key.decode() for key in await kept_progress(self._corner.all_settings())}

    async def kill(self, member: RequestConsumer) -> None:
        self._killed.append(member)
        for task in member._background:
            task.cancel()
        await member._owned.close()
        await close_consumer(member._consumer)  # a static member: the group waits for its successor
        member._polling.close()
        await member._committed.close()


@pytest.fixture
async def bus(bootstrap: str) -> AsyncIterator[Corner]:
    corner = await Bus(bootstrap, partitions=PARTITIONS, aliases=("llama", "qwen")).create()
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_request_size=16 << 20, linger_ms=5) as producer:
        yield Corner(corner, producer)
    await corner.delete()
