"""A broker in memory with the parts of a pool that read from it: what of Kafka decides how far a partition is read.

Logs with retention, fencing by epoch, commits with metadata, and aiokafka's consumer as far as reading and looking
through parked partitions use it. ``FakeMember`` reads with the product's own ledger, polling and scan.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from aiokafka import TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from schemas.base import Headers, Origin, Record
from schemas.progress import Progress
from service.consumer.in_flight import InFlight, Limits
from service.consumer.ledger import MAX_METADATA, Ledger
from service.consumer.parked import ParkedScan
from service.consumer.polling import Polling
from service.consumer.rates import Rates
from service.errors import Fenced
from service.ports import Received, Say

SHARED = "requests"
LIMITS = Limits(requests=4096, bytes=256 << 20, tokens=4_000_000)


CAUSES = (AssertionError, asyncio.CancelledError, KeyError)
"""What aiokafka has raised: where no broker of its metadata is left, where it ends tasks of its own, where it errs."""


class FakeBroker:
    """Logs, commits and owners' epochs. ``results`` are the origins that were answered, in order."""

    def __init__(self) -> None:
        self.logs: dict[TopicPartition, list[Record | None]] = {}
        self.starts: dict[TopicPartition, int] = {}
        self.commits: dict[TopicPartition, tuple[int, str]] = {}
        self.epochs: dict[TopicPartition, int] = {}
        self.results: list[Origin] = []
        self.progress: dict[Origin, Progress] = {}
        self.sessions: dict[tuple[TopicPartition, str], Progress] = {}
        self._watchers: list[asyncio.Event] = []

    def append(
        self,
        topic: str,
        value: bytes | None = None,
        headers: Headers = (),
        *,
        partition: int = 0,
        key: bytes | None = None,
        at: float | None = None,
        damage: str | None = None,
    ) -> Origin:
        """A producer's record; ``damage``: what of it can't be read."""
        log = self.logs.setdefault(TopicPartition(topic, partition), [])
        moment = int(1000 * (time.time() if at is None else at)) / 1000
        record = Record(topic, partition, len(log), moment, key, value, tuple(headers), damage)
        log.append(record)
        for watcher in self._watchers:
            watcher.set()
        return Origin(topic=topic, partition=partition, offset=record.offset)

    def watch(self) -> asyncio.Event:
        """An event that is set whenever a record comes."""
        self._watchers.append(asyncio.Event())
        return self._watchers[-1]

    def skip(self, topic: str, count: int = 1, *, partition: int = 0) -> None:
        """Offsets without a record: markers of transactions, or what compaction took."""
        self.logs.setdefault(TopicPartition(topic, partition), []).extend([None] * count)

    def forget_before(self, topic: str, offset: int, *, partition: int = 0) -> None:
        """Retention takes what is older."""
        where = TopicPartition(topic, partition)
        self.starts[where] = max(self.starts.get(where, 0), offset)

    def fence(self, partition: TopicPartition) -> int:
        """A new owner; no earlier one can commit any more."""
        self.epochs[partition] = self.epochs.get(partition, 0) + 1
        return self.epochs[partition]

    def commit(
        self,
        partition: TopicPartition,
        epoch: int,
        ledger: tuple[int, str],
        results: Collection[Origin],
        progress: Mapping[Origin, Progress],
    ) -> None:
        """One transaction: results, the ledger, and what those that are not finished have said. Raises Fenced."""
        if epoch != self.epochs[partition]:
            raise Fenced(f"another owner has {partition}")
        assert len(ledger[1]) <= MAX_METADATA, "a broker refuses this"
        self.commits[partition] = ledger
        self.results.extend(results)
        self.progress |= progress
        for origin in results:
            self.progress.pop(origin, None)

    def bounds(self, partition: TopicPartition) -> tuple[int, int]:
        return self.starts.get(partition, 0), len(self.logs.get(partition, ()))

    def ledger(self, partition: TopicPartition) -> Ledger:
        """What was committed last."""
        return Ledger.decode(*self.commits.get(partition, (self.bounds(partition)[0], "")))


