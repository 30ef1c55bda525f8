"""Where answers come in when clients are many: one partition of a topic each, and nothing that others may forge."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer

from schemas.base import Origin, Record
from schemas.codec import decode_result, encode_result, kind_of
from schemas.results import Outcome, Result, Timing
from service.client import Client, NoAnswer, RequestFailed, TopicError
from service.client.ids import place_of
from service.client.inbox import LOOKED_THROUGH
from service.kafka.reader import TopicReader
from service.settings import Settings
from tests.support.bus import Bus, until
from tests.support.pool import delete_topics, serving, settings_for
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker

ASKED = {"model": "llama", "prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
async def pool(bootstrap: str) -> AsyncIterator[Settings]:
    """A worker that makes a token in 2 ms, whose clients may have reply topics."""
    settings = settings_for(bootstrap, reply_topics="*", result_partitions=6, request_partitions=1)
    async with serving(settings, step_s=0.002):
        yield settings
    await delete_topics(settings)


async def records_of(settings: Settings, topic: str) -> list[Record]:
    async with TopicReader(kafka=settings.kafka, topics=[topic]) as reader:
        return [record async for record in reader.backlog()]


async def write(settings: Settings, body: dict, headers: dict[str, str], topic: str = "requests") -> None:
    """A request as a stranger writes it."""
    pairs = [(name, value.encode()) for name, value in headers.items()]
    async with AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers) as stranger:
        await stranger.send_and_wait(settings.topics.named(topic), json.dumps(body).encode(), headers=pairs)


async def found(settings: Settings, id_: str) -> Record:
    """The one result of an id, in the topic of all."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for record in await records_of(settings, settings.topics.named(settings.topics.results)):
                if record.key == id_.encode():
                    return record


async def test_a_client_reads_one_partition_of_the_results_and_chunks_of_all(pool: Settings):
    results, chunks = pool.topics.named(pool.topics.results), pool.topics.named(pool.topics.chunks)
    async with Client(settings=pool) as one, Client(settings=pool) as others:
        await one.complete(**ASKED)
        before = {topic: Counter(r.partition for r in await records_of(pool, topic)) for topic in (results, chunks)}
        read = one.traffic.records
        named = [others.complete(**ASKED, request_id=f"{pool.worker.group_id}-{n}") for n in range(60)]
        await asyncio.gather(*named)
        ids = [await one.submit({**ASKED, "stream": True}) for _ in range(5)]
        for id_ in ids:
            await one.result(id_)
        pieces = [piece async for piece in one.stream(**ASKED)]
    assert len(pieces) >= 3
    written = await records_of(pool, results)
    ours = {record.partition for record in written if (record.key or b"").decode() in ids}
    assert len(ours) == 1
    (home,) = ours
    here = sum(record.partition == home for record in written) - before[results][home]
    heard = here + sum(record.partition == home for record in await records_of(pool, chunks))
    assert 6 <= one.traffic.records - read <= heard < len(written)


async def test_clients_that_share_a_reply_topic_read_a_partition_each_with_their_chunks_and_nothing_else(
    pool: Settings,
):
    topic = f"{pool.topics.topic_prefix}replies"
    clients = [Client(settings=pool, reply_topic=topic, reply_partition=n) for n in (1, 4)]
    async with clients[0], clients[1]:
        before = len(await records_of(pool, pool.topics.named(pool.topics.results)))
        streams = [client.stream(**ASKED) for client in clients for _ in range(5)]

        async def text(stream) -> str:
            return "".join([piece.choices[0].text async for piece in stream])

        assert await asyncio.gather(*map(text, streams)) == ["llama0 llama1 llama2 "] * 10
        assert (await clients[1].complete(**ASKED)).choices[0].text == "llama0 llama1 llama2 "
        with pytest.raises(RequestFailed):
            await clients[0].complete(**{**ASKED, "model": "lama"})
        written = await records_of(pool, topic)
        assert {record.partition for record in written} == {1, 4}
        assert {kind_of(record) for record in written} == {"result", "chunk"}
        per = Counter(record.partition for record in written)
        await until(lambda: (clients[0].traffic.records, clients[1].traffic.records) == (per[1], per[4]))
        assert len(await records_of(pool, pool.topics.named(pool.topics.results))) == before


