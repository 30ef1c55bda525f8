"""Reading a topic as a stranger does: read_committed, without a group."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord


@asynccontextmanager
async def reading(bootstrap: str, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer at the beginning of all of the topic's partitions."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    try:
        numbers = await consumer._client._wait_on_metadata(topic)
        consumer.assign([TopicPartition(topic, number) for number in numbers])
        yield consumer
    finally:
        await consumer.stop()


async def everything(bootstrap: str, topic: str) -> list[ConsumerRecord]:
    """All that is committed to a topic by now."""
    async with reading(bootstrap, topic) as consumer:
        partitions = consumer.assignment()
        ends = await consumer.end_offsets(list(partitions))
        records: list[ConsumerRecord] = []
        while any([await consumer.position(one) < ends[one] for one in partitions]):
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                records.extend(batch)
        return records
