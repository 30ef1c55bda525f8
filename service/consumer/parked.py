"""Answering in time what is parked: looking through topics that are not read for what must not wait for its turn."""

import asyncio
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import structlog
from aiokafka import TopicPartition

from schemas.base import Record
from service.consumer.ledger import Ledger
from service.errors import BrokerUnavailable
from service.kafka.connection import close_consumer
from service.kafka.reader import as_unavailable
from service.kafka.records import Consumer
from service.settings import KafkaSettings

log = structlog.get_logger(__name__)

Due = Callable[[Record], float]
"""When a parked request is to be handed over, in seconds since the epoch; infinity: when its model has its turn."""
_KEPT = 4096
"""Moments remembered per partition; there may be millions of requests."""
_BATCH = 500
_LOOKS = 40
"""Batches of a turn, so that what is due meanwhile does not wait for the end of a long look."""
_TURN_S = 1.0
_READ_MS = 2000
_LOOK_MS = 200
_REST = 5.0
"""Looking through everything again waits for so many times as long as that took."""


@dataclass(slots=True)
class Shelf:
    """What is known of one parked partition: the nearest moments, and that there are others from ``horizon`` on.

    ``ledger`` is that of the partition's owner here; one that was lost and given again has another.
    """

    ledger: Ledger
    looked_to: int
    placed: bool = False
    """Whether the consumer stands at ``looked_to``."""
    most: int = _KEPT
    moments: list[tuple[float, int]] = field(default_factory=list)
    horizon: float = math.inf

    def note(self, moment: float, offset: int) -> None:
        """A request at ``offset`` is due at ``moment``."""
        if moment == math.inf or moment >= self.horizon:
            self.horizon = min(self.horizon, moment)
            return
        insort(self.moments, (moment, offset))
        if len(self.moments) > self.most:
            self.horizon, _ = self.moments.pop()

    def take(self, now: float) -> list[int]:
        """The offsets that are due."""
        due = [offset for moment, offset in self.moments if moment <= now]
        del self.moments[: len(due)]
        return due


def scanning_consumer(kafka: KafkaSettings) -> Consumer:
    """A consumer without a group, for partitions that the group's member does not read now."""
    return Consumer(
        kafka,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        fetch_max_wait_ms=200,
    )


class ParkedScan:
    """Hands over parked requests that are due: expired or cancelled. Memory does not grow with what is parked.

    New records are looked at once. Everything is looked at again when a moment comes of which only the horizon is
    known, and when ``look_again`` says that ``due`` may answer differently now.

    ``parked`` gives the ledgers of the partitions that are parked at that moment; ``deliver`` takes a record, or says
    that it can't now. ``now`` is the clock of ``due``, in seconds since the epoch.
    """

    def __init__(
        self,
        *,
        open_consumer: Callable[[], Consumer],
        parked: Callable[[], Mapping[TopicPartition, Ledger]],
        deliver: Callable[[Record], bool],
        now: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_consumer = open_consumer
        self._parked = parked
        self._deliver = deliver
        self._now = now
        self._timer = timer
        self._due: Due | None = None
        self._consumer: Consumer | None = None
        self._shelves: dict[TopicPartition, Shelf] = {}
        self._wanted = False
        self._rest_until = 0.0

    def look_again(self, due: Due) -> None:
        """From now on ``due`` says what must not wait."""
        self._due = due
        self._wanted = True

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    with as_unavailable("requests that are parked"):
                        await self.turn()
                except BrokerUnavailable as error:
                    log.warning("parked_scan.failed", reason=str(error))
                    await self.close()
                await asyncio.sleep(_TURN_S)
        finally:
            await self.close()

    async def turn(self) -> None:
        """Look at some more records, and hand over what is due by now. Raises whatever aiokafka raises."""
        parked = self._parked()
        if self._due is None or not parked:
            await self.close()
            return
        consumer = await self._opened(parked)
        due = self._due  # which may be another one by now; from here on there is a new look for whatever is said
        self._begin_anew(parked)
        began = self._timer()
        for _ in range(_LOOKS):
            if not await self._look(consumer, due):
                break
            self._rest_until = self._timer() + _REST * (self._timer() - began)
        for partition, shelf in self._shelves.items():
            if offsets := shelf.take(self._now()):
                await self._hand_over(consumer, partition, shelf, set(offsets))

    def _begin_anew(self, parked: Mapping[TopicPartition, Ledger]) -> None:
        """Partitions that are parked now, and what has to be looked through again."""
        again, now = self._wanted and self._timer() >= self._rest_until, self._now()
        self._wanted = self._wanted and not again
        for partition in self._shelves.keys() - parked.keys():
            del self._shelves[partition]
        for partition, ledger in parked.items():
            shelf = self._shelves.get(partition)
            overdue = shelf is not None and shelf.horizon <= now and self._timer() >= self._rest_until
            if shelf is None or shelf.ledger is not ledger or again or overdue:
                self._shelves[partition] = Shelf(ledger, looked_to=ledger.position)

    async def _look(self, consumer: Consumer, due: Due) -> bool:
        """Note the moments of some more records; False where there are none."""
        for partition, shelf in self._shelves.items():
            if not shelf.placed:
                consumer.seek(partition, shelf.looked_to)
                shelf.placed = True
        batches = await consumer.getmany(timeout_ms=_LOOK_MS, max_records=_BATCH)
        for partition, records in batches.items():
            shelf = self._shelves[partition]
            for record in records:
                if not (shelf.ledger.finished(record.offset) or record.offset in shelf.ledger.pending):
                    shelf.note(due(record), record.offset)
            shelf.looked_to = records[-1].offset + 1
        return bool(batches)

    async def _hand_over(self, consumer: Consumer, partition: TopicPartition, shelf: Shelf, due: set[int]) -> None:
        """Read these records once more, and deliver them; those for which there is no room now, a little later."""
        shelf.placed = False
        while due:
            first = min(due)
            consumer.seek(partition, first)
            found = await consumer.getmany(partition, timeout_ms=_READ_MS, max_records=_BATCH)
            records = found.get(partition, ())
            refused = next((one for one in records if one.offset in due and not self._deliver(one)), None)
            if refused is not None or not records:
                for offset in due:
                    if refused is None or offset >= refused.offset:
                        shelf.note(self._now() + _TURN_S, offset)
                return
            due = {offset for offset in due if offset > records[-1].offset}

    async def _opened(self, partitions: Iterable[TopicPartition]) -> Consumer:
        wanted = set(partitions)
        if self._consumer is None:
            self._consumer = consumer = self._open_consumer()
            await consumer.start()
        if self._consumer.assignment() != wanted:
            self._consumer.assign(list(wanted))
            for shelf in self._shelves.values():
                shelf.placed = False
        return self._consumer

    async def close(self) -> None:
        """Forget what was seen, and close the consumer."""
        consumer, self._consumer = self._consumer, None
        self._shelves.clear()
        if consumer is not None:
            await close_consumer(consumer)
