"""Consumers that no record can stop: what aiokafka can't decode is told, handed over as damaged, and stepped over.

aiokafka decodes with compiled code, which raises at the first record that is not as it should be, inflates a batch
without a bound, and reads the same batch again for ever. This is the one place where it is hooked: a ``Consumer``'s
fetcher makes its two kinds of objects for what a fetch brought, ``MemoryRecords`` and ``PartitionRecords``, from here.
Nothing is changed for other consumers of the process. Batches that are as they should be still go through the
compiled decoder.
"""

import asyncio
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, Fetcher, PartitionRecords
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch

from schemas.base import Record
from service.kafka.batches import HEAD_SIZE, Head, Parsed, Surplus, is_crowded, parse, plain
from service.kafka.connection import client_options
from service.kafka.inflate import NotInflated, inflate
from service.ports import Unreadable
from service.settings import KafkaSettings

log = structlog.get_logger(__name__)

_BEFORE_LENGTH, _TO_LENGTH = 8, 12
_MAGIC_AT = 16
_BATCHES = 2
"""The version of the format from which on it is batches; before, single messages, which may hold others."""
_SMALLEST = 26
_LEGACY_KEY_AT = {0: 18, 1: 26}
_LEGACY_CODEC_AT = 17
_CRC_TRIES = 3
"""Bits may have flipped on the way: what fails its checksum is fetched so many times before it is stepped over."""
_EACH = 1000
"""Offsets of one unreadable batch that are handed over one by one; it may say that it has millions."""
_NO_OFFSET = 1 << 63
_LONGEST_REASON = 300
_AHEAD = 16
"""Rounds of the loop from a record's delivery until its transaction has begun, where nobody waits for anything."""
_LOG_APPEND_TIME = 1
"""Kafka's timestamp type of topics that keep the broker's time."""


def moment_of(timestamp_ms: int | None, timestamp_type: int) -> float:
    """When the broker had a record, in seconds since the epoch.

    Where the topic keeps its producers' timestamps, they count; but none lies ahead of our own clock.
    """
    moment = (timestamp_ms or 0) / 1000
    return moment if timestamp_type == _LOG_APPEND_TIME else min(moment, time.time())


class Decoding:
    """What one consumer may inflate, what it is fetching once more, and what it could not read.

    ``kept``: how many of those that were stepped over last are kept for whoever takes them from here.
    """

    def __init__(self, most: int, *, kept: int = 0) -> None:
        self._most = most
        self._tries: dict[TopicPartition, tuple[int, int]] = {}
        """The offset of a batch that failed its checksum, and how often it has."""
        self.unreadable: deque[Unreadable] = deque(maxlen=kept)
        """What was stepped over lately."""
        self.count = 0
        """How often something was stepped over."""

    def inflated(self, codec: int, data: bytes) -> bytes:
        """Raises NotInflated."""
        return inflate(codec, data, self._most)

    def is_corrupt(self, partition: TopicPartition, offset: int) -> bool:
        """Whether a batch that fails its checksum has done so often enough to be given up."""
        at, tries = self._tries.pop(partition, (offset, 0))
        tries = tries + 1 if at == offset else 1
        if tries < _CRC_TRIES:
            self._tries[partition] = offset, tries
        return tries == _CRC_TRIES

    def tell(self, found: Unreadable) -> None:
        """Something is stepped over."""
        self.count += 1
        self.unreadable.append(found)
        log.error(
            "record.unreadable",
            topic=found.topic,
            partition=found.partition,
            offset=found.first,
            last=found.last,
            reason=found.reason,
        )


class Consumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka is untyped
    """aiokafka's consumer with our connection, which gives our records, also those that are damaged.

    ``unreadable_kept``: of what could not be read, for whoever takes it. ``options`` are aiokafka's.
    """

    def __init__(self, kafka: KafkaSettings, *, unreadable_kept: int = 0, **options: Any) -> None:
        self.decoding = Decoding(kafka.max_batch_bytes, kept=unreadable_kept)
        self._hooked: Fetcher | None = None
        super().__init__(**client_options(kafka) | options)

    @property
    def _fetcher(self) -> Fetcher | None:
        return self._hooked

    @_fetcher.setter
    def _fetcher(self, fetcher: Fetcher | None) -> None:
        """aiokafka has made its fetcher, and has not fetched yet."""
        if fetcher is not None:
            ours = {"MemoryRecords": Batches, "PartitionRecords": partial(TolerantRecords, self.decoding)}
            theirs = Fetcher._proc_fetch_request
            hooked = FunctionType(theirs.__code__, {**theirs.__globals__, **ours}, theirs.__name__)
            fetcher._proc_fetch_request = partial(_behind, MethodType(hooked, fetcher))
        self._hooked = fetcher


