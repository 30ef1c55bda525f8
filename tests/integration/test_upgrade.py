"""A worker upgraded under load: the second starts, the first is told to go, and every request has its one result."""

import asyncio
from collections import Counter

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata

from schemas.results import Outcome, Result
from service.client import Client
from service.settings import Settings
from tests.support.bus import until
from tests.support.pool import delete_topics, settings_for
from tests.support.process import Process, options_of, started
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker

STEP = ("--step-s", "0.002")
AT_ONCE = 24


class Load:
    """Requests for both models, some of them streamed, a fixed number of them at any time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stop = asyncio.Event()
        self.sent: list[str] = []
        self.results: list[Result] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._one_after_another(number))

    def stop(self) -> None:
        self._stop.set()

    async def _one_after_another(self, number: int) -> None:
        while not self._stop.is_set():
            model = ("llama", "qwen")[number % 2]
            body = {"model": model, "prompt": "hello", "max_tokens": 20 + number, "stream": number % 3 == 0}
            id_ = await self._client.submit(body)
            self.sent.append(id_)
            self.results.append(await self._client.result(id_, timeout_s=PATIENCE_S))


async def test_a_worker_is_replaced_under_load_without_a_lost_or_repeated_result(bootstrap):
    settings: Settings = settings_for(bootstrap, request_partitions=4)
    common = options_of(settings, request_partitions=4, shutdown_timeout_s=30, max_wait_s=2)
    try:
        async with started(*common, "--set", "worker_id=old", *STEP) as old, Client(settings=settings) as client:
            await old.until("worker.ready")
            load = Load(client)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run())
                await until(lambda: len(load.results) > 50)
                async with started(*common, "--set", "worker_id=new", *STEP) as new:
                    reading = [asyncio.create_task(drained(each)) for each in (old, new)]
                    await until(lambda: any(result.worker == "new" for result in load.results))
                    old.process.terminate()
                    assert await old.process.wait() == 0
                    went = len(load.results)
                    await until(lambda: len(load.results) > went + 100)
                    load.stop()
                    await until(lambda: len(load.results) == len(load.sent))
                    new.process.terminate()
                    await asyncio.gather(*reading)
                    assert await new.process.wait() == 0
            published = Counter([result.id async for result in client.results(past=True, follow=False)])
        assert published == Counter(load.sent)
        assert {result.outcome for result in load.results} == {Outcome.COMPLETED}
        assert {result.worker for result in load.results} == {"old", "new"}
        for result in load.results:
            assert result.body is not None
            words = result.body["choices"][0]["text"].split()
            assert words == [f"{result.model}{n}" for n in range(len(words))]
    finally:
        await delete_topics(settings)


async def test_a_worker_leaves_what_a_later_version_has_committed_alone(bootstrap):
    settings: Settings = settings_for(bootstrap)
    common = options_of(settings, max_wait_s=2)
    where = TopicPartition(settings.topics.named("requests"), 0)
    theirs = OffsetAndMetadata(0, "gs2.AAAA")
    member = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=settings.worker.group_id, enable_auto_commit=False)
    try:
        async with started(*common, *STEP) as first:  # it makes the topics
            await first.until("worker.ready")
            first.process.terminate()
            assert await first.ended() == 0
        async with member, Client(settings=settings) as client:
            member.assign([where])
            await member.commit({where: theirs})
            for _ in range(4):
                await client.submit({"model": "llama", "prompt": "hello", "max_tokens": 4})
        async with started(*common, *STEP) as older:
            assert await older.ended() not in {0, None}
            assert "a ledger of version 2, not 1" in str(older.lines)
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        try:
            committed = await admin.list_consumer_group_offsets(settings.worker.group_id)
        finally:
            await admin.close()
        assert committed[where] == theirs
    finally:
        await delete_topics(settings)


async def drained(worker: Process) -> None:
    """Read what it logs to its end, so that it never waits for its reader."""
    await worker.process.stderr.read()
