"""Topics as a real broker makes them."""

import time
from collections.abc import AsyncIterator, Collection

import pytest
import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic

from service.errors import BrokerUnavailable, TopicError
from service.kafka.reader import TopicReader, partitions_of
from service.kafka.topics import configs_of, ensure_reply_topic, ensure_topics
from service.settings import KafkaSettings, Settings
from tests.support.bus import Bus, until
from tests.support.pool import delete_topics, settings_for

pytestmark = pytest.mark.broker


@pytest.fixture
async def settings(bootstrap: str) -> AsyncIterator[Settings]:
    made = settings_for(bootstrap)
    yield made
    await delete_topics(made)


@pytest.fixture
async def admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    yield client
    await client.close()


def changed(settings: Settings, **topics: object) -> Settings:
    return settings.model_copy(update={"topics": settings.topics.model_copy(update=topics)})


async def test_topics_are_made_once_and_as_planned(settings: Settings, admin: AIOKafkaAdminClient):
    created = await ensure_topics(settings, ["qwen"])
    assert len(created) == 17
    assert await ensure_topics(settings, ["qwen"]) == ()
    assert await ensure_topics(settings, ["qwen", "llama"]) == (settings.topics.for_alias("llama"),)
    sizes = await partitions_of(settings.kafka, created)
    assert sizes[settings.topics.named("requests")] == settings.topics.request_partitions
    assert sizes[settings.topics.named("control")] == 1
    configs = await configs_of(admin, list(created))
    assert configs[settings.topics.named("control")]["cleanup.policy"] == "compact"
    assert configs[settings.topics.named("control.commands")]["retention.ms"] == "86400000"
    assert configs[settings.topics.named("requests")]["max.message.bytes"] == str(settings.topics.max_message_bytes)


async def test_a_producer_whose_clock_is_wrong_changes_nothing_of_when_its_request_came(settings: Settings):
    await ensure_topics(settings, ["qwen"])
    names = [settings.topics.named("requests"), settings.topics.for_alias("qwen")]
    hour = 3600_000
    async with AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers) as producer:
        before = time.time()
        for name in names:
            for wrong_by in (-hour, hour):
                await producer.send_and_wait(name, b"{}", timestamp_ms=round(1000 * before) + wrong_by)
    async with TopicReader(kafka=settings.kafka, topics=names) as reader:
        read = [record async for record in reader.backlog()]
    assert len(read) == 4
    assert all(before - 1 <= record.timestamp <= time.time() + 1 for record in read)


async def test_a_topic_that_keeps_its_producers_time_is_named_with_the_command_that_mends_it(
    settings: Settings, admin: AIOKafkaAdminClient
):
    name = settings.topics.named("requests")
    await admin.create_topics([NewTopic(name, 1, 1, topic_configs={"message.timestamp.type": "CreateTime"})])
    with structlog.testing.capture_logs() as said:
        await ensure_topics(settings, [])
    (one,) = [entry for entry in said if entry["event"] == "topic.keeps_producers_time"]
    assert one["topic"] == name
    assert one["mend"].endswith(f"--entity-name {name} --add-config message.timestamp.type=LogAppendTime")


async def test_where_topics_may_not_be_created_the_commands_are_told(settings: Settings):
    with pytest.raises(TopicError) as caught:
        await ensure_topics(changed(settings, create_topics=False), [])
    assert f"--create --topic {settings.topics.named('control')} --partitions 1" in str(caught.value)
    with pytest.raises(TopicError, match="no topic"):
        await partitions_of(settings.kafka, [settings.topics.named("control")], within_s=0.1)


async def test_a_topic_that_the_broker_will_not_create_is_told_with_its_reason(settings: Settings):
    with pytest.raises(TopicError, match="replicat"):
        await ensure_topics(changed(settings, replication_factor=30), [])


async def test_state_in_a_topic_that_forgets_is_objected_to(settings: Settings, admin: AIOKafkaAdminClient):
    await admin.create_topics([NewTopic(settings.topics.named("control"), 1, 1)])
    with pytest.raises(TopicError, match="must be compacted"):
        await ensure_topics(settings, [])