async def _behind(fetch: Callable[..., Awaitable[bool]], *given: Any) -> bool:
    """Fetch once what the last fetch brought is on its way: writing the next request takes as long as answering one."""
    for _ in range(_AHEAD):
        await asyncio.sleep(0)
    return await fetch(*given)


class Batches:
    """The batches in what a fetch brought, as bytes, in the place of aiokafka's MemoryRecords; the last may be cut."""

    def __init__(self, fetched: bytes | None) -> None:
        self._fetched = fetched or b""
        self._at = 0

    def size_in_bytes(self) -> int:
        return len(self._fetched)

    def has_next(self) -> bool:
        return self._end() is not None

    def next_batch(self) -> bytes:
        """Its bytes."""
        end = self._end()
        assert end is not None, "asked for more than there is"
        batch, self._at = self._fetched[self._at : end], end
        return batch

    def next_base(self) -> int | None:
        """The offset that the next batch begins with, where there is one."""
        return int.from_bytes(self._fetched[self._at : self._at + _BEFORE_LENGTH], "big") if self.has_next() else None

    def _end(self) -> int | None:
        left = len(self._fetched) - self._at
        if left < _TO_LENGTH:
            return None
        (length,) = struct.unpack_from(">i", self._fetched, self._at + _BEFORE_LENGTH)
        return self._at + _TO_LENGTH + length if _SMALLEST - _TO_LENGTH <= length <= left - _TO_LENGTH else None


