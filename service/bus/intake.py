"""Reading requests as a member of the group, and settling each exactly once."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from schemas.base import Origin, Outgoing, Record
from schemas.requests import Attempt
from service.bus.backlog import Backlog, Limits
from service.bus.connection import client_options
from service.bus.offsets import Offsets
from service.bus.transactions import Transactions
from service.bus.writer import Writer
from service.errors import BrokerUnavailable
from service.ports import Delivery, Received
from service.settings import Settings

log = structlog.get_logger(__name__)

_BATCH = 256
"""Records of one turn of reading, at most."""
_TURN_S = 0.25
_REVOKED_FLUSH_S = 2.0
_CLOSING_FLUSH_S = 5.0
_STOP_S = 5.0
_MARK_DELAY_S = 0.05
"""A start mark waits this long for a settlement that takes it along."""
_FETCH_WAIT_MS = 250
"""A partition that is resumed waits for the fetch under way; so fetches must not be long."""
_FETCH_BYTES = 32 << 20
_METADATA_AGE_MS = 30_000
"""Added partitions are noticed within this time."""
_MAX_POLL_S = 600.0


class Intake(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Requests in, settlements out: the ports RequestSource and Settlements. Opened with ``async with``.

    Each assigned partition has a writer that owns it by Kafka's fencing. Partitions are paused when they are
    assigned; a writer's takeover sets the position, and then they are read.
    """

    def __init__(self, *, settings: Settings, aliases: Collection[str]) -> None:
        worker = settings.worker
        self._kafka = settings.kafka
        self._topics = settings.topics
        self._settings = worker
        self._aliases = tuple(aliases)
        self._served: frozenset[str] | None = None
        self._offsets = Offsets(kafka=settings.kafka, group_id=worker.group_id)
        self._backlog = Backlog(
            Limits(requests=worker.max_waiting, bytes=worker.max_waiting_bytes, tokens=worker.max_waiting_tokens)
        )
        # The assignor keeps what it was assigned on its class, so each member needs a class of its own.
        self._assignor: Any = type("Sticky", (StickyPartitionAssignor,), {})
        self._consumer = self._make_consumer()
        self._writers: dict[TopicPartition, Writer] = {}
        self._lives: dict[asyncio.Task[None], TopicPartition] = {}
        self._paused: set[TopicPartition] = set()
        self._crowded: set[TopicPartition] = set()
        self._lost: set[Origin] = set()
        self._poll: asyncio.Task[dict[TopicPartition, list[ConsumerRecord]]] | None = None
        self._generation = -1
        self._stopped = False
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        await self._offsets.__aenter__()
        try:
            await self._consumer.start()
        except (KafkaError, OSError) as error:
            await self._offsets.close()
            await self._stop_consumer()
            raise BrokerUnavailable(f"no broker at {self._kafka.bootstrap_servers}: {error}") from error
        self.read_topics_of(self._aliases)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        await self._flush_ready(within_s=_CLOSING_FLUSH_S)
        for life in self._lives:
            life.cancel()
        if self._lives:
            await asyncio.wait(self._lives)
        await self._leave()
        if self._poll is not None:
            self._poll.cancel()
        await self._offsets.close()

    # --- reading ---

    async def receive(self) -> Received:
        """The next deliveries, and the origins of work that is another worker's now. Never cancel it.

        What was lost was lost before the deliveries: an origin in both is to be aborted, and begun anew.
        Raises Stalled, and whatever ended a writer.
        """
        if self._failure is not None:
            raise self._failure
        self._steer()
        deliveries = self._take(await self._polled())
        lost, self._lost = frozenset(self._lost), set()
        return Received(deliveries=tuple(deliveries), lost=lost)

    def serve_only(self, aliases: Collection[str] | None) -> None:
        """Read the per-model topics of these aliases only (None: of all). The shared topic is always read."""
        self._served = None if aliases is None else frozenset(self._topics.for_alias(alias) for alias in aliases)

    def read_topics_of(self, aliases: Collection[str]) -> None:
        """Subscribe to the shared topic and to those of ``aliases``; the group rebalances where that is a change."""
        self._aliases = tuple(aliases)
        topics = [self._topics.named(self._topics.requests), *map(self._topics.for_alias, self._aliases)]
        self._consumer.subscribe(topics, listener=self)

    async def stop(self) -> None:
        """Read nothing more; partitions stay assigned, so that running work can be settled."""
        self._stopped = True
        self._steer()

    # --- settling ---

    async def started(self, origin: Origin, attempt: Attempt, *, durable: bool = False) -> None:
        """Mark a run as started; ``durable`` waits until that is committed."""
        writer = self._writer(origin)
        if writer is not None:
            writer.started(origin.offset, attempt)
            if durable:
                await writer.flushed()

    def withdraw(self, origin: Origin) -> None:
        """Take a start mark back."""
        writer = self._writer(origin)
        if writer is not None:
            writer.withdraw(origin.offset)

    async def settle(self, origin: Origin, records: Sequence[Outgoing]) -> bool:
        """Publish ``records`` and finish ``origin``, both or none.

        True: committed. False: another worker's to do. Raises RecordRefused.
        """
        writer = self._writer(origin)
        if writer is None:
            return False
        committed = await writer.settle(origin.offset, records)
        if committed:
            self._backlog.remove(writer.partition, origin.offset)
        return committed

    async def flush(self) -> None:
        """Commit everything that waits, attempt marks too; with brokers that do not answer, not for ever."""
        await self._flush_ready(within_s=_CLOSING_FLUSH_S)

    @property
    def joined(self) -> bool:
        """Whether this worker is a member of its group and has been told what it owns."""
        return self._generation >= 0

    def partitions(self) -> dict[str, tuple[int, ...]]:
        """What this worker owns now, by topic."""
        owned: dict[str, list[int]] = {}
        for topic, partition in sorted(self._writers):
            owned.setdefault(topic, []).append(partition)
        return {topic: tuple(partitions) for topic, partitions in owned.items()}

    # --- what the group says; aiokafka calls these between two generations ---

    async def on_partitions_revoked(self, _revoked: Iterable[TopicPartition]) -> None:
        """Commit what is finished; work goes on until the new assignment says what is lost.

        What will be lost does not die of that, so no run is blamed for ending now.
        """
        for writer in self._writers.values():
            writer.absolve()
        await self._flush_ready(within_s=_REVOKED_FLUSH_S)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Pause everything, give up what did not come back, take over what is new."""
        try:
            self._reassign(set(assigned))
        except Exception as error:  # aiokafka would only log it
            log.exception("bus.assignment_failed")
            self._failure = error

    def _reassign(self, assigned: set[TopicPartition]) -> None:
        generation = self._consumer._coordinator.generation
        missed = generation != self._generation + 1
        self._generation = self._assignor.generation = generation
        self._consumer.pause(*assigned)
        self._paused = set(assigned)
        self._crowded.clear()
        for partition in self._writers.keys() - assigned:
            self._give_up(partition)
        for partition in assigned:
            writer = self._writers.get(partition)
            # A position keeps aiokafka from looking for one; until the takeover it is not read from.
            self._consumer.seek(partition, writer.ledger.position if writer else 0)
            if writer is None:
                self._acquire(partition)
            else:
                writer.confirm()
                if missed or writer.fenced:
                    writer.doubt()
        log.info("bus.assigned", generation=generation, partitions=len(assigned), lost=len(self._lost))

    # --- inside ---

    def _make_consumer(self) -> AIOKafkaConsumer:
        settings = self._settings
        return AIOKafkaConsumer(
            **client_options(self._kafka)
            | {
                "group_id": settings.group_id,
                "group_instance_id": settings.worker_id,
                "enable_auto_commit": False,
                "isolation_level": "read_committed",
                "auto_offset_reset": "none",
                "partition_assignment_strategy": (self._assignor,),
                "session_timeout_ms": round(settings.session_timeout_s * 1000),
                "heartbeat_interval_ms": round(min(3.0, settings.session_timeout_s / 10) * 1000),
                "rebalance_timeout_ms": round(settings.rebalance_timeout_s * 1000),
                "max_poll_interval_ms": round(_MAX_POLL_S * 1000),
                "fetch_max_wait_ms": _FETCH_WAIT_MS,
                "fetch_max_bytes": _FETCH_BYTES,
                "metadata_max_age_ms": _METADATA_AGE_MS,
            }
        )

    def _acquire(self, partition: TopicPartition) -> None:
        settings = self._settings
        size = self._topics.max_message_bytes
        writer = Writer(
            partition=partition,
            transactions=Transactions(
                kafka=self._kafka, group_id=settings.group_id, partition=partition, max_record_bytes=size
            ),
            read_ledger=partial(self._offsets.ledger, partition),
            acquired=self._acquired,
            fenced=self._rejoin,
            pause_s=settings.group_commit_s,
            mark_delay_s=_MARK_DELAY_S,
            max_record_bytes=size,
        )
        self._writers[partition] = writer
        life = asyncio.create_task(writer.run(), name=f"writer {partition.topic}/{partition.partition}")
        self._lives[life] = partition
        life.add_done_callback(self._ended)

    def _acquired(self, writer: Writer, taken: frozenset[int]) -> None:
        partition = writer.partition
        self._forget(partition, taken)
        if partition in self._consumer.assignment():
            self._consumer.seek(partition, writer.ledger.position)

    def _give_up(self, partition: TopicPartition) -> None:
        writer = self._writers.pop(partition)
        self._forget(partition, frozenset(writer.ledger.pending))
        self._backlog.drop(partition)
        for life, owned in self._lives.items():
            if owned == partition:
                life.cancel()

    def _forget(self, partition: TopicPartition, offsets: frozenset[int]) -> None:
        for offset in offsets:
            self._lost.add(Origin(topic=partition.topic, partition=partition.partition, offset=offset))
            self._backlog.remove(partition, offset)

    def _ended(self, life: asyncio.Task[None]) -> None:
        del self._lives[life]
        if not life.cancelled() and (error := life.exception()) is not None:
            self._failure = self._failure or error

    def _rejoin(self) -> None:
        self._consumer._coordinator.request_rejoin()

    def _writer(self, origin: Origin) -> Writer | None:
        return self._writers.get(TopicPartition(origin.topic, origin.partition))

    def _steer(self) -> None:
        """Pause and resume what has to be."""
        assigned = self._consumer.assignment()
        for partition, writer in self._writers.items():
            if partition not in assigned:
                continue
            read = self._reads(partition, writer)
            if read and partition in self._paused:
                self._paused.discard(partition)
                self._consumer.resume(partition)
            elif not read and partition not in self._paused:
                self._paused.add(partition)
                self._consumer.pause(partition)

    def _reads(self, partition: TopicPartition, writer: Writer) -> bool:
        if self._stopped or not writer.ready or self._backlog.full:
            return False
        if partition in self._crowded:
            if not writer.ledger.takes(_BATCH):
                return False
            self._crowded.discard(partition)
        shared = self._topics.named(self._topics.requests)
        return self._served is None or partition.topic == shared or partition.topic in self._served

    async def _polled(self) -> dict[TopicPartition, list[ConsumerRecord]]:
        """What one poll brought. A poll goes on past this call if it must: one that is cancelled ruins the watchdog."""
        if self._poll is None:
            most = max(1, min(_BATCH, self._backlog.room))
            poll = self._consumer.getmany(timeout_ms=round(_TURN_S * 1000), max_records=most)
            self._poll = asyncio.create_task(poll, name="poll")
        done, _ = await asyncio.wait({self._poll}, timeout=2 * _TURN_S)
        if not done:
            return {}
        poll_done, self._poll = self._poll, None
        try:
            return poll_done.result()
        except NoOffsetForPartitionError:
            return {}  # asked between the assignment and its pause
        except OffsetOutOfRangeError as error:
            for partition, offset in error.args[0].items():
                await self._out_of_range(partition, offset)
            return {}
        except KafkaError as error:
            raise BrokerUnavailable(f"reading requests: {error}") from error

    def _take(self, batches: dict[TopicPartition, list[ConsumerRecord]]) -> list[Delivery]:
        deliveries = []
        for partition, records in batches.items():
            writer = self._writers.get(partition)
            if writer is None or not writer.ready:
                continue  # a takeover sets the position again
            for record in records:
                attempt = writer.ledger.deliver(record.offset)
                if attempt is not None:
                    delivery = Delivery(record=_record(record), attempt=attempt)
                    self._backlog.add(partition, record.offset, delivery.record.size)
                    deliveries.append(delivery)
            if not writer.ledger.takes(_BATCH):
                self._crowded.add(partition)
        return deliveries

    async def _out_of_range(self, partition: TopicPartition, offset: int) -> None:
        """Retention overtook the backlog: say what is lost, and go on where the log begins."""
        writer = self._writers.get(partition)
        if writer is None or not writer.ready:
            return
        first, _ = await self._offsets.bounds(partition)
        lost = writer.reach(first)
        log.error("bus.retention_overtook", partition=str(partition), offset=offset, first=first, lost=lost)
        self._consumer.seek(partition, writer.ledger.position)

    async def _flush_ready(self, *, within_s: float) -> None:
        flushes = [writer.flushed() for writer in self._writers.values() if writer.ready]
        if flushes:
            _, waiting = await asyncio.wait(flushes, timeout=within_s)
            if waiting:
                log.warning("bus.flush_incomplete", partitions=len(waiting), within_s=within_s)

    async def _leave(self) -> None:
        """Leave the group now: its partitions need not wait for the session to time out."""
        coordinator = self._consumer._coordinator
        if coordinator is not None:
            coordinator._group_instance_id = None  # aiokafka never lets a static member leave
        await self._stop_consumer()

    async def _stop_consumer(self) -> None:
        try:
            async with asyncio.timeout(_STOP_S):
                await self._consumer.stop()
        except TimeoutError:
            await self._consumer._client.close()
        except KafkaError as error:
            log.debug("the consumer did not stop cleanly", reason=repr(error))


def _record(record: ConsumerRecord) -> Record:
    return Record(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp=record.timestamp / 1000,
        key=record.key,
        value=record.value,
        headers=record.headers,
    )
