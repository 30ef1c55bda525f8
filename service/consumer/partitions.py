"""The partitions that are this worker's: a writer for each, and what becomes of the work when one goes."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from aiokafka import TopicPartition

from schemas.base import Origin, Outgoing
from schemas.progress import Progress
from service.consumer.in_flight import InFlight
from service.consumer.writer import LedgerWriter
from service.errors import BrokerUnavailable
from service.ports import Say

log = structlog.get_logger(__name__)


class OpenWriter(Protocol):
    """Makes a partition's writer, which ``acquired`` follows as Writer says."""

    def __call__(
        self, partition: TopicPartition, acquired: Callable[[LedgerWriter, frozenset[int]], None]
    ) -> LedgerWriter: ...


class OwnedPartitions:
    """Writers by partition, each the partition's owner by Kafka's fencing; the port Settlements on top of them.

    ``acquired`` is told of each takeover: reading goes on at that ledger's position. ``failure`` is whatever ended
    a writer; nothing can go on then.
    """

    def __init__(
        self,
        *,
        writers: dict[TopicPartition, LedgerWriter],
        open_writer: OpenWriter,
        in_flight: InFlight,
        acquired: Callable[[LedgerWriter], None],
    ) -> None:
        self.writers = writers
        self._open_writer = open_writer
        self._in_flight = in_flight
        self._tell_acquired = acquired
        self._lives: dict[asyncio.Task[None], LedgerWriter] = {}
        self._closing = False
        self._lost: set[Origin] = set()
        self.failure: BaseException | None = None

    # --- whose a partition is ---

    def reassign(self, assigned: set[TopicPartition], *, missed: bool) -> None:
        """Give up what is not ours any more, and take over what is new.

        ``missed``: there was an assignment that we did not hear of, so what is ours may have been another's.
        """
        for partition in self.writers.keys() - assigned:
            self._give_up(partition)
        for partition in assigned:
            writer = self.writers.get(partition)
            if writer is None:
                self._acquire(partition)
            else:
                writer.keep_marks()
                if missed or writer.fenced:
                    writer.take_over_again()

    def take_lost(self) -> frozenset[Origin]:
        """The origins whose work is another worker's since this was last asked."""
        lost, self._lost = frozenset(self._lost), set()
        return lost

    def partitions(self) -> dict[str, tuple[int, ...]]:
        """What is ours, by topic."""
        owned: dict[str, list[int]] = {}
        for topic, partition in sorted(self.writers):
            owned.setdefault(topic, []).append(partition)
        return {topic: tuple(partitions) for topic, partitions in owned.items()}

    async def close(self) -> None:
        """End all writers; what is not committed by now is nobody's until the next owner comes."""
        self._closing = True
        for life in self._lives:
            life.cancel()
        if self._lives:
            await asyncio.wait(self._lives)

    # --- settling ---

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        """Mark a run as started; one that is alone waits until that is committed. False: it is not ours to run."""
        writer = self._writer(origin)
        if writer is None or not writer.started(origin.offset, alone=alone):
            return False
        if alone:
            await writer.flushed()
        return origin.offset in writer.ledger.pending

    def engine_died(self, culprit: Origin | None) -> None:
        """The engine died, and this worker did not: ``culprit`` had it to itself, and no other run had."""
        blamed = None if culprit is None else self._writer(culprit)
        for writer in self.writers.values():
            writer.engine_died(culprit.offset if culprit is not None and writer is blamed else None)

    def withdraw(self, origin: Origin) -> None:
        """Take a start mark back."""
        writer = self._writer(origin)
        if writer is not None:
            writer.withdraw(origin.offset)

    def keep(self, origin: Origin, say: Say) -> None:
        """Keep what a run has said, which is asked when that is written."""
        writer = self._writer(origin)
        if writer is not None:
            writer.keep(origin.offset, say)

    def session(self, origin: Origin, name: str, part: int) -> Progress | None:
        """What a session had come to before this part of it."""
        writer = self._writer(origin)
        return None if writer is None else writer.session(origin.offset, name, part)

    def keep_session(self, origin: Origin, progress: Progress) -> None:
        """Keep what a session has come to with this part of it."""
        writer = self._writer(origin)
        if writer is not None:
            writer.keep_session(origin.offset, progress)

    async def settle(self, origin: Origin, records: Sequence[Outgoing], *, hurry: bool = True) -> bool:
        """Publish ``records`` and finish ``origin``, both or none; without ``hurry``, with what is committed next.

        True: committed. False: another worker's to do. Raises RecordRefused.
        """
        writer = self._writer(origin)
        if writer is None:
            return False
        committed = await writer.settle(origin.offset, records, hurry=hurry)
        if committed:
            self._in_flight.remove(writer.partition, origin.offset)
        return committed

    def pass_over(self, origin: Origin) -> None:
        """Finish ``origin`` with the next commit, without publishing anything: it asks for nothing."""
        writer = self._writer(origin)
        if writer is not None:
            done = writer.settle(origin.offset, (), hurry=False)
            done.add_done_callback(lambda _: self._in_flight.remove(writer.partition, origin.offset))

    async def flush(self, *, within_s: float) -> None:
        """Commit everything that waits, attempt marks too; with brokers that do not answer, not for ever.

        A partition that is being taken over is waited for where something is marked there, unless it is another's.
        """
        waited_for = (each for each in self.writers.values() if each.ready or (each.ledger.marks and not each.fenced))
        flushes = [writer.flushed() for writer in waited_for]
        if flushes:
            _, waiting = await asyncio.wait(flushes, timeout=within_s)
            if waiting:
                log.warning("bus.flush_incomplete", partitions=len(waiting), within_s=within_s)

    # --- inside ---

    def _writer(self, origin: Origin) -> LedgerWriter | None:
        return self.writers.get((origin.topic, origin.partition))

    def _acquire(self, partition: TopicPartition) -> None:
        writer = self._open_writer(partition, self._acquired)
        self.writers[partition] = writer
        life = asyncio.create_task(writer.run(), name=f"writer {partition.topic}/{partition.partition}")
        self._lives[life] = writer
        life.add_done_callback(self._ended)

    def _acquired(self, writer: LedgerWriter, taken: frozenset[int]) -> None:
        self._forget(writer.partition, taken)
        self._tell_acquired(writer)

    def _give_up(self, partition: TopicPartition) -> None:
        writer = self.writers.pop(partition)
        self._forget(partition, frozenset(writer.ledger.pending))
        self._in_flight.drop(partition)
        for life, owned in self._lives.items():
            if owned is writer:
                life.cancel()

    def _forget(self, partition: TopicPartition, offsets: frozenset[int]) -> None:
        for offset in offsets:
            self._lost.add(Origin(topic=partition.topic, partition=partition.partition, offset=offset))
            self._in_flight.remove(partition, offset)

    def _ended(self, life: asyncio.Task[None]) -> None:
        writer = self._lives.pop(life)
        error: BaseException | None
        if not life.cancelled():
            error = life.exception()
        elif self._closing or self.writers.get(writer.partition) is not writer:
            error = None
        else:  # aiokafka lets cancellations of its own tasks out; without its writer a partition is never read
            error = BrokerUnavailable(f"{writer.partition}: the client's own cancellation ended its writer")
        self.failure = self.failure or error
