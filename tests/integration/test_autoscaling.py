"""Scaling to zero and back: the figure that KEDA computes from Kafka's offsets, against a real broker's.

KEDA's own client asks it the same two questions: what the group has committed, and where each partition ends.
"""

import re
from math import ceil

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from deploy.local.setup import ROOT
from service.client import Client
from service.settings import Settings
from tests.support.bus import until
from tests.support.pool import delete_topics, serving, settings_for

pytestmark = pytest.mark.broker

SCALED_OBJECT = (ROOT / "deploy/kubernetes/gearshift/templates/scaledobject.yaml").read_text()
REQUESTS_PER_WORKER = 3


def policy() -> str:
    """What the chart tells KEDA about a partition of which nothing was committed; KEDA's default without a word."""
    found = re.search(r"offsetResetPolicy: (\w+)", SCALED_OBJECT)
    return "latest" if found is None else found[1]


def keda_lag(committed: int | None, end: int, reset: str) -> int:
    """``getLagForPartition`` of KEDA's scaler for Kafka."""
    if committed is None:
        return end if reset == "earliest" else 1
    return end - committed


async def workers(settings: Settings, *, reset: str) -> int:
    """How many workers KEDA would have: of its triggers, one for each topic, the one that asks for most."""
    topics = [settings.topics.named("requests"), settings.topics.named("calls")]
    topics += [settings.topics.for_alias(alias) for alias in ("llama", "qwen")]
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka.bootstrap_servers)
    consumer = AIOKafkaConsumer(*topics, bootstrap_servers=settings.kafka.bootstrap_servers)
    await admin.start()
    await consumer.start()
    try:
        committed = await admin.list_consumer_group_offsets(settings.worker.group_id)
        most = 0
        for topic in topics:
            partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
            assert partitions, topic
            ends = await consumer.end_offsets(partitions)
            known = {each: committed[each].offset for each in partitions if each in committed}
            lag = sum(keda_lag(known.get(each), ends[each], reset) for each in partitions)
            most = max(most, ceil(min(lag / REQUESTS_PER_WORKER, len(partitions))))
        return most
    finally:
        await consumer.stop()
        await admin.close()


async def test_a_pool_with_nothing_to_do_scales_to_zero_and_one_that_is_asked_comes_back(bootstrap: str) -> None:
    settings = settings_for(bootstrap, park_after_s=0.2)

    async def none_wanted() -> bool:
        return await workers(settings, reset=policy()) == 0

    try:
        async with Client(settings=settings, timeout_s=60) as client:
            body = {"model": "llama", "prompt": "hello", "max_tokens": 4}
            async with serving(settings):
                await client.switch("llama", hold=1.0)
                moved = await client.submit({**body, "model": "qwen"})  # over qwen's own topic, in a transaction
                await client.result(await client.submit(body))
                await client.result(moved)
                await until(none_wanted)
            assert await workers(settings, reset="latest") > 0  # KEDA's default: partitions that nobody ever wrote to
            ids = [await client.submit(body) for _ in range(5)]
            assert await workers(settings, reset=policy()) == 2
            async with serving(settings):
                for id_ in ids:
                    await client.result(id_)
                await until(none_wanted)
    finally:
        await delete_topics(settings)
