"""Which reply topics there are, and what becomes of a result whose topic is not there, or not any more."""

import asyncio

import pytest
from aiokafka.admin import NewPartitions, NewTopic

from schemas.base import Origin, Outgoing
from schemas.codec import encode_chunk
from schemas.requests import ReplyTo
from schemas.results import Chunk
from service.errors import RecordRefused
from service.kafka.announcements import Announcer
from service.kafka.producer import IdempotentProducer
from service.kafka.reply_topics import Place, ReplyTopics
from service.kafka.topics import ensure_topics
from service.settings import KafkaSettings
from tests.support.bus import Bus, deliveries
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker


def replies_of(bus: Bus) -> ReplyTopics:
    return ReplyTopics(kafka=bus.kafka, topics=bus.topics)


async def make(bus: Bus, name: str, partitions: int = 3, **configs: str) -> str:
    """A topic; the names of its settings have lines for dots."""
    rules = {key.replace("_", "."): value for key, value in configs.items()}
    async with bus.admin() as admin:
        await admin.create_topics([NewTopic(f"{bus.prefix}{name}", partitions, 1, topic_configs=rules)])
    return f"{bus.prefix}{name}"


async def test_a_topic_is_there_with_its_partitions_and_no_more(bus: Bus):
    topic, replies = await make(bus, "mine"), replies_of(bus)
    for partition in (None, 0, 2):
        assert await replies.place(ReplyTo(topic, partition)) == Place(ReplyTo(topic, partition))
    for missing in (ReplyTo(topic, 3), ReplyTo(topic, 2**62), ReplyTo(f"{bus.prefix}other"), ReplyTo("\x00 /" * 60)):
        place = await replies.place(missing)
        assert place.reply is None
        assert place.note
    assert await replies.place(None) == Place()


async def test_a_topic_that_was_missing_is_used_as_soon_as_somebody_makes_it(bus: Bus):
    replies, wanted = replies_of(bus), ReplyTo(f"{bus.prefix}late", 1)
    assert (await replies.place(wanted)).reply is None
    await make(bus, "late")
    while (await replies.place(wanted)).reply is None:
        pass
    async with bus.admin() as admin:
        await admin.create_partitions({wanted.topic: NewPartitions(8)})
    while (await replies.place(ReplyTo(wanted.topic, 7))).reply is None:
        pass


async def test_names_that_nobody_has_made_are_looked_for_together(bus: Bus):
    """A thousand names, each of them looked for by itself, would take minutes."""
    replies = replies_of(bus)
    async with asyncio.timeout(PATIENCE_S):
        places = await asyncio.gather(*(replies.place(ReplyTo(f"{bus.prefix}x{n}")) for n in range(1000)))
    assert all(place.reply is None for place in places)


async def test_while_no_broker_answers_a_topic_is_taken_to_be_there():
    corner = Bus("127.0.0.1:1")
    replies = ReplyTopics(kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"), topics=corner.topics)
    wanted = ReplyTo(f"{corner.prefix}mine", 1)
    assert await replies.place(wanted) == Place(wanted)
    assert not await replies.gone(wanted)


async def test_results_and_chunks_go_to_the_partition_that_is_named_and_to_the_topics_of_all_when_it_is_gone(bus: Bus):
    topic = await make(bus, "mine")
    await ensure_topics(bus.all_settings(), [])
    await bus.produce("a", "b", partition=0)
    async with bus.intake() as intake, Announcer(settings=bus.all_settings()) as announcer:
        first, second = await deliveries(intake, 2)
        await announcer.chunk(first.record.origin, Chunk(id="a", seq=0), ReplyTo(topic, 2))
        await intake.settle(first.record.origin, bus.result(first, reply_to=topic, partition=2))
        assert [record.partition for record in await bus.read(topic)] == [2, 2]
        await bus.delete_topic(topic)
        async with asyncio.timeout(PATIENCE_S):
            settled = await intake.settle(second.record.origin, bus.result(second, reply_to=topic, partition=2))
    assert settled == bus.result(second, reply_to=topic, partition=2), "whole"
    (record,) = await bus.read()
    assert b"could not be written" in dict(record.headers)["reply-failed"]
    assert len(await bus.answered()) == 1


async def test_a_topic_that_would_refuse_a_transactions_marker_is_not_written_to(bus: Bus):
    """The broker would try to write the marker for ever, and nobody could commit to the partition any more."""
    strict = await make(bus, "strict", message_timestamp_before_max_ms="0")
    usual = await make(bus, "usual", message_timestamp_before_max_ms="3600000")
    stamped = await make(bus, "stamped", message_timestamp_before_max_ms="0", message_timestamp_type="LogAppendTime")
    replies = replies_of(bus)
    for topic in (usual, stamped):
        assert await replies.place(ReplyTo(topic)) == Place(ReplyTo(topic))
    assert "message.timestamp.before.max.ms of 0" in ((await replies.place(ReplyTo(strict))).note or "")
    await ensure_topics(bus.all_settings(), [])
    await bus.produce("a", "b", partition=0)
    async with bus.intake() as intake, asyncio.timeout(PATIENCE_S):
        for delivery in await deliveries(intake, 2):
            settled = await intake.settle(delivery.record.origin, bus.result(delivery, reply_to=strict))
            assert settled == bus.result(delivery, reply_to=strict)
    assert [b"would hang" in dict(record.headers)["reply-failed"] for record in await bus.read()] == [True] * 2


async def test_a_partition_that_a_producer_does_not_know_is_a_refusal_and_one_that_was_just_added_is_not(bus: Bus):
    topic = await make(bus, "mine")
    chunk = encode_chunk(topic, Chunk(id="a", seq=0), partition=5)
    async with IdempotentProducer(kafka=bus.kafka, max_record_bytes=1 << 20) as outlet:
        with pytest.raises(RecordRefused, match="no partition 5"):
            await outlet.send(chunk)
        async with bus.admin() as admin:
            await admin.create_partitions({topic: NewPartitions(8)})
        async with asyncio.timeout(PATIENCE_S):
            while (sent := await taken(outlet, chunk)) is None:
                pass
    assert sent == Origin(topic=topic, partition=5, offset=0)


async def taken(outlet: IdempotentProducer, record: Outgoing) -> Origin | None:
    try:
        return await outlet.send(record)
    except RecordRefused:
        return None
