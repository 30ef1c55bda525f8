"""One partition's transactional producer, with a deadline around everything that it does.

aiokafka's producer retries for ever, goes on after some errors as if nothing had been, and forgets after others that
a transaction is open. So nothing is mended here: after any failure the producer is thrown away, and a new one fences.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    IllegalOperation,
    KafkaError,
    ProducerFenced,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import OffsetAndMetadata

from schemas.base import Outgoing
from service.consumer.hanging import HangingTransactions
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.protocol import topic_id
from service.errors import BrokerUnavailable, Fenced, GearshiftError, PositionLost, RecordRefused
from service.kafka.connection import RECORD_REFUSALS, client_options, close_producer, start
from service.kafka.producer import Batch, batched, know_partition
from service.settings import Settings

log = structlog.get_logger(__name__)

TRANSACTION_TIMEOUT_S = 10.0
"""A transaction that hangs hides every later result of its partitions until the broker ends it."""
_RETRY_BACKOFF_MS = 5
"""The broker still writes the last transaction's markers when the next one begins; the default waits 100 ms."""
_BATCH_BYTES = 256 << 10
"""Of one partition of the results: what finishes together travels together, not in aiokafka's 16 KiB."""
_REMEMBER_S = 60.0
_TOPIC_WITHIN_S = 3.0
_LEADER_WITHIN_S = 2.0
"""An election is over by then, as a rule; after that others need not wait for it."""
_TOPIC_AGAIN_S = 0.2
_SAME_TOPIC_S, _SAME_TOPIC_WITHIN_S, _NOT_SAID_S = 0.25, 1.0, 10.0
"""How often it is asked whether the partition's topic is still the one that was fenced, how long an answer is waited
for, and for how long it is not asked again where none came: results wait for it.
"""
_STOP_S = 2.0


