"""What the bus bench compares with, each in a process of its own: ``python -m tests.bench.loops bare|faststream``.

``bare`` is the least that gives exactly-once with aiokafka; ``faststream`` is a subscriber as its documentation has
it, at least once. Both call the same handler.
"""

import argparse
import asyncio
import json
import time
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import ConsumerRecord


def handle(value: bytes) -> bytes:
    """A request in, a result out: what a model server says when its model says ``ok``."""
    request = json.loads(value)
    answer = {
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
    }
    return json.dumps({"outcome": "completed", "status": 200, "body": answer}).encode()


async def bare(bootstrap: str, prefix: str) -> None:
    """Consume, transform, produce: a transaction per partition and poll."""
    group = f"{prefix}bare"
    consumer = AIOKafkaConsumer(
        f"{prefix}requests",
        bootstrap_servers=bootstrap,
        group_id=group,
        enable_auto_commit=False,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    await consumer.start()
    producers = {
        partition: AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=f"{group}/{partition.partition}",
            retry_backoff_ms=5,
        )
        for partition in consumer.assignment()
    }
    await asyncio.gather(*(producer.start() for producer in producers.values()))
    print("ready", flush=True)

    async def write(partition: TopicPartition, records: list[ConsumerRecord]) -> None:
        producer = producers[partition]
        async with producer.transaction():
            sent = [await producer.send(f"{prefix}results", handle(record.value), key=record.key) for record in records]
            await producer.send_offsets_to_transaction({partition: records[-1].offset + 1}, group)
            await asyncio.gather(*sent)

    while True:
        batches = await consumer.getmany(timeout_ms=1000, max_records=1000)
        await asyncio.gather(*(write(partition, records) for partition, records in batches.items()))


async def faststream(bootstrap: str, prefix: str) -> None:
    """A FastStream application with one subscriber that publishes what it returns."""
    from faststream import FastStream
    from faststream.kafka import KafkaBroker, KafkaMessage

    broker = KafkaBroker(bootstrap)

    @broker.subscriber(f"{prefix}requests", group_id=f"{prefix}faststream", auto_offset_reset="earliest")
    async def answer(body: dict[str, Any], message: KafkaMessage) -> None:
        raw = message.raw_message
        await broker.publish(handle(message.body), topic=f"{prefix}results", key=raw.key)

    app = FastStream(broker)

    @app.after_startup
    async def ready() -> None:
        print("ready", flush=True)

    await app.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=["bare", "faststream"])
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--prefix", required=True)
    given = parser.parse_args()
    uvloop.run({"bare": bare, "faststream": faststream}[given.loop](given.bootstrap, given.prefix))
