"""What a worker says, as a consumer on the real broker hears it; and a broker that is away."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from schemas.base import Origin, Outgoing
from schemas.codec import decode_chunk, decode_status
from schemas.results import Chunk
from schemas.status import Presence, Status, StatusState
from service.client import Client
from service.errors import RecordRefused
from service.kafka.announcements import Announcer
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.support.bus import until
from tests.support.pool import delete_topics, serving, settings_for

pytestmark = pytest.mark.broker


@pytest.fixture
async def settings(bootstrap: str) -> AsyncIterator[Settings]:
    made = settings_for(bootstrap)
    await ensure_topics(made, [])
    yield made
    await delete_topics(made)


def presence(settings: Settings, worker: str, *, pool: str | None = None, interval_s: float = 60) -> Presence:
    return Presence(worker=worker, pool=pool or settings.worker.group_id, at=time.time(), interval_s=interval_s)


async def heard(settings: Settings, topic: str) -> list:
    async with TopicReader(kafka=settings.kafka, topics=[settings.topics.named(topic)]) as tail:
        return [record async for record in tail.backlog()]


async def test_statuses_and_chunks_keep_their_order(settings: Settings):
    origin = Origin(topic="requests", partition=0, offset=0)
    async with Announcer(settings=settings) as announcer:
        for state in (StatusState.ACCEPTED, StatusState.SWITCHING, StatusState.COMPLETED):
            await announcer.status(Status(worker="w", state=state, kind="switch", at=1))
        for n in range(500):
            await announcer.chunk(origin, Chunk(id="request", seq=n))
    states = [decode_status(record).state for record in await heard(settings, "status")]
    assert states == ["accepted", "switching", "completed"]
    assert [decode_chunk(record).seq for record in await heard(settings, "chunks")] == list(range(500))


async def test_others_of_the_pool_are_known_until_they_leave(settings: Settings):
    async with Announcer(settings=settings) as announcer:
        for one in (
            presence(settings, settings.worker.worker_id),
            presence(settings, "w2"),
            presence(settings, "w3", pool="another"),
        ):
            await announcer.presence(one)

        async def others() -> list[str]:
            return [other.worker for other in await announcer.others()]

        async def only_w2() -> bool:
            return await others() == ["w2"]

        await until(only_w2)
        leaving = settings.model_copy(update={"worker": settings.worker.model_copy(update={"worker_id": "w2"})})
        async with Announcer(settings=leaving) as second:
            await second.farewell()

        async def none() -> bool:
            return await others() == []

        await until(none)


async def test_what_a_worker_learnt_is_there_for_the_one_that_starts_after_it_left(settings: Settings):
    costs = {"models": {"b": {"parked": [0.3, 0.0, 1]}}}
    async with Announcer(settings=settings) as announcer:
        await announcer.presence(presence(settings, settings.worker.worker_id).model_copy(update={"costs": costs}))
        await announcer.farewell()
    starting = settings.model_copy(update={"worker": settings.worker.model_copy(update={"worker_id": "next"})})
    async with Announcer(settings=starting) as successor:
        await successor.presence(presence(settings, "next"))
        before = [one for one in await successor.predecessors() if one.worker == settings.worker.worker_id]
        assert [one.costs for one in before] == [costs]


async def test_a_presence_that_nobody_renews_is_taken_back_by_another_worker(settings: Settings):
    me = presence(settings, settings.worker.worker_id)
    async with Announcer(settings=settings) as announcer:
        await announcer.presence(presence(settings, "ghost", interval_s=0.01))

        async def taken_back() -> bool:
            await announcer.presence(me)
            return any(record.key == b"ghost" and record.value is None for record in await heard(settings, "workers"))

        await until(taken_back)


async def test_a_record_that_the_broker_refuses_does_not_stop_those_behind_it(settings: Settings):
    chunks = settings.topics.named("chunks")
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=64 << 20) as outlet:
        with pytest.raises(RecordRefused, match=chunks):
            await outlet.send(Outgoing(chunks, b"k", b"x" * (30 << 20)))
        await outlet.send(Outgoing(chunks, b"k", b"small"))
    assert [record.value for record in await heard(settings, "chunks")] == [b"small"]


async def test_what_is_sent_together_is_there_in_its_order_by_key(settings: Settings):
    chunks = settings.topics.named("chunks")
    sent = [Outgoing(chunks, f"key {n % 7}".encode(), b"%06d" % n + b"x" * (n % 5 * 1000)) for n in range(3000)]
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=1 << 20) as outlet:
        await outlet.send_all([])
        await outlet.send_all(sent)
        found = await heard(settings, "chunks")
    for key in {one.key for one in sent}:
        assert [one.value for one in found if one.key == key] == [one.value for one in sent if one.key == key]
    assert len(found) == len(sent)


async def test_a_record_that_the_broker_refuses_among_others_is_told(settings: Settings):
    chunks = settings.topics.named("chunks")
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=64 << 20) as outlet:
        large = Outgoing(chunks, b"k", b"x" * (30 << 20))
        with pytest.raises(RecordRefused, match=chunks):
            await outlet.send_all([large, *(Outgoing(chunks, b"%d" % n, b"small") for n in range(20))])
        with pytest.raises(RecordRefused, match="no partition 99"):
            await outlet.send_all([Outgoing(chunks, b"k", b"lost", partition=99)])
        await outlet.send_all([Outgoing(chunks, b"k", b"behind")])
    assert b"behind" in [record.value for record in await heard(settings, "chunks")]


async def test_what_is_sent_together_is_no_larger_than_a_topic_takes(bootstrap: str):
    settings = settings_for(bootstrap, max_message_bytes=8192)
    await ensure_topics(settings, [])
    calls = settings.topics.named("calls")
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=8192) as outlet:
        await outlet.send_all([Outgoing(calls, b"k", b"%d" % n + b"x" * 400) for n in range(200)])
    assert len(await heard(settings, "calls")) == 200
    await delete_topics(settings)


async def test_sends_from_many_tasks_share_one_producer(settings: Settings):
    status = settings.topics.named("status")
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=1 << 20) as outlet:
        await asyncio.gather(*(outlet.send(Outgoing(status, b"k", b"x")) for _ in range(1000)))
    assert len(await heard(settings, "status")) == 1000


async def test_a_restarted_worker_knows_what_it_measured_before(settings: Settings):
    async def measured(client: Client) -> dict:
        models = next((there.costs.get("models", {}) for there in await client.presences()), {})
        return {alias: rows["pace"] for alias, rows in models.items() if "pace" in rows}

    async with serving(settings, step_s=0.01), Client(settings=settings, timeout_s=60) as client:
        await client.complete(model="qwen", prompt="x", max_tokens=5)

        async def learnt() -> bool:
            return "qwen" in await measured(client)

        await until(learnt)
    async with serving(settings), Client(settings=settings, timeout_s=60) as client:
        await client.switch("llama")

        async def known() -> bool:
            return "qwen" in await measured(client)

        await until(known)
