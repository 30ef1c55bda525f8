"""Where a pool stands, kept for longer than Kafka keeps the offsets of a group without members (seven days).

A compacted topic has the latest ledger of each partition, written now and then in the transaction that commits it:
at a partition's first commit, every minute, and whenever its owner lets go of it. Who finds no committed offset can
tell a new pool from one whose offsets have expired, and go on where that one stood. Where the pool has a key, it goes
by what is signed with it alone: a stranger's word would have it leave out what nobody has answered.
"""

import asyncio
import json
import time
from dataclasses import dataclass

import structlog
from aiokafka import TopicPartition
from pydantic import BaseModel, Field

from schemas.base import Outgoing, Record
from schemas.marks import check_signed, signed
from service.consumer.ledger import MAX_METADATA, Ledger, UnknownLedger
from service.errors import TopicError
from service.kafka.reader import TopicReader, as_unavailable
from service.settings import Settings, read_keys

log = structlog.get_logger(__name__)

_LONGEST_REASON = 300
_OTHERS_S = 20.0
"""How long transactions of others are waited for: those that write ledgers end within ten seconds, or are ended. While
one is open for longer, what lies behind it is not known, and is not nothing."""


class _Told(BaseModel):
    """A remembered ledger as it is written."""

    offset: int = Field(ge=0, lt=1 << 62, strict=True)
    metadata: str = Field(max_length=MAX_METADATA)
    topic_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A ledger, or why it can't be read; ``topic_id``: of the topic whose it is, None where that is not known."""

    ledger: Ledger | UnknownLedger
    topic_id: str | None


class LedgersTopic:
    """The remembered ledgers of one group."""

    def __init__(self, *, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._topic = settings.topics.named(settings.topics.ledgers)
        self._group_id = settings.worker.group_id
        self._keys = read_keys(settings.worker.pool_key_file, "pool_key_file")
        self._found: dict[str, _Remembered] = {}
        self._began = float("-inf")
        """When what was read last began to be read."""
        self._reading = asyncio.Lock()

    def record(self, partition: TopicPartition, offset: int, metadata: str, *, topic_id: str | None) -> Outgoing:
        """What to write in order to remember this of the topic that has this id."""
        value = {"offset": offset, "metadata": metadata, "at": time.time(), "topic_id": topic_id}
        record = Outgoing(topic=self._topic, key=self._key(partition).encode(), value=json.dumps(value).encode())
        return signed(record, self._keys)

    async def ledger(
        self, partition: TopicPartition, *, topic_id: str | None, asked: float | None = None
    ) -> Ledger | None:
        """What was remembered last before the moment ``asked`` (monotonic; now); None: this group never had it.

        Nor has it had anything of a topic that was made anew since, as its ``topic_id`` tells.

        To be asked behind a fence, as what was committed: then the last transaction has ended. Many partitions are
        taken over at once, and one reading serves all who had asked when it began.

        Raises BrokerUnavailable, and UnknownLedger where the pool has a key: without one it may be a stranger's word.
        """
        asked = time.monotonic() if asked is None else asked
        async with self._reading:
            if self._began < asked:
                await self._read()
        found = self._found.get(self._key(partition))
        if found is None or (topic_id and found.topic_id and topic_id != found.topic_id):
            return None
        if isinstance(found.ledger, UnknownLedger):
            if self._keys:
                raise found.ledger
            log.warning("ledgers_topic.passed_over", partition=str(partition), reason=str(found.ledger))
            return None
        return found.ledger

    async def _read(self) -> None:
        ours = f"{self._group_id}/".encode()
        began = time.monotonic()
        try:
            with as_unavailable("reading ledgers"):
                async with TopicReader(kafka=self._kafka, topics=[self._topic], within_s=0) as tail:
                    async for record in tail.backlog(undecided_s=_OTHERS_S):
                        if record.key is not None and record.key.startswith(ours):
                            self._take(record)
        except TopicError:
            self._found.clear()  # nobody has remembered anything
        self._began = began

    def _take(self, record: Record) -> None:
        try:
            key, told = (record.key or b"").decode(), self._told(record)
        except ValueError as error:
            log.warning("ledgers_topic.malformed", at=str(record.origin), reason=str(error)[:_LONGEST_REASON])
            return
        try:
            ledger: Ledger | UnknownLedger = Ledger.decode(told.offset, told.metadata)
        except UnknownLedger as error:
            ledger = error
        self._found[key] = _Remembered(ledger, told.topic_id)

    def _told(self, record: Record) -> _Told:
        check_signed(record, self._keys)
        return _Told.model_validate_json(record.value or b"")

    def _key(self, partition: TopicPartition) -> str:
        return f"{self._group_id}/{partition.topic}/{partition.partition}"
