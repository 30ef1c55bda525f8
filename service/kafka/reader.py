"""Reading whole topics without a group: control, presence, and the results that a client waits for."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from types import TracebackType
from typing import Self

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from schemas.base import Record
from service.errors import BrokerUnavailable, TopicError
from service.kafka.connection import client_options, close_consumer
from service.kafka.records import Consumer, as_record
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
        await admin.start()
        return await asking(found)
    except RetryError:
        missing = ", ".join(sorted(names - (await found()).keys()))
        raise TopicError(
            f"no topic {missing} at {kafka.bootstrap_servers}: start a worker, or run `gearshift topics create`"
        ) from None
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnavailable(f"no broker answers at {kafka.bootstrap_servers}: {error}") from error
    finally:
        await admin.close()


class TopicReader:
    """Every partition of some topics, committed records only.

    Read from the beginning, or ``since`` a moment (seconds since the epoch), or from the end of those in ``from_end``.

    Opened with ``async with``; positions are fixed by then, so that what is written afterwards is surely read.
    Partitions that are added are noticed within ``notice_growth_s`` and read from their first record. A record that
    can't be decoded is logged and left out, or given with its ``damage`` where ``damaged`` ones are wanted.
    """

    def __init__(
        self,
        *,
        kafka: KafkaSettings,
        topics: Iterable[str],
        from_end: Collection[str] = (),
        since: float | None = None,
        within_s: float = 10.0,
        notice_growth_s: float = 20.0,
        damaged: bool = False,
    ) -> None:
        self._kafka = kafka
        self._topics = tuple(dict.fromkeys(topics))
        self._from_end = frozenset(from_end)
        self._since = since
        self._within_s = within_s
        self._notice_growth_s = notice_growth_s
        self._damaged = damaged
        self._assigned: frozenset[TopicPartition] = frozenset()
        self._consumer: Consumer

    async def __aenter__(self) -> Self:
        sizes = await partitions_of(self._kafka, self._topics, within_s=self._within_s)
        self._consumer = Consumer(
            self._kafka,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            metadata_max_age_ms=round(self._notice_growth_s * 1000),
            fetch_max_wait_ms=500,
            max_partition_fetch_bytes=8 << 20,
        )
        self._assigned = frozenset(TopicPartition(topic, n) for topic in self._topics for n in range(sizes[topic]))
        self._consumer.assign(list(self._assigned))
        try:
            await self._consumer.start()
            await self._seek()
        except (KafkaError, OSError, TimeoutError) as error:
            await close_consumer(self._consumer)
            raise BrokerUnavailable(f"can't read {', '.join(self._topics)}: {error}") from error
        except asyncio.CancelledError:
            await close_consumer(self._consumer)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await close_consumer(self._consumer)

    async def _seek(self) -> None:
        skipped = [partition for partition in self._assigned if partition.topic in self._from_end]
        if self._since is not None:
            moment = round(self._since * 1000)
            later = {partition: moment for partition in self._assigned if partition.topic not in self._from_end}
            found = await self._consumer.offsets_for_times(later)
            skipped += [partition for partition in later if found.get(partition) is None]
            for partition, place in found.items():
                if place is not None:
                    self._consumer.seek(partition, place.offset)
        for partition, offset in (await self._consumer.end_offsets(skipped)).items():
            self._consumer.seek(partition, offset)

    async def read(self, *, wait_s: float = 0.5, at_most: int | None = None) -> list[Record]:
        """The next records, each partition in its order; empty where none comes within ``wait_s``.

        Raises BrokerUnavailable where reading is refused; a broker that is away is waited for.
        """
        await self._follow_growth()
        try:
            batches = await self._consumer.getmany(timeout_ms=round(wait_s * 1000), max_records=at_most)
        except KafkaError as error:
            raise BrokerUnavailable(f"can't read {', '.join(self._topics)}: {error}") from error
        records = [as_record(message) for batch in batches.values() for message in batch]
        return records if self._damaged else [record for record in records if record.damage is None]

    async def backlog(self) -> AsyncIterator[Record]:
        """Everything from here to what is the end now."""
        left = await self._consumer.end_offsets(list(self._assigned))
        while left := {tp: end for tp, end in left.items() if await self._consumer.position(tp) < end}:
            for record in await self.read(wait_s=0.2):
                yield record

    async def __aiter__(self) -> AsyncIterator[Record]:
        while True:
            for record in await self.read():
                yield record

    async def _follow_growth(self) -> None:
        """Take on partitions that were added, from their first record, and keep our place in the others."""
        there = frozenset(
            TopicPartition(topic, n) for topic in self._topics for n in self._consumer.partitions_for_topic(topic) or ()
        )
        if there <= self._assigned:
            return
        places = {tp: await self._consumer.position(tp) for tp in self._assigned}
        self._assigned |= there
        self._consumer.assign(list(self._assigned))
        for tp in self._assigned:
            self._consumer.seek(tp, places.get(tp, 0))