class FakeConsumer:
    """aiokafka's consumer of a FakeBroker. ``reset``: out of range, it goes to the beginning; otherwise it raises."""

    def __init__(self, broker: FakeBroker, *, reset: bool = False) -> None:
        self._broker = broker
        self._reset = reset
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._client = self
        self.polls = 0

    async def start(self) -> None:
        """There is nothing to connect to."""

    async def stop(self) -> None:
        self._positions.clear()

    async def close(self) -> None:
        """As a client."""

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self._positions = dict.fromkeys(partitions, 0)
        self._paused.clear()

    def assignment(self) -> set[TopicPartition]:
        return set(self._positions)

    def pause(self, *partitions: TopicPartition) -> None:
        self._paused |= set(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self._paused -= set(partitions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        assert partition in self._positions, "aiokafka refuses to seek in what is not assigned"
        self._positions[partition] = offset

    def last_stable_offset(self, partition: TopicPartition) -> int:
        return self._broker.bounds(partition)[1]

    async def getmany(
        self, *only: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """Never waits: whoever has to wait for records does so with the broker's event."""
        self.polls += 1
        found: dict[TopicPartition, list[Record]] = {}
        left = max_records or 500
        for partition in only or tuple(self._positions):
            if partition not in self._paused and left:
                records = self._next(partition, left, others=bool(found))
                left -= len(records)
                if records:
                    found[partition] = records
        await asyncio.sleep(0)
        return found

    def _next(self, partition: TopicPartition, most: int, *, others: bool) -> list[Record]:
        position, (first, end) = self._positions[partition], self._broker.bounds(partition)
        if not first <= position <= end:
            if others:
                return []  # told at the next poll, as aiokafka does it
            if not self._reset:
                raise OffsetOutOfRangeError({partition: position})
            position = first
        records: list[Record] = []
        log = self._broker.logs.get(partition, [])
        while position < end and len(records) < most:
            record = log[position]
            position += 1
            if record is not None:
                records.append(record)
        self._positions[partition] = position
        return records


class FakeWriter:
    """A partition's writer whose transactions always succeed, or are fenced."""

    def __init__(self, broker: FakeBroker, partition: TopicPartition) -> None:
        self.partition = partition
        self.ledger = Ledger()
        self.ready = False
        self._broker = broker
        self._epoch = 0
        self._said: dict[Origin, Say] = {}
        self._parts: dict[int, str] = {}
        self._come_to: dict[int, Progress] = {}

    def take_over(self) -> frozenset[int]:
        """Fence, then read the ledger. Gives the delivered offsets that somebody else has finished meanwhile."""
        self._epoch = self._broker.fence(self.partition)
        stored = self._broker.ledger(self.partition)
        stored.epoch = max(stored.epoch + 1, self._epoch)
        taken = self.ledger.adopt(stored)
        self.ready = True
        return taken

    def settle(self, offsets: Collection[int], *, own_marks: bool = True) -> bool:
        """Finish offsets, with a result each, in one transaction; False where another has the partition."""
        origins = list(map(self._origin, offsets))
        try:
            ledger = self.ledger.encode(offsets, own_marks=own_marks)
            said = {origin: progress for origin, say in self._said.items() if (progress := say()) is not None}
            self._broker.commit(self.partition, self._epoch, ledger, origins, said)
        except Fenced:
            self.ready = False
            return False
        self._said.clear()
        for offset in offsets:
            self.ledger.finish(offset)
            name, progress = self._parts.pop(offset, ""), self._come_to.pop(offset, None)
            if progress is not None:
                self._broker.sessions[self.partition, name] = progress
        return True

    def keep(self, offset: int, say: Say) -> None:
        if offset in self.ledger.pending:
            self._said[self._origin(offset)] = say

    def take_progress(self, offset: int) -> Progress | None:
        return self._broker.progress.get(self._origin(offset))

    def session(self, offset: int, name: str, part: int) -> Progress | None:
        self._parts[offset] = name
        progress = self._broker.sessions.get((self.partition, name))
        return progress if progress is not None and part > 0 and len(progress.parts) == part else None

    def keep_session(self, offset: int, progress: Progress) -> None:
        self._come_to[offset] = progress

    def reach(self, position: int) -> int:
        return self.ledger.reach(position)

    def _origin(self, offset: int) -> Origin:
        return Origin(topic=self.partition.topic, partition=self.partition.partition, offset=offset)


class FakeMember:
    """A worker's way of reading, on a FakeBroker: the product's polling, ledgers and scan of what is parked."""

    def __init__(
        self,
        broker: FakeBroker,
        *,
        shared: Iterable[str] = (SHARED,),
        limits: Limits = LIMITS,
        now: Callable[[], float] = time.time,
        marks: dict[Origin, tuple[int, int]] | None = None,
    ) -> None:
        """``marks``: deaths and evidence that earlier owners left at origins, beside what is committed."""
        self._broker = broker
        self._marks = {} if marks is None else marks
        self.consumer = FakeConsumer(broker)
        self.writers: dict[TopicPartition, FakeWriter] = {}
        self.in_flight = InFlight(limits)
        self._lost: set[Origin] = set()
        self.polling = Polling(
            consumer=self.consumer,
            writers=self.writers,
            in_flight=self.in_flight,
            committed=self,
            shared_topics=shared,
            rates=Rates(),
        )
        self.scan = ParkedScan(
            open_consumer=lambda: FakeConsumer(broker, reset=True),
            parked=self.polling.parked,
            deliver=self.polling.pick,
            now=now,
            timer=now,
        )

    async def bounds(self, partition: TopicPartition) -> tuple[int, int]:
        return self._broker.bounds(partition)

    def assign(self, partitions: Collection[TopicPartition]) -> None:
        """What the group gives: what did not come back is lost, what is new is taken over."""
        self.consumer.assign(partitions)
        self.polling.assigned(partitions)
        for partition in self.writers.keys() - set(partitions):
            self._lose(partition, self.writers.pop(partition).ledger.pending)
            self.in_flight.drop(partition)
        for partition in partitions:
            writer = self.writers.setdefault(partition, FakeWriter(self._broker, partition))
            if not writer.ready:
                self.take_over(writer)

    def take_over(self, writer: FakeWriter) -> None:
        """Become the partition's owner, and go on where its ledger stands."""
        self._lose(writer.partition, writer.take_over())
        self.polling.acquired(writer)

    def _lose(self, partition: TopicPartition, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self._lost.add(Origin(topic=partition.topic, partition=partition.partition, offset=offset))
            self.in_flight.remove(partition, offset)

    async def receive(self) -> Received:
        """One turn of reading."""
        for origin in [origin for origin in self._marks if self._writer(origin)]:
            self.writers[TopicPartition(origin.topic, origin.partition)].ledger._before[origin.offset] = (
                self._marks.pop(origin)
            )
        deliveries = await self.polling.turn()
        lost, self._lost = frozenset(self._lost), set()
        return Received(deliveries, lost)

    def settle(self, origins: Sequence[Origin]) -> bool:
        """Settle origins of one partition, in one transaction; False where they are another's to do."""
        writer = self._writer(origins[0])
        if writer is None or not all(origin.offset in writer.ledger.pending for origin in origins):
            return False
        if not writer.settle([origin.offset for origin in origins]):
            return False
        for origin in origins:
            self.in_flight.remove(writer.partition, origin.offset)
        return True

    def started(self, origin: Origin, *, alone: bool) -> bool:
        writer = self._writer(origin)
        if writer is None or origin.offset not in writer.ledger.pending:
            return False
        writer.ledger.start(origin.offset, alone=alone)
        return True

    def withdraw(self, origin: Origin) -> None:
        if (writer := self._writer(origin)) is not None:
            writer.ledger.withdraw(origin.offset)

    def keep(self, origin: Origin, say: Say) -> None:
        if (writer := self._writer(origin)) is not None:
            writer.keep(origin.offset, say)

    def session(self, origin: Origin, name: str, part: int) -> Progress | None:
        writer = self._writer(origin)
        return None if writer is None else writer.session(origin.offset, name, part)

    def keep_session(self, origin: Origin, progress: Progress) -> None:
        if (writer := self._writer(origin)) is not None:
            writer.keep_session(origin.offset, progress)

    def engine_died(self, culprit: Origin | None) -> None:
        blamed = None if culprit is None else self._writer(culprit)
        for writer in self.writers.values():
            writer.ledger.engine_died(culprit.offset if culprit is not None and writer is blamed else None)

    def flush(self, *, own_marks: bool = True) -> None:
        """Commit all that was said, and marks: those of runs here, too, unless these may end now without a death."""
        for writer in self.writers.values():
            if writer.ready:
                writer.settle([], own_marks=own_marks)

    def partitions(self) -> dict[str, tuple[int, ...]]:
        """What is assigned, by topic."""
        owned: dict[str, list[int]] = {}
        for topic, partition in sorted(self.writers):
            owned.setdefault(topic, []).append(partition)
        return {topic: tuple(numbers) for topic, numbers in owned.items()}

    def _writer(self, origin: Origin) -> FakeWriter | None:
        return self.writers.get(TopicPartition(origin.topic, origin.partition))
