"""``python -m tests.bench.partitions``: a worker with hundreds of partitions, with one transactional producer for each,
or with one for all of them whose commits the group's generation fences (KIP-447).

Each way is a process of its own and takes over the same number of partitions: fence, read the ledgers, then commit
each ledger once with one result. ``per_partition`` is what the worker does, by its own classes. ``per_worker`` is the
least that would do: one producer, one OffsetFetch, and TxnOffsetCommit version 3, which aiokafka lacks and which is
written here. Connections and memory are those of the process beyond what it had before.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code
from aiokafka.producer.sender import Sender, TxnOffsetCommitHandler
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields
from aiokafka.structs import OffsetAndMetadata

from deploy.local.broker import find_broker
from schemas.base import Outgoing
from service import settings as settings_module
from service.consumer.committed import CommittedLedgers, commits_of
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions
from service.settings import Settings

WAYS = ("per_partition", "per_worker")
AT_ONCE = 32


class TxnOffsetCommitResponse_v3(Response):
    API_KEY = 28
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                ("partitions", CompactArray(("partition", Int32), ("error_code", Int16), ("tags", TaggedFields))),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class TxnOffsetCommitRequest_v3(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 28
    API_VERSION = 3
    RESPONSE_TYPE = TxnOffsetCommitResponse_v3
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("group_id", CompactString("utf-8")),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", CompactString("utf-8")),
        ("group_instance_id", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class TxnOffsetCommit(Request[TxnOffsetCommitRequest_v3]):
    """Offsets in a transaction, refused by the group's coordinator where the generation is not the current one."""

    API_KEY = 28

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, version: type[RequestStruct]) -> RequestStruct:
        return version(*self._fields, {})


class GenerationHandler(TxnOffsetCommitHandler):
    """aiokafka's handler with the member's place in its group."""

    def __init__(self, sender: Sender, offsets: Any, group: str, member: tuple[int, str, str | None]) -> None:
        super().__init__(sender, offsets, group)
        self._member = member

    def create_request(self) -> TxnOffsetCommit:
        txn = self._sender._txn_manager
        topics: dict[str, list[Any]] = defaultdict(list)
        for tp, commit in sorted(self._offsets.items()):
            topics[tp.topic].append((tp.partition, commit.offset, -1, commit.metadata, {}))
        told = [(topic, partitions, {}) for topic, partitions in topics.items()]
        ids = txn.transactional_id, self._group_id, txn.producer_id, txn.producer_epoch
        return TxnOffsetCommit(*ids, *self._member, told)

    def handle_response(self, response: Any) -> float | None:
        for topic, partitions, _ in response.topics:
            for number, code, _ in partitions:
                if code:
                    error = for_code(code)
                    self._sender._txn_manager.error_transaction(error())
                    return None
                tp = TopicPartition(topic, number)
                self._sender._txn_manager.offset_committed(tp, self._offsets[tp].offset, self._group_id)
        return None


def fenced_by_generation(producer: AIOKafkaProducer, member: tuple[int, str, str | None]) -> None:
    """Let a producer commit offsets as this member of the group."""
    sender = producer._sender

    async def commit(offsets: Any, group: str) -> None:
        if offsets:
            node = await sender._find_coordinator(1, group)
            await GenerationHandler(sender, offsets, group, member).do(node)

    sender._do_txn_offset_commit = commit