class TolerantRecords(PartitionRecords):  # type: ignore[misc]  # aiokafka is untyped
    """The records of a fetched partition as ours: what aiokafka's PartitionRecords gives, and damaged ones in between.

    After a batch that can't be read the rest is fetched again, so that a row of them does not hold up the loop.
    """

    next_fetch_offset: int

    def __init__(self, decoding: Decoding, *given: Any) -> None:
        self._decoding = decoding
        super().__init__(*given)

    def _unpack_records(self) -> Iterator[Record]:
        while self._records.has_next():
            raw = self._records.next_batch()
            batch, end = _opened(raw), self._behind(raw)
            if batch is None or (self._check_crcs and not batch.validate_crc()):
                if self._decoding.is_corrupt(self._tp, self.next_fetch_offset):
                    yield from self._step_over(raw, end, "its checksum is wrong")
                return
            legacy = raw[_MAGIC_AT] < _BATCHES
            if self._is_aborted(batch) or batch.is_control_batch:
                self.next_fetch_offset = end
                continue
            try:
                if not legacy and batch.compression_type:
                    raw = plain(raw, self._decoding.inflated(batch.compression_type, raw[HEAD_SIZE:]))
                    batch = DefaultRecordBatch(raw)
                elif legacy:
                    self._refuse_legacy_bomb(raw)
            except NotInflated as error:
                yield from self._step_over(raw, end, str(error))
                return
            try:
                yield from self._decoded(batch, (-1, _NO_OFFSET) if legacy else _expected(raw, end))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                yield from self._step_over(raw, end, reason) if legacy else self._piecemeal(raw, end, reason)
            if self.next_fetch_offset < end and _bounds(raw)[1] <= self.next_fetch_offset:
                yield from self._step_over(raw, end, "it says that it ends before where it is")
            self.next_fetch_offset = max(self.next_fetch_offset, end)

    def _decoded(self, batch: Any, expected: tuple[int, int]) -> Iterator[Record]:
        """What aiokafka's decoder gives, between the offsets ``expected``. Raises where something is wrong."""
        last, limit = expected
        for record in batch:
            limit += 1  # each leaves an offset for those behind it; or reading would pass what others wrote
            if not last < record.offset < limit:
                raise CorruptRecordException(f"offset {record.offset} is not between {last} and {limit}")
            last = record.offset
            if last < self.next_fetch_offset:
                continue  # of a batch that was read in part
            read = Record(
                self._tp.topic,
                self._tp.partition,
                last,
                moment_of(record.timestamp, record.timestamp_type),
                record.key,
                record.value,
                tuple(record.headers),
            )
            self.next_fetch_offset = last + 1
            yield read

    def _behind(self, raw: bytes) -> int:
        """The offset behind a batch, of which nothing was read yet.

        It is where the batch says that it ends, but not beyond where the next one begins, and beyond the position in
        any case: the broker has found that there.
        """
        base, end, *_ = _bounds(raw)
        first = max(base, self.next_fetch_offset)
        return max(first + 1, min(end, self._following(first) or end))

    def _following(self, first: int) -> int | None:
        """Where the next batch begins, if that is known and lies behind ``first``."""
        following = self._records.next_base()
        return following if following is not None and following > first else None

    def _is_aborted(self, batch: Any) -> bool:
        """Whether it belongs to a transaction that was aborted; takes note of the markers that end those."""
        if self._isolation_level != READ_COMMITTED or batch.producer_id is None:
            return False
        self._consume_aborted_up_to(batch.base_offset)
        if batch.is_control_batch and self._ends_an_abort(batch):
            self._aborted_producers.discard(batch.producer_id)
        return batch.is_transactional and batch.producer_id in self._aborted_producers

    def _ends_an_abort(self, marker: Any) -> bool:
        try:
            return bool(self._contains_abort_marker(marker))
        except Exception as error:
            log.warning("record.no_marker", topic=self._tp.topic, partition=self._tp.partition, reason=repr(error))
            return False

    def _refuse_legacy_bomb(self, raw: bytes) -> None:
        """A message of version 0 or 1 may hold others, compressed. Raises NotInflated."""
        codec, at = raw[_LEGACY_CODEC_AT] & 0x07, _LEGACY_KEY_AT[raw[_MAGIC_AT]]
        if codec:
            (key,) = struct.unpack_from(">i", raw, at)
            at += 4 + max(0, key) + 4
            self._decoding.inflated(codec, raw[at:])

    def _piecemeal(self, raw: bytes, end: int, reason: str) -> Iterator[Record]:
        """What aiokafka's decoder gave up, from where it did, one record at a time; ``end`` is behind the batch.

        A batch that is wrong may have more records than it says: they are read as long as the next one leaves room.
        """
        try:
            for found in parse(raw, self._following(end - 1) or end):
                if found.offset < self.next_fetch_offset:
                    continue
                self.next_fetch_offset = found.offset + 1
                if found.damage is not None:
                    self._tell(found.offset, found.offset, found.damage)
                yield self._record(found)
        except Surplus:
            if self.next_fetch_offset >= end:
                self._tell(end - 1, end - 1, f"it goes on behind its last offset: {reason}")
        if self.next_fetch_offset < end:
            yield from self._step_over(raw, end, reason)

    def _step_over(self, raw: bytes, end: int, reason: str) -> Iterator[Record]:
        """Tell of a batch, or of what is left of it, and hand its offsets over with nothing in them."""
        base, _, timestamp, timestamp_type = _bounds(raw)
        first = max(base, self.next_fetch_offset)
        self._tell(first, end - 1, reason)
        for offset in range(first, min(end, first + _EACH)):
            self.next_fetch_offset = offset + 1
            yield self._record(Parsed(offset, timestamp, damage=reason, timestamp_type=timestamp_type))
        self.next_fetch_offset = end

    def _tell(self, first: int, last: int, reason: str) -> None:
        self._decoding.tell(Unreadable(self._tp.topic, self._tp.partition, first, last, reason[:_LONGEST_REASON]))

    def _record(self, found: Parsed) -> Record:
        moment = moment_of(found.timestamp, found.timestamp_type)
        where = self._tp.topic, self._tp.partition, found.offset, moment
        return Record(*where, found.key, found.value, tuple(found.headers), damage=found.damage)


def _opened(raw: bytes) -> Any:
    """aiokafka's compiled decoder of a batch; None where its head is no head."""
    magic = raw[_MAGIC_AT]
    try:
        if magic < _BATCHES:
            return LegacyRecordBatch(raw, magic)
        return DefaultRecordBatch(raw) if magic == _BATCHES and len(raw) >= HEAD_SIZE else None
    except Exception as error:
        log.debug("record.no_batch", reason=repr(error))
        return None


def _expected(raw: bytes, end: int) -> tuple[int, int]:
    """The offset before a batch's first one, and the last one that leaves room before ``end`` for all its records.

    Raises CorruptRecordException for a batch that aiokafka's decoder is not to have.
    """
    if is_crowded(raw):
        raise CorruptRecordException("a record has more headers than are read")
    head = Head.of(raw)
    return head.base - 1, end - head.count


def _bounds(raw: bytes) -> tuple[int, int, int, int]:
    """The first offset of a batch, the one after its last, a timestamp and whose that is."""
    if raw[_MAGIC_AT] == _BATCHES and len(raw) >= HEAD_SIZE:
        head = Head.of(raw)
        return head.base, head.next_offset, head.max_timestamp, head.timestamp_type
    (offset,) = struct.unpack_from(">q", raw)
    return offset, offset + 1, 0, 0
