"""Nothing that is written to any topic ends a worker: each record is answered, and what can't be read is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from schemas.base import Origin
from schemas.results import Outcome, Result
from service.client import Client
from service.kafka.dead_letters import dead_letters
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.support.batches import Raw, of, produce
from tests.support.bus import until
from tests.support.hostile import CHAT, OTHER_TOPICS, batches
from tests.support.pool import delete_topics, settings_for
from tests.support.process import working
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker
BOUND = 4 << 20
"""The bound on what a batch may inflate to in these tests; a bomb has ten times as much."""
ALIASES = ["llama", "qwen"]
SMALL = {"max_batch_bytes": BOUND, "result_partitions": 1, "presence_interval_s": 0.5}


@pytest.fixture
async def corner(bootstrap) -> AsyncIterator[Settings]:
    settings = settings_for(bootstrap, max_batch_bytes=BOUND, result_partitions=1)
    await ensure_topics(settings, ALIASES)
    yield settings
    await delete_topics(settings)


async def results_of(client: Client, origins: set[Origin]) -> dict[Origin, Result]:
    """One result for each of these origins, and no second one."""
    found: dict[Origin, Result] = {}
    async with asyncio.timeout(PATIENCE_S):
        async for result in client.results(past=True):
            assert result.origin not in found, f"{result.origin} has a second result"
            if result.origin in origins:
                found[result.origin] = result
            if found.keys() == origins:
                return found
    raise AssertionError


async def test_a_hundred_records_with_a_null_header_in_a_row_leave_the_worker_as_it_is(corner):
    topic = corner.topics.named(corner.topics.requests)
    async with working(corner, **SMALL) as worker, Client(settings=corner) as client:
        before = worker.pid
        async with AIOKafkaProducer(bootstrap_servers=corner.kafka.bootstrap_servers) as producer:
            values = [CHAT if n % 2 else b"" for n in range(100)]
            sent = [await producer.send_and_wait(topic, value, headers=[("x", None)]) for value in values]
        origins = {Origin(topic=one.topic, partition=one.partition, offset=one.offset) for one in sent}
        results = await results_of(client, origins)
        assert len(results) == 100
        assert {result.outcome for result in results.values()} == {Outcome.COMPLETED, Outcome.FAILED}
        assert worker.pid == before
        assert [presence.pid for presence in await client.presences()] == [before]


@pytest.mark.parametrize("of_model", [False, True], ids=["requests", "requests.ALIAS"])
async def test_whatever_is_written_as_a_request_is_answered_for_its_origin(corner, of_model):
    topics = corner.topics
    topic = topics.for_alias("llama") if of_model else topics.named(topics.requests)
    bootstrap = corner.kafka.bootstrap_servers
    async with working(corner, **SMALL) as worker, Client(settings=corner) as client:
        before, written = worker.pid, {}
        for name, raw in batches(inflated=10 * BOUND, key=None).items():
            written[name] = await produce(bootstrap, topic, 0, raw)
        last = await produce(bootstrap, topic, 0, of(Raw(CHAT, b"good")))
        origins = {Origin(topic=topic, partition=0, offset=offset) for offset in range(last.offset + 1)}
        results = await results_of(client, origins)
        assert worker.pid == before
        assert results[last].outcome is Outcome.COMPLETED
        check_each(written, results)
        letters = {letter.origin: letter for letter in await dead_letters(corner)}
        malformed = {str(origin) for origin, result in results.items() if result.failure == "malformed"}
        assert malformed <= letters.keys()
        bad = letters[str(written["header name that is not UTF-8"])]
        assert (bad.value, list(bad.headers)) == (CHAT, [("\\xff\\xfe", b"x")])
        told = [line for line in worker.said("record.unreadable") if line["topic"] == topic]
        assert {(line["partition"], line["offset"]) for line in told} >= {(0, written["zstd bomb"].offset)}
        statuses = [one async for one in client.statuses(past=True, follow=False) if one.kind == "record"]
        assert any(str(written["gzip bomb"]) in (status.reason or "") for status in statuses)


def check_each(written: dict[str, Origin], results: dict[Origin, Result]) -> None:
    """What became of each kind."""
    failures = {name: results[origin].failure for name, origin in written.items()}
    for name in (
        "null header",
        "null attributes",
        "forged marks",
        "long header name",
        "empty header name",
    ):
        assert results[written[name]].outcome is Outcome.COMPLETED, (name, results[written[name]].error)
    for name in ("long correlation id", "long id", "long model"):
        assert failures[name] == "invalid", name
        assert len(results[written[name]].model_dump_json()) < 2000
    for codec in ("gzip", "lz4", "snappy", "zstd"):
        assert failures[f"{codec} bomb"] == "malformed"
        assert "inflates" in results[written[f"{codec} bomb"]].error.message
    assert failures["header name that is not UTF-8"] == failures["many headers"] == "malformed"
    assert "are read at most" in results[written["many headers"]].error.message
    for name, bad in (("bad one of three", 1), ("bad one of three, compressed", 1), ("offsets beyond the batch", 1)):
        first = written[name]
        three = [results[replace(first, offset=first.offset + n)] for n in range(3)]
        assert [result.failure == "malformed" for result in three] == [n == bad for n in range(3)], name


async def test_whatever_is_written_to_the_other_topics_neither_ends_nor_misleads_anyone(corner):
    bootstrap, topics = corner.kafka.bootstrap_servers, corner.topics

    async def write_all() -> None:
        strange = batches(inflated=2 * BOUND).values()
        for name in OTHER_TOPICS:
            for raw in strange:
                await produce(bootstrap, topics.named(getattr(topics, name)), 0, raw)

    async with working(corner, **SMALL) as worker, Client(settings=corner) as client:
        before = worker.pid
        assert await client.call("/v1/completions", model="llama", prompt="hello", max_tokens=2)
        await write_all()
        switched = await client.switch("qwen", timeout_s=60)
        assert switched.model == "qwen"
        assert await client.call("/v1/completions", model="qwen", prompt="hello", max_tokens=2)
        assert worker.pid == before
        rejected = [one async for one in client.statuses(past=True, follow=False) if one.state == "rejected"]
        assert len(rejected) > 20
        assert all(len(status.model_dump_json()) < 2000 for status in rejected)
        assert await dead_letters(corner) is not None
    async with working(corner, **SMALL, worker_id="two") as second, Client(settings=corner) as client:
        assert await client.call("/v1/completions", model="llama", prompt="hello", max_tokens=2)
        await until(lambda: second.pid > 0)
        assert {presence.worker for presence in await client.presences()} >= {"two"}


async def test_results_of_a_topic_that_takes_two_kilobytes_all_come(corner):
    topics, bootstrap = corner.topics, corner.kafka.bootstrap_servers
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        small = ConfigResource(ConfigResourceType.TOPIC, topics.named(topics.results), {"max.message.bytes": "2048"})
        await admin.alter_configs([small])
    finally:
        await admin.close()
    requests = topics.named(topics.requests)
    async with working(corner, **SMALL) as worker, Client(settings=corner) as client:
        before = worker.pid
        await produce(bootstrap, requests, 0, batches(inflated=10)["long correlation id"])
        async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
            for header in (b"c" * 256, b"\x01" * 256, b'"' * 256):
                heads = [("correlation-id", header), ("ce_id", b"i" * 256), ("tenant", header)]
                long = json.dumps({**json.loads(CHAT), "max_tokens": 2000}).encode()
                for value in (CHAT, long, b"{}", b"[", None):
                    await producer.send_and_wait(requests, value, b"k", partition=0, headers=heads)
            await producer.send_and_wait(requests, CHAT, partition=0)
        results = await results_of(client, {Origin(topic=requests, partition=0, offset=n) for n in range(17)})
        assert {result.outcome for result in results.values()} == {Outcome.COMPLETED, Outcome.FAILED}
        assert worker.pid == before