async def test_a_reply_partition_that_is_not_there_is_the_clients_error(pool: Settings):
    topic = f"{pool.topics.topic_prefix}replies-few"
    beyond = pool.topics.reply_partitions
    async with Client(settings=pool, reply_topic=topic, reply_partition=beyond) as client:
        with pytest.raises(TopicError, match=f"no partition {beyond}"):
            await client.complete(**ASKED)


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"reply-to": "{}nowhere"}, "no such topic"),
        ({"reply-to": "{}nowhere", "reply-partition": "3"}, "no such topic"),
        ({"reply-to": "{}results", "reply-partition": "4000"}, "no such topic or partition"),
    ],
)
async def test_what_has_no_place_is_answered_in_the_topic_of_all_and_no_partition_is_fenced_for_it(
    pool: Settings, headers: dict[str, str], says: str
):
    headers = {name: value.format(pool.topics.topic_prefix) for name, value in headers.items()}
    async with Client(settings=pool) as client:
        before = await client.result(await client.submit(ASKED))
        id_ = f"nowhere-{abs(hash(str(headers)))}"
        await write(pool, ASKED, {"ce_id": id_, **headers})
        record = await found(pool, id_)
        assert decode_result(record).outcome is Outcome.COMPLETED
        assert says in dict(record.headers)["reply-failed"].decode()
        await write(pool, ASKED, {"ce_id": f"{id_}-after"})
        after = decode_result(await found(pool, f"{id_}-after"))
    assert before.outcome is Outcome.COMPLETED
    assert after.attempt.epoch == decode_result(record).attempt.epoch, "nobody took the partition over again"


async def test_a_reply_partition_that_is_no_number_is_refused(pool: Settings):
    await write(pool, ASKED, {"ce_id": "no-number", "reply-to": pool.topics.named("results"), "reply-partition": "x"})
    result = decode_result(await found(pool, "no-number"))
    assert (result.status, result.error and result.error.param) == (400, "reply-partition")


@pytest.mark.parametrize(
    "own", ["control", "requests", "requests.qwen", "chunks", "workers", "ledgers", "dead-letters"]
)
async def test_the_pools_own_topics_are_no_reply_topics_though_all_are_allowed(pool: Settings, own: str):
    id_ = f"into-{own}"
    await write(pool, ASKED, {"ce_id": id_, "reply-to": pool.topics.named(own)})
    result = decode_result(await found(pool, id_))
    assert (result.status, result.error and result.error.param) == (400, "reply-to")


async def test_an_answer_to_somebody_elses_record_under_our_id_is_not_ours(pool: Settings):
    async with Client(settings=pool) as client:
        id_ = await client.submit({**ASKED, "max_tokens": 700})
        await write(pool, {"model": "llama", "prompt": "forged", "max_tokens": 1}, {"ce_id": id_})
        result = await client.result(id_)
        origins = {
            decode_result(r).origin
            for r in await records_of(pool, pool.topics.named("results"))
            if r.key == id_.encode()
        }
    assert result.body is not None
    assert result.body["usage"]["completion_tokens"] == 700
    assert client.traffic.not_ours == len(origins) - 1 == 1


async def test_a_stream_has_no_piece_of_a_request_that_somebody_else_wrote_under_its_id(pool: Settings):
    async with Client(settings=pool) as client:
        pieces: list[str] = []
        stream = client.stream(model="llama", prompt="hello", max_tokens=300)
        async for piece in stream:
            if not pieces:
                forged = {"model": "qwen", "prompt": "forged", "max_tokens": 5, "stream": True}
                await write(pool, forged, {"ce_id": stream.request_id or ""})
            pieces.append(piece.choices[0].text)
    assert "".join(pieces) == "".join(f"llama{n} " for n in range(300))


async def fill(producer: AIOKafkaProducer, topic: str, partition: int, count: int) -> None:
    """Write so many records that nobody asked for, a batch at a time."""
    written = 0
    while written < count:
        batch = producer.create_batch()
        while written < count and batch.append(key=b"%d" % written, value=b"{}", timestamp=None):
            written += 1
        await (await producer.send_batch(batch, topic, partition=partition))


async def test_an_unknown_id_is_looked_for_in_its_partition_only_and_among_a_bounded_number(bus: Bus):
    unknown, old = "never-asked", "asked-long-ago"
    place, elsewhere = place_of(unknown, 3), (place_of(unknown, 3) + 1) % 3
    while place_of(old, 3) != place:
        old += "x"
    result = Result(
        id=old,
        origin=Origin(topic=bus.requests, partition=0, offset=0),
        outcome=Outcome.COMPLETED,
        status=200,
        timing=Timing(received=1, finished=2),
    )
    began, noise = time.time(), 3_000
    async with AIOKafkaProducer(bootstrap_servers=bus.bootstrap, linger_ms=5) as producer:
        record = encode_result(bus.results, result)
        await producer.send_and_wait(bus.results, record.value, record.key, place, headers=list(record.headers))
        await fill(producer, bus.results, place, LOOKED_THROUGH + noise)
        await fill(producer, bus.results, elsewhere, noise)
    async with Client(settings=bus.all_settings()) as client:
        asking = asyncio.create_task(client.result(unknown, timeout_s=PATIENCE_S))
        await until(lambda: asking.done() or client.traffic.records >= LOOKED_THROUGH)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(NoAnswer):
            await client.result(unknown, timeout_s=1, since=time.time() + 3600)
        assert client.traffic.records == LOOKED_THROUGH
        assert await client.result(old, timeout_s=PATIENCE_S, since=began - 60) == result
        assert client.traffic.records == LOOKED_THROUGH + 1