async def test_a_reply_topic_is_made_where_it_is_missing(settings: Settings):
    name = f"{settings.topics.topic_prefix}mine"
    assert await ensure_reply_topic(settings, name) == (name,)
    assert await ensure_reply_topic(settings, name) == ()


async def test_without_a_broker_that_is_said():
    nowhere = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await partitions_of(nowhere, ["x"])


async def values(records) -> list[bytes]:
    return [record.value async for record in records]


async def test_a_tail_reads_what_is_there_or_what_comes_or_what_came_since_a_moment(bus: Bus):
    await bus.produce("old", partition=0)
    (record,) = await bus.read(bus.requests)
    async with (
        TopicReader(kafka=bus.kafka, topics=[bus.requests]) as whole,
        TopicReader(kafka=bus.kafka, topics=[bus.requests], from_end=[bus.requests]) as fresh,
    ):
        await bus.produce("new", partition=0)
        assert await values(whole.backlog()) == [b"old", b"new"]
        assert await values(fresh.backlog()) == [b"new"]
    for since, expected in ((record.timestamp / 1000 + 0.001, [b"new"]), (4e9, [])):
        async with TopicReader(kafka=bus.kafka, topics=[bus.requests], since=since) as later:
            assert await values(later.backlog()) == expected


async def test_a_tail_does_not_wait_for_markers_of_transactions_at_the_end(bus: Bus):
    await bus.produce("a", "b", partition=0, transactional=True)
    async with TopicReader(kafka=bus.kafka, topics=[bus.requests]) as tail:
        seen = []

        async def both() -> bool:
            seen.extend(await values(tail.backlog()))
            return len(seen) == 2

        await until(both)  # who has committed is answered before the marker is written
        assert seen == [b"a", b"b"]
        assert await values(tail.backlog()) == []


async def test_partitions_that_are_added_are_read_from_their_first_record_and_nothing_again(
    bus: Bus, admin: AIOKafkaAdminClient
):
    await bus.produce("before", partition=0)
    async with TopicReader(kafka=bus.kafka, topics=[bus.requests], notice_growth_s=0.2) as tail:
        assert await values(tail.backlog()) == [b"before"]
        await admin.create_partitions({bus.requests: NewPartitions(bus.partitions + 2)})
        await partitions_grew(bus)
        await bus.produce("after", partition=bus.partitions + 1)
        assert await anext(values_of(tail)) == b"after"


async def test_who_reads_some_partitions_is_asked_again_when_there_are_more_and_misses_nothing_between(
    bus: Bus, admin: AIOKafkaAdminClient
):
    asked: list[int] = []

    def only(size: int) -> Collection[int]:
        asked.append(size)
        return {1} if size == bus.partitions else range(size)

    async with TopicReader(
        kafka=bus.kafka, topics=[bus.requests], from_end=[bus.requests], only=only, notice_growth_s=10
    ) as tail:
        assert tail.partitions == {1}
        await bus.produce("elsewhere", partition=0)
        await bus.produce("here", partition=1)
        assert await anext(values_of(tail)) == b"here"
        await tail.include([2])
        await bus.produce("included", partition=2)
        assert await anext(values_of(tail)) == b"included"
        await admin.create_partitions({bus.requests: NewPartitions(bus.partitions + 2)})
        await partitions_grew(bus)
        await bus.produce("moved there", partition=bus.partitions + 1)
        values = values_of(tail)
        assert {await anext(values), await anext(values)} == {b"elsewhere", b"moved there"}
    assert asked == [bus.partitions, bus.partitions + 2]


async def partitions_grew(bus: Bus) -> None:
    while (await partitions_of(bus.kafka, [bus.requests]))[bus.requests] == bus.partitions:
        pass


async def values_of(tail: TopicReader) -> AsyncIterator[bytes]:
    async for record in tail:
        yield record.value
