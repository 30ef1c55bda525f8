"""Reading what is assigned, as far as there is room: polling never stops, partitions pause."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError

from schemas.base import Record
from schemas.requests import Attempt
from service.consumer.committed import CommittedLedgers
from service.consumer.in_flight import InFlight
from service.consumer.ledger import Ledger
from service.consumer.membership import joins_again
from service.consumer.rates import Rates
from service.consumer.writer import LedgerWriter
from service.errors import BrokerUnavailable, PositionLost
from service.kafka.reader import as_unavailable
from service.kafka.records import Consumer
from service.ports import Delivery, Unreadable

log = structlog.get_logger(__name__)

_BATCH = 256
"""Records of one turn of reading, at most."""
_RESERVE = 64
"""Deliveries for which a ledger keeps room: parked requests that are picked early leave it so much to be read with."""
_TURN_S = 0.25


class Polling:
    """The consumer's side of the partitions in ``writers``. What is assigned starts paused; its writer's takeover
    sets the position, and then it is read.

    ``shared_topics`` are those that are read whichever models are served; ``rates`` learn what comes.
    """

    def __init__(
        self,
        *,
        consumer: Consumer,
        writers: Mapping[TopicPartition, LedgerWriter],
        in_flight: InFlight,
        committed: CommittedLedgers,
        shared_topics: Iterable[str],
        rates: Rates,
    ) -> None:
        self._consumer = consumer
        self._writers = writers
        self._in_flight = in_flight
        self._committed = committed
        self._shared_topics = frozenset(shared_topics)
        self._rates = rates
        self._served: frozenset[str] | None = None
        self._held_back: frozenset[TopicPartition] = frozenset()
        self.stopped = False
        self._without_room: set[TopicPartition] = set()
        """Partitions of which less was delivered than read: their ledgers would not take more."""
        self._picked: list[tuple[LedgerWriter, Delivery]] = []
        self._poll: asyncio.Task[dict[TopicPartition, list[Record]]] | None = None
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._woken = self._loop.create_future()
        self.paused: set[TopicPartition] = set()
        self.turned_at = self._now()
        """When a poll last came back without an error of the group's."""
        self.overtaken = 0
        """Requests that retention took before they were read."""

    @property
    def unreadable(self) -> int:
        """Records, and batches of them, that could not be decoded."""
        return self._consumer.decoding.count

    def take_unreadable(self) -> tuple[Unreadable, ...]:
        """Which those were, since this was asked last."""
        found = tuple(self._consumer.decoding.unreadable)
        self._consumer.decoding.unreadable.clear()
        return found

    @property
    def between_polls(self) -> bool:
        """Whether positions are where the last delivery ended: no poll has records that were not taken."""
        return self._poll is None or not self._poll.done()

    def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """A new generation: pause flags are lost with the old one."""
        self._consumer.pause(*partitions)
        self.paused = set(partitions)
        self._without_room.clear()
        for partition in partitions:
            writer = self._writers.get(partition)
            # A position keeps aiokafka from looking for one; until the takeover it is not read from.
            self._consumer.seek(partition, writer.ledger.position if writer else 0)

    def acquired(self, writer: LedgerWriter) -> None:
        """Go on where the ledger stands."""
        if writer.partition in self._consumer.assignment():
            self._consumer.seek(writer.partition, writer.ledger.position)

    def serve_only(self, topics: Iterable[str] | None) -> None:
        """Read these of the models' topics only; None: all of them."""
        self._served = None if topics is None else frozenset(topics)

    def hold_back(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these no further, though they are served, until this is called without them."""
        self._held_back = frozenset(TopicPartition(*partition) for partition in partitions)

    def is_held_back(self, partition: TopicPartition) -> bool:
        """Whether it is not read for the sake of the others."""
        return partition in self._held_back

    def is_served(self, partition: TopicPartition) -> bool:
        """Whether the partition is of a topic that is read."""
        return self._served is None or partition.topic in self._shared_topics | self._served

    def waits_for_room(self, partition: TopicPartition) -> bool:
        """Whether it is not read because of what is delivered and not settled, here as a whole or of this partition."""
        return self._in_flight.full or partition in self._without_room

    def parked(self) -> dict[TopicPartition, Ledger]:
        """The ledgers of the partitions that are not read because their model is not served."""
        if self.stopped:
            return {}
        return {p: w.ledger for p, w in self._writers.items() if self._is_parked(p, w)}

    def pick(self, record: Record) -> bool:
        """Deliver a parked record before its turn; False where there is no room for it now, or it is not parked."""
        partition = TopicPartition(record.topic, record.partition)
        writer = self._writers.get(partition)
        if writer is None or self.stopped or not self._is_parked(partition, writer):
            return False
        if self._in_flight.full or not writer.ledger.takes(1 + _RESERVE, upto=record.offset + 1):
            return False
        attempt = writer.ledger.pick(record.offset)
        if attempt is not None:
            self._picked.append((writer, delivery := self._delivery(writer, record, attempt)))
            self._rates.add(partition, delivery.record.size)
        return True

    def wake(self) -> None:
        """Let the turn under way end: there is something to tell that no record brings."""
        if not self._woken.done():
            self._woken.set_result(None)

    def stop(self) -> None:
        """Read nothing more."""
        self.stopped = True
        self._steer()

    async def turn(self) -> tuple[Delivery, ...]:
        """What comes within a fraction of a second. Never cancel it. Raises BrokerUnavailable, PositionLost."""
        self._steer()
        deliveries = self._take(await self._polled())
        picked = [delivery for writer, delivery in self._picked if self._is_current(writer)]
        self._picked.clear()
        return (*picked, *deliveries)

    def close(self) -> None:
        """The consumer has stopped."""
        if self._poll is not None:
            self._poll.cancel()

    # --- inside ---

    def _steer(self) -> None:
        """Pause and resume what has to be."""
        assigned = self._consumer.assignment()
        for partition, writer in self._writers.items():
            if partition not in assigned:
                continue
            read = self._reads(partition, writer)
            if read and partition in self.paused:
                self.paused.discard(partition)
                self._consumer.resume(partition)
            elif not read and partition not in self.paused:
                self.paused.add(partition)
                self._consumer.pause(partition)

    def _reads(self, partition: TopicPartition, writer: LedgerWriter) -> bool:
        if self.stopped or not writer.ready or self._in_flight.full or self.is_held_back(partition):
            return False
        if partition in self._without_room:
            if writer.ledger.pending and not writer.ledger.takes(_RESERVE):
                return False  # until something that is pending ends
            self._without_room.discard(partition)
        return self.is_served(partition)

    def _is_parked(self, partition: TopicPartition, writer: LedgerWriter) -> bool:
        return writer.ready and partition in self.paused and not self.is_served(partition)

    def _is_current(self, writer: LedgerWriter) -> bool:
        """Whether its partition is still this writer's, and was not lost and given again meanwhile."""
        return self._writers.get(writer.partition) is writer

    async def _polled(self) -> dict[TopicPartition, list[Record]]:
        """What one poll brought. A poll goes on past this call if it must: one that is cancelled ruins the watchdog."""
        if self._poll is None:
            self._poll = asyncio.create_task(self._get(), name="poll")
        try:
            async with asyncio.timeout(2 * _TURN_S):
                await self._woken
        except TimeoutError:
            pass
        if self._woken.done():
            self._woken = self._loop.create_future()
        if not self._poll.done():
            return {}
        poll_done, self._poll = self._poll, None
        try:
            records = poll_done.result()
        except NoOffsetForPartitionError:
            records = {}  # asked between the assignment and its pause
        except OffsetOutOfRangeError as error:
            for partition, offset in error.args[0].items():
                await self._out_of_range(partition, offset)
            records = {}
        except KafkaError as error:
            if not joins_again(self._consumer, error):
                raise BrokerUnavailable(f"reading requests: {error}") from error
            log.warning("bus.not_joined", reason=str(error))
            await asyncio.sleep(_TURN_S)
            return {}
        self.turned_at = self._now()
        return records

    async def _get(self) -> dict[TopicPartition, list[Record]]:
        """One poll. It wakes the turn itself: that of a task that waits for tasks comes a round of the loop later."""
        try:
            most = max(1, min(_BATCH, self._in_flight.room))
            with as_unavailable("reading requests", KafkaError):
                found: dict[TopicPartition, list[Record]] = await self._consumer.getmany(
                    timeout_ms=round(_TURN_S * 1000), max_records=most
                )
            return found
        finally:
            self.wake()

    def _take(self, batches: dict[TopicPartition, list[Record]]) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for partition, records in batches.items():
            writer = self._writers.get(partition)
            if writer is None or not writer.ready:
                continue  # a takeover sets the position again
            left = self._deliver(writer, records, deliveries)
            if left:
                self._without_room.add(partition)
                self._consumer.seek(partition, left[0].offset)
        return deliveries

    def _deliver(self, writer: LedgerWriter, records: Sequence[Record], deliveries: list[Delivery]) -> Sequence[Record]:
        """Deliver as many as the ledger has room for; returns the others, which are to be read again."""
        bytes_before, requests_before = self._in_flight.bytes, self._in_flight.requests
        while records and (count := writer.ledger.room([record.offset for record in records])):
            for record in records[:count]:
                attempt = writer.ledger.deliver(record.offset)
                if attempt is not None:
                    deliveries.append(self._delivery(writer, record, attempt))
            records = records[count:]
        if came := self._in_flight.requests - requests_before:
            self._rates.add(writer.partition, self._in_flight.bytes - bytes_before, came)
        return records

    def _delivery(self, writer: LedgerWriter, record: Record, attempt: Attempt) -> Delivery:
        size = record.size
        self._in_flight.add(writer.partition, record.offset, size)
        evidence, progress = writer.ledger.evidence(record.offset), writer.take_progress(record.offset)
        return Delivery(record=record, attempt=attempt, evidence=evidence, progress=progress)

    async def _out_of_range(self, partition: TopicPartition, offset: int) -> None:
        """Retention overtook the backlog: say what is lost, and go on where the log begins.

        Raises PositionLost where the log ends before the position: what of it was answered, only an operator can know.
        """
        writer = self._writers.get(partition)
        if writer is None or not writer.ready:
            return
        first, end = await self._committed.bounds(partition)
        if not (self._is_current(writer) and writer.ready and partition in self._consumer.assignment()):
            return  # another owner's by now, who is told of it himself
        if offset > end:
            raise PositionLost(
                f"{partition.topic}/{partition.partition}: the committed position {offset} lies beyond the end, {end}: "
                "the topic was made anew, or has lost records. Stop the pool and say where to go on: "
                f"gearshift offsets reset beginning|end --topic {partition.topic} --partition {partition.partition}"
            )
        lost = writer.reach(first)
        self.overtaken += lost
        log.error("bus.retention_overtook", partition=str(partition), offset=offset, first=first, lost=lost)
        self._consumer.seek(partition, writer.ledger.position)
