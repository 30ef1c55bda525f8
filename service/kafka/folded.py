"""Topics that are folded into an index as they are read: for as long as the process lives, from their beginning.

What an index says is what the log says; ``read_up`` waits until it knows all that is written by now.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.base import Record
from service.errors import BrokerUnavailable, GearshiftError
from service.kafka.connection import close_consumer, start
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader, as_unavailable, partitions_of
from service.kafka.records import Consumer
from service.settings import KafkaSettings, Settings

log = structlog.get_logger(__name__)
_AGAIN_AFTER_S = 1.0
_WITHIN_S = 15.0
_FETCHED_AT_ONCE = 500
_LEADER_WITHIN_S, _LEADER_AGAIN_S = 2.0, 0.2
"""How long a partition may be without a leader, as during an election, and how often that is looked at."""


class FoldedLog:
    """Hands each record of some topics to ``take``, which folds it, and looks records up by their places.

    ``tidy`` is called now and then. Opened with ``async with``, when all that was there has been read: that may take
    long, but not ``startup_timeout_s`` without coming any further.
    """

    def __init__(
        self,
        *,
        kafka: KafkaSettings,
        topics: Collection[str],
        take: Callable[[Record], None],
        tidy: Callable[[], None],
    ) -> None:
        self._kafka = kafka
        self._topics = tuple(topics)
        self._take = take
        self._tidy = tidy
        self._looker = Consumer(
            kafka,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=100,
        )
        self._looking = asyncio.Lock()
        self._looked_to: tuple[TopicPartition, int] | None = None
        """Where the looker is: what it has fetched from there on is there already."""
        self._read: dict[TopicPartition, int] = {}
        """The next offset of each partition."""
        self._told: dict[TopicPartition, int] = {}
        """The same, as whoever waits for it knows it."""
        self._sizes: dict[str, int] = {}
        """How many partitions topics have that were looked for."""
        self._moved = asyncio.Event()
        self._closed = False
        self._watchers: list[Callable[[], None]] = []
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            opening.push_async_callback(close_consumer, self._looker)
            try:
                await start(self._looker)
            except (KafkaError, OSError) as error:
                raise BrokerUnavailable(f"{self._named}: {error}") from error
            known = asyncio.Event()
            opening.push_async_callback(ended, asyncio.create_task(self._read_on(known), name=f"log {self._named}"))
            silent_s = self._kafka.startup_timeout_s
            if not await while_progressing(known, lambda: dict(self._read), silent_s=silent_s):
                raise BrokerUnavailable(f"{self._named}: nothing of it was read for {silent_s:g} s")
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._open.aclose()
        finally:
            self._closed = True
            self._moved.set()

    @property
    def _named(self) -> str:
        return ", ".join(self._topics)

    # --- how far it has been read ---

    def read_to(self, where: TopicPartition) -> int:
        """The offset before which all of a partition is known."""
        return self._read.get(where, 0)

    def partitions(self, topic: str) -> list[TopicPartition]:
        """Those of a topic, by number."""
        return sorted(where for where in self._read if where.topic == topic)

    async def read_up(self, topic: str) -> None:
        """Come to know what a topic holds now. Raises BrokerUnavailable."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                ends = await self._looker.end_offsets(self.partitions(topic))
        except (KafkaError, TimeoutError) as error:
            raise BrokerUnavailable(f"{topic}: {error!r}") from error
        await self.until_read(ends)

    async def until_read(self, ends: dict[TopicPartition, int]) -> None:
        """Wait until all before these offsets is known. Raises BrokerUnavailable."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                while any(self.read_to(where) < end for where, end in ends.items()):
                    await self._further()
        except TimeoutError:
            topics = ", ".join({where.topic for where in ends})
            raise BrokerUnavailable(f"{topics}: what was written was not read within {_WITHIN_S:g} s") from None

    async def moves(self, *, within_s: float) -> None:
        """Return when the index has come further, or the time is over. Raises BrokerUnavailable once it is closed."""
        try:
            async with asyncio.timeout(within_s):
                await self._further()
        except TimeoutError:
            return

    async def _further(self) -> None:
        await self._moved.wait()
        if self._closed:
            raise BrokerUnavailable(f"{self._named}: the reading is closed")

    def watch(self, woken: Callable[[], None]) -> None:
        """Call this whenever the index has come further."""
        self._watchers.append(woken)

    # --- looking records up ---

    async def size(self, topic: str, *, at_least: int = 1) -> int:
        """How many partitions any topic has; it is looked for again below ``at_least``. Raises BrokerUnavailable."""
        if self._sizes.get(topic, 0) < at_least:
            self._sizes |= await partitions_of(self._kafka, [topic])
        return self._sizes[topic]

    async def end(self, where: TopicPartition) -> int:
        """The offset behind the last record of any partition; 0 where there is none. Raises BrokerUnavailable."""
        if where.partition >= await self.size(where.topic, at_least=where.partition + 1):
            return 0
        try:
            async with asyncio.timeout(_WITHIN_S):
                ends: dict[TopicPartition, int] = await self._looker.end_offsets([where])
        except (KafkaError, TimeoutError) as error:
            raise BrokerUnavailable(f"{where.topic}/{where.partition}: {error!r}") from error
        return ends[where]

    async def between(self, where: TopicPartition, first: int, end: int) -> AsyncIterator[Record]:
        """The records of any partition from ``first`` up to ``end``. Raises BrokerUnavailable."""
        while first < end and (found := await self._look(where, first, end)):
            for record in found:
                if record.offset >= end:
                    return
                first = record.offset + 1
                yield record

    async def _look(self, where: TopicPartition, first: int, end: int) -> list[Record]:
        """Some records from ``first`` on; none where up to ``end`` there are only ends of transactions."""
        loop = asyncio.get_running_loop()
        led_until = loop.time() + _LEADER_WITHIN_S
        try:
            async with asyncio.timeout(_WITHIN_S):
                while True:
                    async with self._looking:
                        found = await self._fetch(where, first, end)
                    if found is not None:
                        return found
                    if loop.time() > led_until:
                        raise BrokerUnavailable(f"{where.topic}/{where.partition} has no leader")
                    await asyncio.sleep(_LEADER_AGAIN_S)
        except (KafkaError, TimeoutError) as error:
            raise BrokerUnavailable(f"{where.topic}/{where.partition}: {error!r}") from error

    async def _fetch(self, where: TopicPartition, first: int, end: int) -> list[Record] | None:
        """The same; None where the partition has no leader: nobody waits for one here, where all others wait."""
        most = min(_FETCHED_AT_ONCE, end - first)
        if self._looked_to != (where, first):
            self._looker.assign([where])
            self._looker.seek(where, first)
        self._looked_to = None
        while await self._has_leader(where):
            found: list[Record]
            for found in (await self._looker.getmany(timeout_ms=500, max_records=most)).values():
                if found:
                    self._looked_to = where, found[-1].offset + 1
                    return found
            if await self._looker.position(where) >= end:
                return []
        return None

    async def _has_leader(self, where: TopicPartition) -> bool:
        client = self._looker._client
        if client.cluster.leader_for_partition(where) in {None, -1}:
            await client.force_metadata_update()
        return client.cluster.leader_for_partition(where) not in {None, -1}

    # --- reading ---

    async def _read_on(self, known: asyncio.Event) -> None:
        """Read until cancelled, and on from there where reading fails; ``known``: all that was there has been read."""
        while True:
            reader = TopicReader(kafka=self._kafka, topics=self._topics, places=dict(self._read), damaged=True)
            try:
                with as_unavailable(self._named):
                    async with reader:
                        async for record in reader.backlog():
                            self._fold([record])
                        await self._note_positions(reader)
                        known.set()
                        while True:
                            self._fold(await reader.read())
                            await self._note_positions(reader)
            except GearshiftError as error:
                log.warning("log.unreadable", topics=self._named, why=str(error))
            await asyncio.sleep(_AGAIN_AFTER_S)

    def _fold(self, records: Collection[Record]) -> None:
        read: dict[tuple[str, int], int] = {}
        for record in records:
            self._take(record)
            read[record.topic, record.partition] = record.offset + 1
        self._read |= {TopicPartition(*where): offset for where, offset in read.items()}

    async def _note_positions(self, reader: TopicReader) -> None:
        """Where reading is, be there records or not."""
        self._tidy()
        self._read |= await reader.positions()
        if self._read != self._told:
            self._told = dict(self._read)
            self._moved.set()
            self._moved = asyncio.Event()
            for woken in self._watchers:
                woken()


class FoldedStore(ABC):
    """What is written to some topics, and folded from them by whichever process: a producer and a log of their own.

    Opened with ``async with``, when all is read.
    """

    def __init__(self, *, settings: Settings, topics: Collection[str]) -> None:
        most = settings.topics.max_message_bytes
        self._outlet = IdempotentProducer(kafka=settings.kafka, max_record_bytes=most)
        self._log = FoldedLog(kafka=settings.kafka, topics=topics, take=self._take, tidy=self._forget)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._outlet)
            await opening.enter_async_context(self._log)
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def moves(self, *, within_s: float) -> None:
        """Return when more was read of any of the topics, or the time is over. Raises BrokerUnavailable once closed."""
        await self._log.moves(within_s=within_s)

    @abstractmethod
    def _take(self, record: Record) -> None:
        """Fold a record."""

    @abstractmethod
    def _forget(self) -> None:
        """Leave out what is too old."""


async def while_progressing(happened: asyncio.Event, progress: Callable[[], object], *, silent_s: float) -> bool:
    """Wait for an event as long as ``progress`` changes; False: it was the same for ``silent_s`` seconds."""
    while not happened.is_set():
        before = progress()
        try:
            async with asyncio.timeout(silent_s):
                await happened.wait()
        except TimeoutError:
            if progress() == before:
                return False
    return True


async def ended(task: "asyncio.Task[None]") -> None:
    """Cancel a task, and return when it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
