"""Reading requests as a member of the group, and settling each exactly once."""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import structlog
from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from schemas.base import Origin, Outgoing
from service.bus.backlog import Backlog, Limits
from service.bus.membership import close_consumer, leave, new_assignor, new_member
from service.bus.offsets import Offsets
from service.bus.tail import as_record
from service.bus.transactions import Transactions
from service.bus.vitals import Complaint, Progress, check, trouble
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
_MARK_DELAY_S = 0.05
"""A start mark waits this long for a settlement that takes it along."""
_LOOK_S = 1.0


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
        self._assignor = new_assignor()
        self._consumer = new_member(settings, self._assignor)
        self._writers: dict[TopicPartition, Writer] = {}
        self._lives: dict[asyncio.Task[None], TopicPartition] = {}
        self._paused: set[TopicPartition] = set()
        self._crowded: set[TopicPartition] = set()
        self._lost: set[Origin] = set()
        self._poll: asyncio.Task[dict[TopicPartition, list[ConsumerRecord]]] | None = None
        self.overtaken = 0
        """Requests that retention took before they were read."""
        self._generation = -1
        self.rebalances = 0
        """Assignments that the group has made so far."""
        self._stopped = False
        self._failure: BaseException | None = None
        self._now = asyncio.get_running_loop().time
        self._turned_at = self._fetched_at = self._looked_at = self._now()
        self._progress = Progress()

    async def __aenter__(self) -> Self:
        try:
            await self._offsets.open()
            await self._consumer.start()
        except (KafkaError, OSError, BrokerUnavailable) as error:
            await self._offsets.close()
            await close_consumer(self._consumer)
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
        await leave(self._consumer)
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
        self._look()
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

    # --- how it is ---

    def trouble(self) -> str | None:
        """What has not moved for too long, in words; None while all is well."""
        return trouble(self._complaints(), now=self._now(), after_s=self._settings.stall_after_s)

    def lags(self) -> dict[str, int]:
        """Requests of our partitions that are not read yet, by topic, as far as the last fetches told."""
        lags: dict[str, int] = {}
        for partition, writer in self._writers.items():
            lags[partition.topic] = lags.get(partition.topic, 0) + self._lag(partition, writer)
        return lags

    @property
    def outstanding(self) -> Backlog:
        """What is delivered and not settled."""
        return self._backlog

    # --- settling ---

    async def started(self, origin: Origin, *, alone: bool = False) -> None:
        """Mark a run as started; one that is alone waits until that is committed."""
        writer = self._writer(origin)
        if writer is not None:
            writer.started(origin.offset, alone=alone)
            if alone:
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
        return self.rebalances > 0

    def lag(self) -> dict[str, int]:
        """Records of each topic that are assigned here and not read yet, as far as the last fetches told."""
        behind: dict[str, int] = {}
        for partition in self._consumer.assignment() & self._writers.keys():
            stable = self._consumer.last_stable_offset(partition)
            unread = 0 if stable is None else max(0, stable - self._writers[partition].ledger.position)
            behind[partition.topic] = behind.get(partition.topic, 0) + unread
        return behind

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
        self.rebalances += 1
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

    def _look(self) -> None:
        """Once a second: what moved since, what lies behind the last record, and whether to give up."""
        now = self._now()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        assigned = self._consumer.assignment()
        read = {p: w for p, w in self._writers.items() if p in assigned and p not in self._paused}
        silent = [self._consumer.last_poll_timestamp(partition) for partition in read]
        if not read or max((at for at in silent if at), default=0) > 1000 * (time.time() - 2 * _LOOK_S):
            self._fetched_at = now
        self._progress.update({p: w.ledger.position for p, w in read.items() if self._lag(p, w)}, now)
        if self._poll is None or not self._poll.done():  # or positions would be past records that were not taken
            for partition, writer in read.items():
                self._step_over_tail(partition, writer)
        check(self._complaints(), now=now, after_s=self._settings.exit_after_stall_s)

    def _complaints(self) -> list[Complaint]:
        complaints = [
            Complaint("the group gives no assignment, or the poll loop does not turn", self._turned_at),
            Complaint("no broker answers a fetch", self._fetched_at),
        ]
        for (topic, partition), writer in self._writers.items():
            if writer.stuck_since is not None:
                complaints.append(Complaint(f"{topic}/{partition} can't be committed to", writer.stuck_since))
            standing = self._progress.since((topic, partition))
            if standing is not None:
                complaints.append(Complaint(f"{topic}/{partition} has lag and is not read", standing))
        return complaints

    def _lag(self, partition: TopicPartition, writer: Writer) -> int:
        if partition not in self._consumer.assignment():
            return 0
        end = self._consumer.last_stable_offset(partition)
        return max(0, (end or 0) - writer.ledger.position)

    def _step_over_tail(self, partition: TopicPartition, writer: Writer) -> None:
        """Commit past a marker that ends the log; otherwise a lag of one would stay, and the pool never scale to 0."""
        if writer.ready and not writer.ledger.pending:
            position = self._consumer._subscription.subscription.assignment.state_value(partition).position
            if position is not None:
                writer.reach(position)

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
        self._turned_at = self._now()
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
                    alone = writer.ledger.alone(record.offset)
                    delivery = Delivery(record=as_record(record), attempt=attempt, alone=alone)
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
        self.overtaken += lost
        log.error("bus.retention_overtook", partition=str(partition), offset=offset, first=first, lost=lost)
        self._consumer.seek(partition, writer.ledger.position)

    async def _flush_ready(self, *, within_s: float) -> None:
        flushes = [writer.flushed() for writer in self._writers.values() if writer.ready]
        if flushes:
            _, waiting = await asyncio.wait(flushes, timeout=within_s)
            if waiting:
                log.warning("bus.flush_incomplete", partitions=len(waiting), within_s=within_s)
