"""Work that takes longer than anything the group waits for, and a backlog that no memory would hold."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from aiokafka import AIOKafkaProducer

from schemas.results import Outcome
from service.client import Client
from service.settings import Settings
from tests.support.bus import Bus, until
from tests.support.pool import delete_topics, serving, settings_for

pytestmark = pytest.mark.broker

HELLO = [{"role": "user", "content": "hello"}]
SESSION_S, POLL_S = 6.0, 6.5
"""The shortest session that brokers allow by default, and a little more between two polls."""


async def members(bus: Bus, group: str) -> list[str]:
    """Who is in the group; a member that has been away comes back under another id."""
    async with bus.admin() as admin:
        (description,) = await admin.describe_consumer_groups([group])
        return [member[0] for member in description.groups[0][5]]


async def test_a_long_switch_and_a_long_generation_leave_the_worker_in_its_group(bootstrap: str) -> None:
    settings = settings_for(bootstrap, session_timeout_s=SESSION_S, rebalance_timeout_s=POLL_S)
    bus, long_s = Bus(bootstrap), 1.25 * POLL_S
    async with serving(settings, step_s=0.1, switch_s=long_s), Client(settings=settings, timeout_s=120) as client:
        await client.chat(model="llama", messages=HELLO, max_tokens=1)
        before = await members(bus, settings.worker.group_id)
        slow = await client.submit({"model": "llama", "messages": HELLO, "max_tokens": round(long_s / 0.1)})
        result = await client.result(slow)
        assert (result.outcome, result.attempt.n) == (Outcome.COMPLETED, 1)
        assert result.timing.latency_s > POLL_S
        report = (await client.switch("qwen", hold=0)).switch
        assert report is not None
        assert report.ms > 1000 * POLL_S
        await client.chat(model="qwen", messages=HELLO, max_tokens=1)
        assert len(before) == 1
        assert await members(bus, settings.worker.group_id) == before
    await delete_topics(settings)


@asynccontextmanager
async def stuck_worker(settings: Settings, **given: object) -> AsyncIterator[psutil.Process]:
    """A worker in a process of its own whose engine never comes to an end."""
    values = {
        "bootstrap_servers": settings.kafka.bootstrap_servers,
        "topic_prefix": settings.topics.topic_prefix,
        "group_id": settings.worker.group_id,
        "presence_interval_s": 0.5,
        "log_level": "warning",
        **given,
    }
    options = [f"--set={name}={value}" for name, value in values.items()]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GEARSHIFT_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.fake_worker", "--aliases=llama", "--step-s=3600", *options, env=clean
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        await process.wait()


async def fill(settings: Settings, count: int) -> None:
    """Write requests as fast as it goes, evenly into all partitions."""
    value = json.dumps({"model": "llama", "messages": HELLO}).encode()
    topic, partitions = settings.topics.named("requests"), settings.topics.request_partitions
    async with AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers, max_batch_size=1 << 20) as producer:
        left, number = count, 0
        while left:
            batch = producer.create_batch()
            for _ in range(min(2500, left)):
                assert batch.append(key=None, value=value, timestamp=None) is not None
            left -= batch.record_count()
            await (await producer.send_batch(batch, topic, partition=number % partitions))
            number += 1


async def memory_with(bootstrap: str, waiting: int, *, held: int) -> float:
    """Megabytes of a worker that holds as much as it may while so many wait."""
    settings = settings_for(bootstrap)
    async with stuck_worker(settings, max_waiting=held, shutdown_timeout_s=0) as process:
        async with Client(settings=settings) as client:

            async def presence() -> tuple[int, float]:
                found = await client.presences()
                held = sum(queue.waiting + queue.running for one in found for queue in one.queues.values())
                return held, max((one.at for one in found), default=0.0)

            async def is_there() -> bool:
                return (await presence())[1] > 0

            await until(is_there)
            await fill(settings, waiting)

            async def is_full() -> bool:
                return (await presence())[0] == held

            await until(is_full)
            _, full_at = await presence()

            async def has_settled() -> bool:
                return (await presence())[1] > full_at + 5

            await until(has_settled)
        megabytes = process.memory_info().rss / 1e6
    await delete_topics(settings)
    return megabytes


@pytest.mark.long
async def test_a_million_waiting_requests_take_no_more_memory_than_a_thousand(bootstrap: str) -> None:
    thousand = await memory_with(bootstrap, 1000, held=1000)
    million = await memory_with(bootstrap, 1_000_000, held=1000)
    print(f"a thousand waiting: {thousand:.0f} MB; a million: {million:.0f} MB")
    assert million < 1.1 * thousand
