"""What reads for as long as a worker lives goes on, whatever aiokafka lets out of a read."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer

from schemas.base import Outgoing
from schemas.codec import encode_usage
from schemas.status import Presence
from schemas.usage import Usage
from service.kafka.announcements import Announcer
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader
from service.kafka.topics import ensure_topics
from service.kafka.usage import follow_usage
from service.settings import Settings
from tests.support.bus import until
from tests.support.fake_kafka import CAUSES
from tests.support.pool import delete_topics, settings_for
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker


@pytest.fixture
async def settings(bootstrap: str) -> AsyncIterator[Settings]:
    made = settings_for(bootstrap)
    await ensure_topics(made, [])
    yield made
    await delete_topics(made)


@pytest.fixture
def stumble(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[BaseException]], asyncio.Event]:
    """Let the next read fail; the event is set when it has."""
    reads = AIOKafkaConsumer.getmany

    def once(cause: type[BaseException]) -> asyncio.Event:
        failed = asyncio.Event()

        async def getmany(*given: object, **named: object) -> object:
            if not failed.is_set():
                failed.set()
                raise cause
            return await reads(*given, **named)

        monkeypatch.setattr(AIOKafkaConsumer, "getmany", getmany)
        return failed

    return once


@pytest.mark.parametrize("cause", CAUSES)
async def test_what_tenants_spend_is_counted_on_after_any_trouble_with_reading_it(
    settings: Settings, stumble: Callable[[type[BaseException]], asyncio.Event], cause: type[BaseException]
) -> None:
    told: list[str] = []

    def take(usage: Usage, _at: float) -> None:
        told.append(usage.tenant)

    async def spend(outlet: IdempotentProducer, tenant: str) -> None:
        origin = {"topic": "requests", "partition": 0, "offset": 0}
        usage = {"id": tenant, "origin": origin, "at": time.time(), "outcome": "completed", "tenant": tenant}
        await outlet.send(encode_usage(settings.topics.named("usage"), usage))

    following = asyncio.create_task(follow_usage(settings, take))
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=1 << 20) as outlet:
        await spend(outlet, "before")
        await until(lambda: told == ["before"] or following.done())
        failed = stumble(cause)
        await until(lambda: failed.is_set() or following.done())
        await spend(outlet, "after")
        await until(lambda: told[1:] == ["after"] or following.done())
    assert not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert told == ["before", "after"], "each once"


@pytest.mark.parametrize("cause", CAUSES)
async def test_other_workers_are_heard_after_any_trouble_with_reading_of_them(
    settings: Settings, stumble: Callable[[type[BaseException]], asyncio.Event], cause: type[BaseException]
) -> None:
    def presence(worker: str) -> Presence:
        return Presence(worker=worker, pool=settings.worker.group_id, at=time.time(), interval_s=60)

    async with Announcer(settings=settings) as announcer:

        async def known() -> set[str]:
            return {one.worker for one in await announcer.others()}

        async def heard_first() -> bool:
            return await known() == {"first"}

        async def heard_both() -> bool:
            return await known() == {"first", "second"}

        await announcer.presence(presence("first"))
        await until(heard_first)
        await stumble(cause).wait()
        await announcer.presence(presence("second"))
        await until(heard_both)


async def test_what_is_written_while_a_reader_looks_where_to_begin_is_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a topic in which nothing is yet it begins at the end, and the end must not move behind that record."""
    topic, written = settings.topics.named("usage"), asyncio.Event()
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=1 << 20) as outlet:

        def writing_behind(ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def asked(*given: Any) -> Any:
                found = await ask(*given)
                if given[1] and not written.is_set():
                    written.set()
                    await outlet.send(Outgoing(topic, b"key", b"value"))
                return found

            return asked

        for name in ("end_offsets", "offsets_for_times"):
            monkeypatch.setattr(AIOKafkaConsumer, name, writing_behind(getattr(AIOKafkaConsumer, name)))
        async with TopicReader(kafka=settings.kafka, topics=[topic], since=time.time() - 60) as reader:
            assert written.is_set()
            async with asyncio.timeout(PATIENCE_S):
                while not (records := await reader.read()):
                    pass
    assert [record.value for record in records] == [b"value"]
