"""The same through a worker on the real broker, as batches of bytes: header names of any bytes, and bombs among them.

``pytest tests/fuzz -m "long or not long"`` writes 5,000 records to each topic.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from deploy.local.broker import Broker
from schemas.base import Origin
from service.client import Client
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.fuzz.records import raw_records
from tests.support.batches import CODECS, Raw, batch, bomb, content_of, produce
from tests.support.hostile import CHAT, OTHER_TOPICS
from tests.support.pool import delete_topics, settings_for
from tests.support.process import working

pytestmark = pytest.mark.broker
BATCH, BOUND = 20, 1 << 20
COMPACTED = frozenset({"control", "workers", "ledgers", "progress", "files", "batches"})
LONG = [pytest.mark.long, pytest.mark.timeout(3000)]
counts = pytest.mark.parametrize("count", [15, pytest.param(5_000, marks=LONG)])


@pytest.fixture
async def corner(broker: Broker) -> AsyncIterator[Settings]:
    found = settings_for(broker.bootstrap, max_batch_bytes=BOUND, result_partitions=1)
    await ensure_topics(found, ["llama", "qwen"])
    yield found
    await delete_topics(found)


def drawn(count: int, *, keyed: bool) -> list[bytes]:
    """Batches of so many records, the same ones each time, by every codec in turn; one in five is a bomb beside."""
    found: list[Raw] = []
    keys = {"keys": st.binary(min_size=1, max_size=6)} if keyed else {}

    @seed(7)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(raw_records(**keys))
    def draw(record: Raw) -> None:
        found.append(record)

    draw()
    codecs, packed = sorted(CODECS), []
    for number, first in enumerate(range(0, len(found), BATCH)):
        some, codec = found[first : first + BATCH], codecs[number % len(codecs)]
        packed.append(batch(content_of(some), len(some), codec=CODECS[codec]))
        if codec != "none" and number % 5 == 1:
            packed.append(bomb(3 * BOUND, codec))
    return packed


async def write(corner: Settings, topic: str, batches: list[bytes]) -> None:
    for raw in batches:
        await produce(corner.kafka.bootstrap_servers, topic, 0, raw)


@counts
@pytest.mark.parametrize("alias", [None, "llama"], ids=["requests", "requests.ALIAS"])
async def test_each_record_of_a_topic_of_requests_has_one_result_and_the_worker_lives(corner, alias, count):
    topics = corner.topics
    topic = topics.named(topics.requests) if alias is None else topics.for_alias(alias)
    small = {"max_batch_bytes": BOUND, "result_partitions": 1, "retry_backoff_s": 0.001}
    async with working(corner, **small) as worker, Client(settings=corner) as client:
        before = worker.pid
        await write(corner, topic, drawn(count, keyed=False))
        last = await produce(corner.kafka.bootstrap_servers, topic, 0, batch(content_of([Raw(CHAT)]), 1))
        found: Counter[Origin] = Counter()
        outcomes: Counter[str] = Counter()
        async with asyncio.timeout(60 + count / 5):
            async for result in client.results(past=True):
                found[result.origin] += 1
                outcomes[result.failure or result.outcome] += 1
                if len(found) > last.offset:
                    break
        print(topic, last.offset + 1, dict(outcomes))
        assert set(found.values()) == {1}
        assert {origin.offset for origin in found} == set(range(last.offset + 1))
        assert outcomes["malformed"] > 0
        assert worker.pid == before


@counts
async def test_the_other_topics_may_hold_anything(corner, count):
    topics = corner.topics
    small = {"max_batch_bytes": BOUND, "result_partitions": 1}
    async with working(corner, **small) as worker, Client(settings=corner) as client:
        before = worker.pid
        for name in OTHER_TOPICS:
            await write(corner, topics.named(getattr(topics, name)), drawn(count, keyed=name in COMPACTED))
        for alias in ("llama", "qwen"):
            assert await client.call("/v1/completions", model=alias, prompt="hello", max_tokens=2)
        assert (await client.switch("qwen", timeout_s=120)).model == "qwen"
        assert worker.pid == before
    async with working(corner, **small, worker_id="two") as second, Client(settings=corner) as client:
        assert await client.call("/v1/completions", model="llama", prompt="hello", max_tokens=2)
        assert second.pid != before
