"""Writing outside transactions: one idempotent producer with a deadline around whatever it does."""

import asyncio
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Self

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, KafkaTimeoutError, UnknownTopicOrPartitionError
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import RecordMetadata

from schemas.base import MAX_ATTRIBUTE, Origin, Outgoing
from service.errors import BrokerUnavailable, RecordRefused
from service.kafka.connection import RECORD_REFUSALS, client_options, close_producer, start
from service.settings import KafkaSettings

log = structlog.get_logger(__name__)

_STOP_S = 5.0
_BATCH_BYTES = 256 << 10
"""Who waits for a full batch to leave is woken with all who wait: few large batches, not many of aiokafka's 16 KiB."""
_SEED, _MIX, _WORD = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF
"""Of murmur2, as Kafka's clients have it: 32 bits, little endian."""


class IdempotentProducer:
    """Records go out in order per key, and not twice. Opened with ``async with``.

    aiokafka's idempotent producer tries for ever while the brokers are away, and dies of some errors: sends have a
    deadline here, and a dead producer is replaced at the next one.
    """

    def __init__(
        self, *, kafka: KafkaSettings, max_record_bytes: int, within_s: float = 15.0, linger_ms: int = 0
    ) -> None:
        self._kafka = kafka
        self._max_record_bytes = max_record_bytes
        self._within_s = within_s
        self._linger_ms = linger_ms
        self._producer: AIOKafkaProducer | None = None
        self._dead: list[AIOKafkaProducer] = []
        self._opening = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what is on its way, and take no more."""
        self._closed = True
        for producer in filter(None, (*self._dead, self._producer)):
            await _stop(producer)

    async def send(self, record: Outgoing) -> Origin:
        """Return once the broker has the record: where it lies. An offset of -1: it was there already, somewhere.

        Raises RecordRefused for this record; BrokerUnavailable where the outcome is unknown: it may still be written.
        """
        acknowledged: asyncio.Future[RecordMetadata] | None = None
        try:
            async with asyncio.timeout(self._within_s):
                producer, acknowledged = await self._enqueue(record)
                try:
                    found = await asyncio.shield(acknowledged)
                except KafkaError as error:
                    raise self._verdict(error, producer, record.topic) from error
                return Origin(topic=record.topic, partition=found.partition, offset=found.offset)
        except TimeoutError:
            raise BrokerUnavailable(
                f"{record.topic}: not acknowledged within {self._within_s:g} s; it may still be written"
            ) from None
        finally:
            if acknowledged is not None and not acknowledged.done():
                acknowledged.add_done_callback(_forget)

    async def send_all(self, records: Sequence[Outgoing]) -> None:
        """Return once the broker has all of them; those of a partition travel together.

        Raises RecordRefused where it won't take some, and BrokerUnavailable where that is unknown: others of them, or
        all, may be written then.
        """
        acknowledged: list[asyncio.Future[RecordMetadata]] = []
        try:
            async with asyncio.timeout(self._within_s):
                producer = self._producer if self._producer and not self._closed else await self._open()
                try:
                    for record in records:
                        await know_partition(producer, record)
                    for batch in await batched(producer, records):
                        sent = await producer.send_batch(batch.builder, batch.topic, partition=batch.partition)
                        acknowledged.append(sent)
                    for sent in acknowledged:
                        await asyncio.shield(sent)
                except KafkaError as error:
                    raise self._verdict(error, producer, ", ".join({record.topic for record in records})) from error
        except TimeoutError:
            raise BrokerUnavailable(
                f"{len(records)} records: not acknowledged within {self._within_s:g} s; they may still be written"
            ) from None
        finally:
            for sent in acknowledged:
                sent.add_done_callback(_forget)

    async def push(self, record: Outgoing) -> None:
        """Return once the record is on its way; where the broker never takes it, that is logged.

        Waits while too much is on its way. Raises RecordRefused and BrokerUnavailable for what is known by now.
        """
        try:
            async with asyncio.timeout(self._within_s):
                producer, acknowledged = await self._enqueue(record)
        except TimeoutError:
            raise BrokerUnavailable(f"{record.topic}: not taken within {self._within_s:g} s") from None

        def note(done: asyncio.Future[RecordMetadata]) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, KafkaError):
                log.warning("record.not_taken", why=str(self._verdict(error, producer, record.topic)))

        acknowledged.add_done_callback(note)

    async def _enqueue(self, record: Outgoing) -> tuple[AIOKafkaProducer, asyncio.Future[RecordMetadata]]:
        producer = self._producer if self._producer and not self._closed else await self._open()
        try:
            await know_partition(producer, record)
            acknowledged = await producer.send(
                record.topic, record.value, record.key, record.partition, headers=list(record.headers)
            )
        except KafkaError as error:
            raise self._verdict(error, producer, record.topic) from error
        return producer, acknowledged

    def _verdict(self, error: KafkaError, producer: AIOKafkaProducer, topic: str) -> RecordRefused | BrokerUnavailable:
        """What an error means for its record; a producer that will never work again is put aside."""
        if isinstance(error, UnknownTopicOrPartitionError) and not _answered(producer):
            return BrokerUnavailable(f"{topic}: no broker says where it is")
        if isinstance(error, RECORD_REFUSALS):
            return RecordRefused(f"{topic}: {error}")
        if producer is self._producer and not isinstance(error, KafkaTimeoutError):
            self._dead.append(producer)
            self._producer = None
        return BrokerUnavailable(f"{topic}: {error}")

    async def _open(self) -> AIOKafkaProducer:
        async with self._opening:
            while self._dead:
                await _stop(self._dead[0])
                del self._dead[0]  # only now: who is cancelled before leaves it to the next
            if self._closed:
                raise BrokerUnavailable("closed")
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **client_options(self._kafka),
                    enable_idempotence=True,
                    linger_ms=self._linger_ms,
                    max_batch_size=min(_BATCH_BYTES, self._max_record_bytes),
                    max_request_size=self._max_record_bytes,
                )
                try:
                    await start(producer)
                except (KafkaError, OSError) as error:
                    await _stop(producer)
                    raise BrokerUnavailable(f"no broker at {self._kafka.bootstrap_servers}: {error}") from error
                except asyncio.CancelledError:
                    await _stop(producer)
                    raise
                self._producer = producer
            return self._producer


@dataclass(slots=True)
class Batch:
    """Records of one partition that travel together, and where they are among all that are sent."""

    topic: str
    partition: int
    builder: BatchBuilder
    indices: list[int] = field(default_factory=list)

    def takes(self, index: int, record: Outgoing) -> bool:
        """False where it is full. The first one is always taken."""
        taken = self.builder.append(timestamp=None, key=record.key, value=record.value, headers=list(record.headers))
        if taken is not None:
            self.indices.append(index)
        return taken is not None


async def batched(producer: AIOKafkaProducer, records: Sequence[Outgoing]) -> list[Batch]:
    """The records of each partition together, in their order; a partition has more batches where one is full.

    One at a time aiokafka would make a future for each, look its topic up, and list the topic's partitions. How many
    there are is asked each time: topics grow, and who waits for a result reads where its key leads to now.
    """
    topics = {record.topic for record in records}
    sizes = {topic: len(await producer.client._wait_on_metadata(topic)) for topic in topics}
    batches: list[Batch] = []
    last: dict[tuple[str, int], Batch] = {}
    for index, record in enumerate(records):
        size = sizes[record.topic]
        if record.partition is not None:
            where = record.topic, record.partition
        else:
            where = record.topic, random.randrange(size) if record.key is None else _led(record.key, size)
        batch = last.get(where)
        if batch is None or not batch.takes(index, record):
            batch = last[where] = Batch(*where, producer.create_batch())
            batches.append(batch)
            batch.takes(index, record)
    return batches


def partition_of(key: bytes, partitions: int) -> int:
    """The partition, of so many, that Kafka's clients choose for a key."""
    return (_murmur2(key) & 0x7FFFFFFF) % partitions


