"""Reading whole topics without a group: control, presence, and the results that a client waits for."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Self

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from schemas.base import Record
from service.errors import BrokerUnavailable, GearshiftError, TopicError
from service.kafka.connection import client_options, close_client, close_consumer, start
from service.kafka.records import Consumer
from service.settings import KafkaSettings


async def partitions_of(kafka: KafkaSettings, topics: Iterable[str], *, within_s: float = 10.0) -> dict[str, int]:
    """How many partitions each topic has, waiting ``within_s`` seconds for those that someone is about to create.

    Asks for all topics: asking for a missing one by its name makes some brokers create it, not as we need it.
    Raises TopicError, BrokerUnavailable.
    """
    names = set(topics)
    admin = AIOKafkaAdminClient(**client_options(kafka))

    async def found() -> dict[str, int]:
        there = await admin.describe_topics()
        return {t["topic"]: len(t["partitions"]) for t in there if t["topic"] in names and t["error_code"] == 0}

    asking = AsyncRetrying(
        retry=retry_if_result(lambda there: len(there) < len(names)),
        wait=wait_fixed(0.2),
        stop=stop_after_delay(within_s),
    )
    try:
        await start(admin)
        return await asking(found)
    except RetryError as gave_up:
        missing = ", ".join(sorted(names - gave_up.last_attempt.result().keys()))
        raise TopicError(
            f"no topic {missing} at {kafka.bootstrap_servers}: start a worker, or run `gearshift topics create`; "
            "one that this login may not see is as if missing"
        ) from None
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnavailable(f"no broker answers at {kafka.bootstrap_servers}: {error}") from error
    finally:
        await close_client(admin.close())


@contextmanager
def as_unavailable(what: str, *passed: type[Exception]) -> Iterator[None]:
    """Whatever ends a reading is raised as a GearshiftError, but the caller's own cancellation, and what is ``passed``.

    aiokafka lets AssertionErrors out, and the cancellation of tasks of its own.
    """
    try:
        yield
    except GearshiftError:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise BrokerUnavailable(f"{what}: the Kafka client was stopped from inside") from None
    except Exception as error:
        if isinstance(error, passed):
            raise
        raise BrokerUnavailable(f"{what}: {error!r}") from error


class TopicReader:
    """Some topics: all partitions, or those that ``only`` chooses by their number. Committed records only, unless
    ``see_undecided`` is called.

    Read from the beginning; ``since`` a moment (seconds since the epoch); at most the ``latest`` offsets of each
    partition, of those since then where both are given; or from the end of those in ``from_end``. ``places`` are the
    offsets that some partitions are read from instead.

    Opened with ``async with``; positions are fixed by then, so that what is written afterwards is surely read.
    Partitions that are added are noticed within ``notice_growth_s``, and read from their first record; ``only`` is
    then asked again, and what it chooses besides is read from before that. A record that can't be decoded is logged
    and left out, or given with its ``damage`` where ``damaged`` ones are wanted.
    """

    def __init__(
        self,
        *,
        kafka: KafkaSettings,
        topics: Iterable[str],
        from_end: Collection[str] = (),
        since: float | None = None,
        latest: int | None = None,
        places: Mapping[TopicPartition, int] = MappingProxyType({}),
        only: Callable[[int], Collection[int]] = range,
        within_s: float = 10.0,
        notice_growth_s: float = 20.0,
        damaged: bool = False,
    ) -> None:
        self._kafka = kafka
        self._topics = tuple(dict.fromkeys(topics))
        self._from_end = frozenset(from_end)
        self._since = since
        self._latest = latest
        self._given = places
        self._only = only
        self._within_s = within_s
        self._notice_growth_s = notice_growth_s
        self._known: frozenset[TopicPartition] = frozenset()
        self._damaged = damaged
        self._assigned: frozenset[TopicPartition] = frozenset()
        self._read = 0
        self._consumer: Consumer

    @property
    def partitions(self) -> frozenset[int]:
        """The numbers of the partitions that are read."""
        return frozenset(partition.partition for partition in self._assigned)

    async def __aenter__(self) -> Self:
        sizes = await partitions_of(self._kafka, self._topics, within_s=self._within_s)
        self._known = frozenset(TopicPartition(topic, n) for topic in self._topics for n in range(sizes[topic]))
        self._assigned = self._choose()
        await self._open("read_committed")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await close_consumer(self._consumer)

    async def see_undecided(self) -> None:
        """From here on read what was written, committed or not: nothing waits then for transactions that are open.

        Behind the first of those lies what others have committed, and what was aborted. Raises BrokerUnavailable.
        """
        places = await self.positions()
        await close_consumer(self._consumer)
        await self._open("read_uncommitted", places)

    async def _open(self, isolation_level: str, places: Mapping[TopicPartition, int] | None = None) -> None:
        """Connect, and go to where we are to read from. Raises BrokerUnavailable."""
        self._consumer = Consumer(
            self._kafka,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level=isolation_level,
            metadata_max_age_ms=round(self._notice_growth_s * 1000),
            fetch_max_wait_ms=500,
            max_partition_fetch_bytes=8 << 20,
        )
        self._consumer.assign(list(self._assigned))
        try:
            await start(self._consumer)
            for partition, place in (await self._beginnings() if places is None else places).items():
                self._consumer.seek(partition, place)
        except BaseException as error:
            await close_consumer(self._consumer)
            if isinstance(error, KafkaError | OSError | TimeoutError):
                raise BrokerUnavailable(f"can't read {', '.join(self._topics)}: {error}") from error
            raise

    async def _beginnings(self) -> dict[TopicPartition, int]:
        """Where to begin; where nothing is said, it is the beginning."""
        from_end = [partition for partition in self._assigned if partition.topic in self._from_end]
        others = [partition for partition in self._assigned if partition.topic not in self._from_end]
        places: dict[TopicPartition, int] = await self._consumer.end_offsets(from_end)
        if self._since is not None:
            places |= await self._at(self._since, others)
        if self._latest is not None:
            begins = await self._consumer.beginning_offsets(others)
            ends = await self._consumer.end_offsets(others)
            for tp in others:
                places[tp] = max(places.get(tp, 0), begins[tp], ends[tp] - self._latest)
        return places | {tp: place for tp, place in self._given.items() if tp in self._assigned}

    async def _at(self, moment: float, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offsets whose records are not older than a moment; the ends, where all are."""
        if not partitions:
            return {}
        # The ends first: what is written between two questions would be behind neither, the other way round.
        ends: dict[TopicPartition, int] = await self._consumer.end_offsets(list(partitions))
        found = await self._consumer.offsets_for_times({tp: max(0, round(moment * 1000)) for tp in partitions})
        return ends | {tp: place.offset for tp, place in found.items() if place is not None}

    async def include(self, partitions: Iterable[int]) -> None:
        """Read these partitions, too, from their ends."""
        added = {TopicPartition(topic, n) for topic in self._topics for n in partitions} - self._assigned
        await self._add(await self._consumer.end_offsets(list(added)))

    async def read(self, *, wait_s: float = 0.5, at_most: int | None = None) -> list[Record]:
        """The next records, each partition in its order; empty where none comes within ``wait_s``.

        Raises BrokerUnavailable where reading is refused; a broker that is away is waited for.
        """
        await self._follow_growth()
        try:
            batches = await self._consumer.getmany(timeout_ms=round(wait_s * 1000), max_records=at_most)
        except KafkaError as error:
            raise BrokerUnavailable(f"can't read {', '.join(self._topics)}: {error}") from error
        records = [record for batch in batches.values() for record in batch]
        self._read += len(records)
        return records if self._damaged else [record for record in records if record.damage is None]

    @property
    def progress(self) -> int:
        """How much was read so far, and stepped over."""
        return self._read + self._consumer.decoding.count

    async def positions(self) -> dict[TopicPartition, int]:
        """The next offset of each partition that is read."""
        return {partition: await self._consumer.position(partition) for partition in self._assigned}

    async def backlog(self, *, undecided_s: float = 0.0) -> AsyncIterator[Record]:
        """Everything from here to what is the end now. Raises BrokerUnavailable.

        That end is before the first transaction that is open. For those that are open now ``undecided_s`` seconds are
        waited, and what others have committed behind them is read as well; where one is open still, that is an error.
        """
        try:
            ends = await self._consumer.end_offsets(list(self._assigned))
            written = await self._written() if undecided_s else {}
        except (KafkaError, OSError) as error:
            raise BrokerUnavailable(f"can't read {', '.join(self._topics)}: {error}") from error
        until = time.monotonic() + undecided_s
        while await self._is_before(ends) or (time.monotonic() < until and await self._is_before(written)):
            for record in await self.read(wait_s=0.2):
                yield record
        if await self._is_before(written):
            raise BrokerUnavailable(f"a transaction in {', '.join(self._topics)} has been open for {undecided_s:.0f} s")

    async def _is_before(self, ends: Mapping[TopicPartition, int]) -> bool:
        return any([await self._consumer.position(tp) < end for tp, end in ends.items()])

    async def _written(self) -> dict[TopicPartition, int]:
        """The ends of what was written, committed or not."""
        everything = Consumer(self._kafka, enable_auto_commit=False, isolation_level="read_uncommitted")
        try:
            await start(everything)
            ends: dict[TopicPartition, int] = await everything.end_offsets(list(self._assigned))
        finally:
            await close_consumer(everything)
        return ends

    async def __aiter__(self) -> AsyncIterator[Record]:
        while True:
            for record in await self.read():
                yield record

    async def _follow_growth(self) -> None:
        """Take on partitions that were added, from their first record, and those that keys may come from."""
        there = frozenset(
            TopicPartition(topic, n) for topic in self._topics for n in self._consumer.partitions_for_topic(topic) or ()
        )
        grown = there - self._known
        if grown:
            self._known |= grown
            chosen = self._choose() - self._assigned
            moved = await self._at(time.time() - 2 * self._notice_growth_s, chosen - grown)
            await self._add(moved | dict.fromkeys(chosen & grown, 0))

    def _choose(self) -> frozenset[TopicPartition]:
        """What is to be read of the partitions that are known."""
        sizes = Counter(partition.topic for partition in self._known)
        return frozenset(TopicPartition(topic, n) for topic, size in sizes.items() for n in self._only(size))

    async def _add(self, places: Mapping[TopicPartition, int]) -> None:
        """Take partitions on at their places, and keep our own place in the others."""
        kept = {tp: await self._consumer.position(tp) for tp in self._assigned}
        self._assigned |= places.keys()
        self._consumer.assign(list(self._assigned))
        for tp, place in (dict(places) | kept).items():
            self._consumer.seek(tp, place)
