"""Reading topics as a stranger does: committed records only, without a group, and past what strangers wrote by hand."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch

from tests.chaos.mark import is_marked, last_offset

_FETCH_BYTES = 32 << 20
_AGAIN_S = 0.2
_COMMITTED = 1
_LOG_OVERHEAD = struct.calcsize(">qi")


@dataclass(frozen=True, slots=True)
class Read:
    """A record as it was read; ``at`` is its timestamp, in seconds since the epoch."""

    partition: int
    offset: int
    at: float
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Tail:
    """All partitions of a topic from their beginning. ``more`` gives what came since; brokers may come and go."""

    def __init__(self, client: AIOKafkaClient, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._next: dict[int, int] = {}
        self._ended: dict[int, bool] = {}

    @property
    def ended(self) -> bool:
        """Whether everything was read that is there, with no transaction open before it."""
        return bool(self._ended) and all(self._ended.values())

    async def more(self) -> list[Read]:
        """What was committed since the last call; empty where nothing was, or where a broker does not answer."""
        try:
            return await self._fetch()
        except (KafkaError, OSError, TimeoutError):
            await asyncio.sleep(_AGAIN_S)
            await self._client.force_metadata_update()
            return []

    async def _fetch(self) -> list[Read]:
        found: list[Read] = []
        by_leader: dict[int, list[tuple[int, int, int]]] = {}
        cluster = self._client.cluster
        for partition in cluster.partitions_for_topic(self._topic) or ():
            leader = cluster.leader_for_partition(TopicPartition(self._topic, partition))
            if leader in {None, -1}:
                raise KafkaError(f"nobody leads {self._topic}/{partition}")
            self._ended.setdefault(partition, False)
            by_leader.setdefault(leader, []).append((partition, self._next.setdefault(partition, 0), _FETCH_BYTES))
        for leader, wanted in by_leader.items():
            request = FetchRequest(300 // len(by_leader), 1, _FETCH_BYTES, _COMMITTED, [(self._topic, wanted)])
            response = await self._client.send(leader, request)
            for _, partitions in response.topics:
                for partition, code, end, stable, _, aborted, *_, data in partitions:
                    if code:
                        raise for_code(code)(f"{self._topic}/{partition}")
                    found += self._take(partition, sorted(aborted or (), key=lambda one: one[1]), data)
                    self._ended[partition] = self._next[partition] >= end == stable
        return found

    def _take(self, partition: int, aborted: list[tuple[int, int]], data: bytes) -> list[Read]:
        """The records of committed transactions. ``aborted``: producers and where what they took back begins."""
        found: list[Read] = []
        taken_back: set[int] = set()
        for base, batch in _batches(data):
            while aborted and aborted[0][1] <= base:
                taken_back.add(aborted.pop(0)[0])
            if is_marked(batch):
                self._next[partition] = base + 1 + last_offset(batch)
                continue
            decoded = DefaultRecordBatch(batch)
            if decoded.is_control_batch:
                if ControlRecord.parse(next(iter(decoded)).key) == ABORT_MARKER:
                    taken_back.discard(decoded.producer_id)
            elif not (decoded.is_transactional and decoded.producer_id in taken_back):
                found += [_read(partition, record) for record in decoded if record.offset >= self._next[partition]]
            self._next[partition] = decoded.next_offset
        return found


def _read(partition: int, record: Any) -> Read:
    return Read(partition, record.offset, record.timestamp / 1000, record.key, record.value, tuple(record.headers))


def _batches(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """The whole batches in what a broker sent; the last one is often cut."""
    rest = memoryview(data)
    while len(rest) > _LOG_OVERHEAD:
        base, length = struct.unpack_from(">qi", rest)
        batch, rest = rest[: _LOG_OVERHEAD + length], rest[_LOG_OVERHEAD + length :]
        if len(batch) == _LOG_OVERHEAD + length:
            yield base, batch


@asynccontextmanager
async def reading(bootstrap: str, topic: str) -> AsyncIterator[Tail]:
    """The topic from its beginning."""
    client = AIOKafkaClient(bootstrap_servers=bootstrap, metadata_max_age_ms=2000)
    await client.bootstrap()
    try:
        await client.set_topics([topic])
        yield Tail(client, topic)
    finally:
        await client.close()


async def everything(bootstrap: str, topic: str, *, within_s: float = 60.0) -> list[Read]:
    """All that is committed to a topic, once no transaction is open. Raises TimeoutError."""
    records: list[Read] = []
    async with asyncio.timeout(within_s), reading(bootstrap, topic) as tail:
        while not tail.ended:
            records += await tail.more()
    return records


async def until(tail: Tail, take: Callable[[list[Read]], bool], *, within_s: float) -> bool:
    """Give records to ``take`` until it says that it has enough; False: not within that time."""
    deadline = time.time() + within_s
    while time.time() < deadline:
        if take(await tail.more()):
            return True
    return False