@lru_cache(2048)
def _remembered(key: bytes, partitions: int) -> int:
    return partition_of(key, partitions)


def _led(key: bytes, partitions: int) -> int:
    """The same: a few tenants are the keys of many records, and an answer often has the key of what asked for it."""
    return _remembered(key, partitions) if len(key) <= MAX_ATTRIBUTE else partition_of(key, partitions)


def _murmur2(key: bytes) -> int:
    """Kafka's hash of a key. aiokafka has it, too, byte by byte, which takes three times as long."""
    count, rest = divmod(len(key), 4)
    hashed = _SEED ^ len(key)
    for word in struct.unpack_from(f"<{count}I", key):
        mixed = word * _MIX & _WORD
        hashed = (hashed * _MIX ^ (mixed ^ mixed >> 24) * _MIX) & _WORD
    if rest:
        hashed = (hashed ^ int.from_bytes(key[-rest:], "little")) * _MIX & _WORD
    hashed = (hashed ^ hashed >> 13) * _MIX & _WORD
    return hashed ^ hashed >> 15


async def know_partition(producer: AIOKafkaProducer, record: Outgoing) -> None:
    """Let aiokafka know the partition that a record names, which it asserts. Raises RecordRefused where it is none."""
    if record.partition is None or record.partition in await producer.client._wait_on_metadata(record.topic):
        return
    await producer.client.force_metadata_update()
    if record.partition not in await producer.client._wait_on_metadata(record.topic):
        raise RecordRefused(f"{record.topic} has no partition {record.partition}")


def _answered(producer: AIOKafkaProducer) -> bool:
    """Whether a broker told of topics while aiokafka asked, to which no answer at all is "no such topic", too."""
    client = producer.client
    return bool(time.time() * 1000 - client.cluster._last_successful_refresh_ms <= client._request_timeout_ms)


async def _stop(producer: AIOKafkaProducer) -> None:
    """Flush and close, but not longer than brokers that are away deserve."""
    try:
        async with asyncio.timeout(_STOP_S):
            await producer.flush()
    except TimeoutError:
        log.warning("records.given_up", within_s=_STOP_S)
        await close_producer(producer, within_s=0)
    else:
        await close_producer(producer, within_s=_STOP_S)


def _forget(done: asyncio.Future[RecordMetadata]) -> None:
    """Nobody waits any more: an error that comes now has been reported as a timeout."""
    if not done.cancelled():
        done.exception()
