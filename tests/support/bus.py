"""A corner of a real broker that belongs to one test: topics and a group of its own, and what is seen from outside."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata

from schemas.base import Origin, Record
from schemas.codec import decode_result
from schemas.requests import ReplyTo
from schemas.results import Outcome, Result, Timing
from service.consumer.committed import commits_of
from service.consumer.requests import RequestConsumer
from service.ports import Delivery, Settlement
from service.settings import (
    EngineSettings,
    HttpSettings,
    KafkaSettings,
    LogSettings,
    Settings,
    TopicSettings,
    WorkerSettings,
)
from tests.support.waiting import PATIENCE_S


@dataclass
class Bus:
    """Everything is named by a prefix, so that tests share a broker and nothing else."""

    bootstrap: str
    partitions: int = 4
    aliases: tuple[str, ...] = ()
    worker: dict[str, Any] = field(default_factory=dict)
    prefix: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:10]}-")

    @cached_property
    def kafka(self) -> KafkaSettings:
        return KafkaSettings(bootstrap_servers=self.bootstrap)

    @cached_property
    def topics(self) -> TopicSettings:
        replies = (f"{self.prefix}*",)
        return TopicSettings(topic_prefix=self.prefix, request_partitions=self.partitions, reply_topics=replies)

    @property
    def group(self) -> str:
        return f"{self.prefix}group"

    @property
    def requests(self) -> str:
        return self.topics.named(self.topics.requests)

    @property
    def results(self) -> str:
        return self.topics.named(self.topics.results)

    def settings(self, worker_id: str = "one", **worker: Any) -> WorkerSettings:
        values = {"session_timeout_s": 10.0, "rebalance_timeout_s": 20.0} | self.worker | worker
        return WorkerSettings(group_id=self.group, worker_id=f"{self.prefix}{worker_id}", **values)

    def all_settings(self, worker_id: str = "one", **worker: Any) -> Settings:
        return Settings(
            kafka=self.kafka,
            topics=self.topics,
            worker=self.settings(worker_id, **worker),
            engine=EngineSettings(),
            log=LogSettings(),
            http=HttpSettings(),
        )

    def intake(self, worker_id: str = "one", **worker: Any) -> RequestConsumer:
        return RequestConsumer(settings=self.all_settings(worker_id, **worker), aliases=self.aliases)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        client = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await client.start()
        try:
            yield client
        finally:
            await client.close()

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic, and wait until the broker knows no more of it: until then it takes records."""
        async with self.admin() as admin, asyncio.timeout(PATIENCE_S):
            await admin.delete_topics([topic])
            while topic in await admin.list_topics():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

    async def create(self, *extra: NewTopic) -> "Bus":
        brokers_time = {"message.timestamp.type": "LogAppendTime"}
        names = [self.requests, self.topics.named(self.topics.throttled), *map(self.topics.for_alias, self.aliases)]
        requests = [NewTopic(name, self.partitions, 1, topic_configs=brokers_time) for name in names]
        kept = map(self.topics.named, (self.topics.ledgers, self.topics.progress))
        compacted = [NewTopic(name, 1, 1, topic_configs={"cleanup.policy": "compact"}) for name in kept]
        results = NewTopic(self.results, 3, 1)
        async with self.admin() as admin:
            wanted = [*requests, results, *compacted, *extra]
            await admin.create_topics(wanted)

            async def known() -> bool:
                """A broker acknowledges topics before it tells of them."""
                return not any(told["error_code"] for told in await admin.describe_topics([one.name for one in wanted]))

            await until(known)
        return self

    async def delete(self) -> None:
        async with self.admin() as admin:
            names = [name for name in await admin.list_topics() if name.startswith(self.prefix)]
            if names:
                await admin.delete_topics(names)

    async def produce(
        self, *values: str | bytes, topic: str | None = None, partition: int | None = None, transactional: bool = False
    ) -> list[Origin]:
        """Write values, and say where they went."""
        own = {"transactional_id": f"{self.prefix}producer"} if transactional else {}
        async with AIOKafkaProducer(bootstrap_servers=self.bootstrap, max_request_size=16 << 20, **own) as producer:
            if transactional:
                await producer.begin_transaction()
            sent = [
                await producer.send(
                    topic or self.requests, value if isinstance(value, bytes) else value.encode(), partition=partition
                )
                for value in values
            ]
            acknowledged = await asyncio.gather(*sent)
            if transactional:
                await producer.commit_transaction()
        return [Origin(topic=one.topic, partition=one.partition, offset=one.offset) for one in acknowledged]

    def result(
        self,
        delivery: Delivery,
        *,
        worker: str = "",
        reply_to: str | None = None,
        partition: int | None = None,
        body: dict[str, Any] | None = None,
    ) -> Settlement:
        """A settlement whose result says which record it answers."""
        origin = delivery.record.origin
        result = Result(
            id=str(origin),
            origin=origin,
            outcome=Outcome.COMPLETED,
            status=200,
            body=body,
            timing=Timing(received=0, finished=0),
            worker=worker,
        )
        return Settlement(result, reply=reply_to and ReplyTo(reply_to, partition))

    async def committed(
        self, partition: int = 0, topic: str | None = None, *, at_once: bool = False
    ) -> OffsetAndMetadata:
        """Where the group stands, behind transactions that are ending; ``at_once``: as aiokafka asks, before them."""
        async with self.admin() as admin:
            where = TopicPartition(topic or self.requests, partition)
            if at_once:
                return (await admin.list_consumer_group_offsets(self.group, partitions=[where]))[where]
            return (await commits_of(admin, self.group, [where]))[where] or OffsetAndMetadata(-1, "")

    async def forget_before(self, offset: int, partition: int = 0, topic: str | None = None) -> None:
        """Let retention take what is older."""
        async with self.admin() as admin:
            await admin.delete_records({TopicPartition(topic or self.requests, partition): RecordsToDelete(offset)})

    async def forget_offsets(self) -> None:
        """What a broker does to the offsets of a group without members, after a week."""
        async with self.admin() as admin:
            node = await admin.find_coordinator(self.group)
            answer = await admin._send_request_to_node(node, DeleteGroupsRequest([self.group]))
            ((_, code),) = answer.results
            assert code == 0, f"error {code}"

    async def grow(self, partitions: int) -> None:
        """Add partitions to the topic of requests."""
        async with self.admin() as admin:
            await admin.create_partitions({self.requests: NewPartitions(partitions)})

    async def read(self, topic: str | None = None, *, isolation: str = "read_committed") -> list[ConsumerRecord]:
        """All that is in a topic up to its present end; what was committed a moment ago may still lack its marker."""
        topic = topic or self.results
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap, isolation_level=isolation, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            partitions = [TopicPartition(topic, p) for p in await consumer._client._wait_on_metadata(topic)]
            consumer.assign(partitions)
            async with AIOKafkaConsumer(bootstrap_servers=self.bootstrap) as uncommitted:
                ends = await uncommitted.end_offsets(partitions)
            records: list[ConsumerRecord] = []
            while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    records.extend(batch)
            return records
        finally:
            await consumer.stop()

    async def answered(self) -> Counter[str]:
        """How many results a read_committed consumer sees, per origin."""
        return Counter(str(result.origin) for result in await self.read_results())

    async def read_results(self) -> list[Result]:
        """The results that a read_committed consumer sees."""
        return [
            decode_result(Record(one.topic, one.partition, one.offset, 0.0, one.key, one.value, one.headers))
            for one in await self.read()
        ]