class Watch:
    """What the process has grown by since this was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._connections, self._rss = self._now()
        self._began = time.perf_counter()
        self._cpu = time.process_time()

    def _now(self) -> tuple[int, int]:
        established = [one for one in self._process.net_connections() if one.status == psutil.CONN_ESTABLISHED]
        return len(established), self._process.memory_info().rss

    def figures(self, way: str) -> dict[str, float]:
        connections, rss = self._now()
        return {
            f"{way}_takeover_s": time.perf_counter() - self._began,
            f"{way}_takeover_cpu_s": time.process_time() - self._cpu,
            f"{way}_connections": connections - self._connections,
            f"{way}_memory_mib": (rss - self._rss) / 2**20,
        }


async def per_partition(settings: Settings, partitions: Sequence[TopicPartition]) -> dict[str, float]:
    """As ``LedgerWriter.run`` takes each over."""
    memory = LedgersTopic(settings=settings)
    ledgers = CommittedLedgers(settings=settings, ledgers_topic=memory)
    await ledgers.open()
    at_once = asyncio.Semaphore(AT_ONCE)
    await commits_of(ledgers._admin, settings.worker.group_id, partitions[:1])
    watch = Watch()
    writers = {
        tp: PartitionTransactions(settings=settings, partition=tp, ledgers_topic=memory, at_once=at_once)
        for tp in partitions
    }

    async def take_over(tp: TopicPartition, writer: PartitionTransactions) -> None:
        await writer.fence()
        await ledgers.ledger(tp)

    await asyncio.gather(*(take_over(tp, writer) for tp, writer in writers.items()))
    figures = watch.figures("per_partition")
    results = settings.topics.named(settings.topics.results)
    began = time.perf_counter()
    record = Outgoing(topic=results, key=b"k", value=b"{}")
    commits = (writer.commit([record], 1, "gs1.") for writer in writers.values())
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    figures["per_partition_commit_s"] = time.perf_counter() - began
    figures["per_partition_commits_too_late"] = sum(isinstance(one, OutcomeUnknown) for one in outcomes)
    await asyncio.gather(*(writer.close() for writer in writers.values()))
    await ledgers.close()
    return figures


async def per_worker(settings: Settings, partitions: Sequence[TopicPartition]) -> dict[str, float]:
    """One producer, whose offsets the coordinator takes from the group's current generation only."""
    bootstrap, group = settings.kafka.bootstrap_servers, settings.worker.group_id
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    consumer = AIOKafkaConsumer(
        partitions[0].topic, bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False
    )
    await consumer.start()
    coordinator = consumer._coordinator
    watch = Watch()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{group}/worker", retry_backoff_ms=5)
    await producer.start()
    await commits_of(admin, group, partitions)
    figures = watch.figures("per_worker")
    member = coordinator.generation, coordinator.member_id, None
    fenced_by_generation(producer, member)
    results = settings.topics.named(settings.topics.results)
    offsets = dict.fromkeys(partitions, OffsetAndMetadata(1, "gs1."))
    began = time.perf_counter()
    async with producer.transaction():
        sent = [await producer.send(results, b"{}", key=b"k") for _ in partitions]
        await producer.send_offsets_to_transaction(offsets, group)
        await asyncio.gather(*sent)
    figures["per_worker_commit_s"] = time.perf_counter() - began
    fenced_by_generation(producer, (coordinator.generation - 1, *member[1:]))
    figures["per_worker_refuses_an_old_generation"] = float(await _is_refused(producer, offsets, group))
    await producer.stop()
    await consumer.stop()
    await admin.close()
    return figures


async def _is_refused(producer: AIOKafkaProducer, offsets: Any, group: str) -> bool:
    try:
        async with producer.transaction():
            await producer.send_offsets_to_transaction(offsets, group)
    except KafkaError as error:
        print(f"refused: {error!r}", file=sys.stderr)
        return True
    return False


async def measure(way: str, bootstrap: str, count: int) -> dict[str, float]:
    prefix = f"bench-{uuid.uuid4().hex[:8]}-"
    settings = settings_module.load(bootstrap_servers=bootstrap, topic_prefix=prefix, group_id=prefix)
    topics = settings.topics
    requests = topics.named(topics.requests)
    names = [requests, topics.named(topics.results), topics.named(topics.ledgers)]
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(name, count if name == requests else 1, 1) for name in names])
    try:
        partitions = [TopicPartition(requests, number) for number in range(count)]
        async with AIOKafkaConsumer(requests, bootstrap_servers=bootstrap, group_id=f"{prefix}warm"):
            pass  # a broker that is new makes its topic of offsets at the first group
        return await {"per_partition": per_partition, "per_worker": per_worker}[way](settings, partitions)
    finally:
        await admin.delete_topics(names)
        await admin.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--bootstrap", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.way:
        print(json.dumps(asyncio.run(measure(given.way, given.bootstrap, given.partitions))))
        return
    figures: dict[str, float] = {"partitions": given.partitions}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GEARSHIFT_")}
    with find_broker() as broker:
        for way in WAYS:
            command = [sys.executable, "-m", "tests.bench.partitions", f"--way={way}"]
            command += [f"--bootstrap={broker.bootstrap}", f"--partitions={given.partitions}"]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            figures |= json.loads(done.stdout.splitlines()[-1])
    for name, value in figures.items():
        print(f"{name:40}{value:12.2f}")
    if given.json:
        given.json.write_text(json.dumps({"figures": figures}, indent=2))


if __name__ == "__main__":
    main()