class Refused(GearshiftError):
    """The broker won't take some of the records, or of those that travelled with them; nothing was committed."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


class OutcomeUnknown(GearshiftError):
    """The transaction may or may not have been committed; the ledger knows."""

    retriable = True


class PartitionTransactions:
    """Transactions of the one owner of an input partition. ``fence`` before anything else, and after any error."""

    def __init__(
        self,
        *,
        settings: Settings,
        partition: TopicPartition,
        ledgers_topic: LedgersTopic,
        at_once: asyncio.Semaphore | None = None,
        hanging: HangingTransactions | None = None,
    ) -> None:
        """``at_once`` bounds how many partitions of a worker are fenced or committed to at the same time.

        Hundreds of transactions that begin together are too much for their deadline, and each too late is one more.
        ``hanging`` ends what an earlier transaction has left open, where there is reason to look.
        """
        self._hanging = hanging
        self._doubtful = False
        """Whether something went wrong since the last commit, after which a transaction may hang."""
        self._committed: bool | None = None
        """Whether the transaction before the fence was committed, as its coordinator said then."""
        self._id = f"{settings.worker.group_id}/{partition.topic}/{partition.partition}"
        self._kafka = settings.kafka
        self._at_once = at_once or asyncio.Semaphore()
        self._group_id = settings.worker.group_id
        self._partition = partition
        self._max_record_bytes = settings.topics.max_message_bytes
        self._ledgers_topic: LedgersTopic | None = ledgers_topic
        self.topic_id: str | None = None
        """The partition's topic's, as the first fence found it."""
        self._ask_at = float("-inf")
        """When it is to be asked again whether it still has that."""
        self._remembered_at = float("-inf")
        self._reminder_failed = False
        """Whether nobody knows what became of the last transaction, and it had one: the next ones go without."""
        self.unremembered = False
        """Whether the ledgers topic is behind what is committed."""
        self._producer: AIOKafkaProducer | None = None
        self._closing: asyncio.Task[None] | None = None
        self._sizes: dict[str, int] = {}
        """How many partitions the topics have that this producer has looked up."""

    async def fence(self) -> int:
        """End what any earlier owner has open, and its ability to commit. Returns the owners' epoch.

        A transaction that hangs and of which nobody knows any more whether it was committed is aborted, though an owner
        in between may have known, and have told some partitions: its requests may be answered a second time.

        Raises BrokerUnavailable, and PositionLost where the topic was made anew since the first fence.
        """
        await self.close()
        if not self._reminder_failed:
            self.remember()
        await self._ask_for_the_decision()
        producer = AIOKafkaProducer(
            **client_options(self._kafka)
            | {
                "transactional_id": self._id,
                "transaction_timeout_ms": round(TRANSACTION_TIMEOUT_S * 1000),
                "retry_backoff_ms": _RETRY_BACKOFF_MS,
                "max_request_size": self._max_record_bytes,
                "max_batch_size": min(_BATCH_BYTES, self._max_record_bytes),
            }
        )
        self._producer = producer
        self._sizes.clear()
        try:
            async with self._at_once, asyncio.timeout(self._kafka.request_timeout_s):
                await start(producer)
                self._require_same(await topic_id(producer.client, self._partition.topic))
        except (KafkaError, OSError, TimeoutError, AssertionError) as error:
            # aiokafka asserts that there are brokers; a cluster that has just lost its only one tells of none.
            self._doubtful = True
            raise BrokerUnavailable(f"can't fence {self._partition}: {error or type(error).__name__}") from error
        epoch: int = producer._txn_manager.producer_epoch
        if self._doubtful and self._hanging is not None:
            async with self._at_once:
                await self._hanging.end(producer._txn_manager.producer_id, committed=self._committed or False)
        return epoch

    async def _ask_for_the_decision(self) -> None:
        """Before the fence, behind which nobody knows any more. Raises BrokerUnavailable where it may matter."""
        if self._hanging is None:
            return
        try:
            async with self._at_once:
                committed = await self._hanging.decision(self._id)
        except BrokerUnavailable:
            if self._doubtful:
                raise
        else:
            self._committed = self._committed if committed is None else committed

    def doubt(self) -> None:
        """What was committed can't be read: perhaps a transaction hangs, and is to be ended behind the next fence."""
        self._doubtful = True

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        """Publish ``records`` and commit the input partition's ledger, both or none.

        Raises Refused, Fenced and OutcomeUnknown, and PositionLost where the topic was made anew: a place in the old
        one would stand for the new one.
        """
        producer = self._producer
        if producer is None:
            raise OutcomeUnknown(f"no producer for {self._partition}")
        if time.monotonic() > self._ask_at:
            self._ask_at = time.monotonic() + _NOT_SAID_S
            with suppress(KafkaError, OSError, TimeoutError):  # the transaction itself will tell
                async with asyncio.timeout(_SAME_TOPIC_WITHIN_S):
                    self._require_same(await self._id_now(producer))
        reminder = self._reminder(offset, metadata)
        everything = [*records, *reminder]
        try:
            async with self._at_once:
                await self._know_topics(producer, everything)
                async with asyncio.timeout(TRANSACTION_TIMEOUT_S):
                    await self._transact(producer, everything, OffsetAndMetadata(offset, metadata))
        except asyncio.CancelledError:
            raise
        except Refused as refused:
            self._do_without_reminder(refused, len(records))
            raise
        except ProducerFenced as error:
            raise Fenced(f"another owner has {self._partition}") from error
        except Exception as error:
            self._doubtful = True
            self._reminder_failed = self._reminder_failed or bool(reminder)
            self.unremembered = self.unremembered or bool(reminder)
            raise OutcomeUnknown(f"transaction on {self._partition}: {error!r}") from error
        self._doubtful, self._committed = False, None
        self._reminder_failed = False

    async def _id_now(self, producer: AIOKafkaProducer) -> str | None:
        """The id of the partition's topic; None where the broker knows of no such topic, now, or of no ids."""
        try:
            return await topic_id(producer.client, self._partition.topic)
        except UnknownTopicOrPartitionError:
            return None

    def _require_same(self, found: str | None) -> None:
        """Raises PositionLost."""
        if found and self.topic_id and found != self.topic_id:
            raise PositionLost(
                f"{self._partition.topic} was made anew: what is known of the old one is void, and its requests have "
                "gone; whoever starts next begins with the first request of the new one"
            )
        self.topic_id, self._ask_at = found or self.topic_id, time.monotonic() + _SAME_TOPIC_S

    def remember(self) -> None:
        """Let the next commit be remembered."""
        self._remembered_at = float("-inf")

    async def close(self) -> None:
        """Give the producer up, open transaction and all; the next fence ends that one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            closing = close_producer(producer, within_s=_STOP_S)
            self._closing = asyncio.create_task(closing, name=f"stop producer of {self._partition}")
        if self._closing is not None:
            await asyncio.wait({self._closing})

    def _reminder(self, offset: int, metadata: str) -> list[Outgoing]:
        """The record that remembers this commit, where it is time for one."""
        now = time.monotonic()
        if self._ledgers_topic is None or now - self._remembered_at < _REMEMBER_S:
            self.unremembered = self._ledgers_topic is not None
            return []
        self._remembered_at = now
        self.unremembered = False
        return [self._ledgers_topic.record(self._partition, offset, metadata, topic_id=self.topic_id)]

    def _do_without_reminder(self, refused: Refused, count: int) -> None:
        """Results must not fail because the ledgers topic refuses what is remembered there.

        Raises OutcomeUnknown where nothing else was refused.
        """
        reason = refused.reasons.pop(count, None)
        if reason is not None:
            log.error("bus.ledger_not_remembered", partition=str(self._partition), reason=reason)
            self._ledgers_topic = None
            if not refused.reasons:
                raise OutcomeUnknown(f"{self._partition}: {reason}; tried again without it") from refused

    async def _transact(
        self, producer: AIOKafkaProducer, records: Sequence[Outgoing], commit: OffsetAndMetadata
    ) -> None:
        batches = await batched(producer, records)
        await self._find_leaders(producer, batches)
        await producer.begin_transaction()
        producer._txn_manager.wait_for_transaction_end().add_done_callback(_seen)
        acknowledged: list[asyncio.Future[Any]] = []
        try:
            for batch in batches:
                future = await producer.send_batch(batch.builder, batch.topic, partition=batch.partition)
                future.add_done_callback(_seen)
                acknowledged.append(future)
            await producer.send_offsets_to_transaction({self._partition: commit}, self._group_id)
        except (TopicAuthorizationFailedError, IllegalOperation) as error:
            # Rights are asked for where a topic is added to the transaction. That may end it between two calls: the
            # next one is illegal then, and what ended it is told to those who wait for its end.
            end = (_end_of(producer) or error) if isinstance(error, IllegalOperation) else error
            if isinstance(end, TopicAuthorizationFailedError):
                raise Refused(_forbidden(end, records)) from error
            raise end from error
        # A flush ignores what became of its records: without this, the offset would be committed without them.
        answers = await asyncio.gather(*acknowledged, return_exceptions=True)
        reasons: dict[int, str] = {}
        for batch, answer in zip(batches, answers, strict=True):
            if isinstance(answer, RECORD_REFUSALS):
                reasons.update(dict.fromkeys(batch.indices, f"{batch.topic}: {answer}"))
            elif isinstance(answer, BaseException):
                raise answer
        if reasons:
            raise Refused(reasons)
        await producer.commit_transaction()

    async def _find_leaders(self, producer: AIOKafkaProducer, batches: Sequence[Batch]) -> None:
        """Begin nothing that would wait for a leader. Raises OutcomeUnknown where a partition is long without one."""
        until = time.monotonic() + _LEADER_WITHIN_S
        places = [TopicPartition(batch.topic, batch.partition) for batch in batches]
        cluster = producer.client.cluster
        while alone := next((place for place in places if cluster.leader_for_partition(place) in {None, -1}), None):
            if time.monotonic() > until:
                raise OutcomeUnknown(f"{alone.topic}/{alone.partition} has no leader")
            await asyncio.sleep(_TOPIC_AGAIN_S)
            await producer.client.force_metadata_update()

    async def _know_topics(self, producer: AIOKafkaProducer, records: Sequence[Outgoing]) -> None:
        """Look new topics up before the transaction: aiokafka would wait for a missing one inside of it."""
        deadline = time.monotonic() + _TOPIC_WITHIN_S
        while missing := self._missing(records):
            try:
                async with asyncio.timeout(_TOPIC_WITHIN_S):
                    there = await producer.client.fetch_all_metadata()
            except (KafkaError, TimeoutError) as error:
                raise OutcomeUnknown(f"looking up {', '.join(missing.values())}: {error!r}") from error
            self._sizes = {topic: len(there.partitions_for_topic(topic)) for topic in there.topics()}
            missing = self._missing(records)
            if missing and time.monotonic() > deadline:
                raise Refused({index: f"no such topic: {where}" for index, where in missing.items()})
            if missing:
                await asyncio.sleep(_TOPIC_AGAIN_S)  # it may just have been made
        placed = [(index, record) for index, record in enumerate(records) if record.partition is not None]
        for index, record in placed:
            try:
                async with asyncio.timeout(_TOPIC_WITHIN_S):
                    await know_partition(producer, record)
            except RecordRefused as refused:
                raise Refused({index: str(refused)}) from refused

    def _missing(self, records: Sequence[Outgoing]) -> dict[int, str]:
        """The records whose topic or partition has not been seen, and what that is."""
        places = {(record.topic, record.partition) for record in records}
        if all((partition or 0) < self._sizes.get(topic, 0) for topic, partition in places):
            return {}
        return {
            index: record.topic if record.partition is None else f"{record.topic}/{record.partition}"
            for index, record in enumerate(records)
            if (record.partition or 0) >= self._sizes.get(record.topic, 0)
        }


def _end_of(producer: AIOKafkaProducer) -> BaseException | None:
    """What has ended the transaction under way."""
    end: asyncio.Future[None] = producer._txn_manager.wait_for_transaction_end()
    return end.exception() if end.done() else None


def _forbidden(error: TopicAuthorizationFailedError, records: Sequence[Outgoing]) -> dict[int, str]:
    topics = set(error.args[0])
    return {i: f"{one.topic}: this worker may not write there" for i, one in enumerate(records) if one.topic in topics}


def _seen(future: asyncio.Future[Any]) -> None:
    """Take a future's error, so that asyncio does not log it: it is raised elsewhere."""
    if not future.cancelled():
        future.exception()