async def deliveries(intake: RequestConsumer, count: int, *, within_s: float = PATIENCE_S) -> list[Delivery]:
    """Read until ``count`` deliveries have come. Where they do not, says where reading stands."""
    got: list[Delivery] = []
    try:
        async with asyncio.timeout(within_s):
            while len(got) < count:
                got.extend((await intake.receive()).deliveries)
    except TimeoutError:
        raise AssertionError(f"{len(got)} of {count} came in {within_s:g} s: {standing(intake)}") from None
    return got


def standing(intake: RequestConsumer) -> str:
    """Where each partition stands, here and with the look through what is parked."""
    polling, scan = intake._polling, intake._parked_scan
    writers = {
        f"{tp.topic}/{tp.partition}": (one.ready, one.ledger.position, len(one.ledger.pending))
        for tp, one in intake._owned.writers.items()
    }
    shelves = [(tp, one.looked_to, one.placed, one.moments[:3], one.horizon) for tp, one in scan._shelves.items()]
    return (
        f"writers {writers}, paused {polling.paused}, assigned {set(intake._consumer.assignment())}, "
        f"poll {polling._poll}, shelves {shelves}, again {scan._wanted}, {intake.state()}"
    )


async def until(condition: Callable[[], Awaitable[bool] | bool], *, within_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds, looking again every few milliseconds."""
    async with asyncio.timeout(within_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(0.02)


class Member:
    """A worker in miniature: reads and settles until it is told to stop, and remembers what it did."""

    def __init__(self, bus: Bus, worker_id: str, **worker: Any) -> None:
        self._bus = bus
        self.intake = bus.intake(worker_id, **worker)
        self.settled: list[Origin] = []
        self.refused: list[Origin] = []
        self.lost: set[Origin] = set()
        self.attempts: dict[Origin, int] = {}
        """The number of the latest attempt at each request that was delivered here."""
        self._stop = asyncio.Event()
        self.hold: Callable[[Delivery], Awaitable[None]] | None = None
        """What a delivery waits for before it is settled."""

    async def run(self) -> None:
        async with self.intake, asyncio.TaskGroup() as tasks:
            while not self._stop.is_set():
                received = await self.intake.receive()
                self.lost |= received.lost
                for delivery in received.deliveries:
                    assert delivery.record.origin not in self.attempts.keys() - self.lost
                    self.attempts[delivery.record.origin] = delivery.attempt.n
                    tasks.create_task(self._settle(delivery))
            await self.intake.stop()

    def stop(self) -> None:
        self._stop.set()

    async def _settle(self, delivery: Delivery) -> None:
        await self.intake.started(delivery.record.origin)
        if self.hold is not None:
            await self.hold(delivery)
        committed = await self.intake.settle(delivery.record.origin, self._bus.result(delivery))
        (self.settled if committed else self.refused).append(delivery.record.origin)
