"""Where a pool stands in its request topics, by its ledgers; and setting it elsewhere while it is stopped."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Literal, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from schemas.errors import nearest
from service.consumer.committed import commits_of
from service.consumer.ledger import Ledger, UnknownLedger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.protocol import topic_id
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions
from service.errors import BrokerUnavailable, ConfigError, Fenced, GroupBusy
from service.kafka.connection import client_options, close_client, close_consumer, start
from service.settings import Settings

_IDLE = ("Empty", "Dead")
Target = int | datetime | Literal["beginning", "end"]
"""An offset, the first record at or after a moment, or an end of the partition."""


@dataclass(frozen=True, slots=True)
class Position:
    """A partition as its group sees it. ``watermark`` is None where nothing was committed yet.

    ``lag`` counts the offsets that are not finished; ``suspects`` the starts of those that were begun and not settled.
    """

    topic: str
    partition: int
    first: int
    end: int
    watermark: int | None
    finished_above: int = 0
    lag: int = 0
    suspects: tuple[tuple[int, int], ...] = ()
    epoch: int = 0
    problem: str | None = None


def position_of(
    partition: TopicPartition,
    bounds: tuple[int, int],
    commit: tuple[int, str] | None,
    remembered: Ledger | UnknownLedger | None = None,
) -> Position:
    """What a commit says, against where the partition begins and ends; without one, what is remembered."""
    first, end = bounds
    if commit is None:
        gone = None if remembered is None else f"its offset has expired; {_stood(remembered)}"
        return Position(partition.topic, partition.partition, first, end, None, lag=end - first, problem=gone)
    watermark, metadata = commit
    problem: str | None = None
    try:
        ledger = Ledger.decode(watermark, metadata)
    except UnknownLedger as error:
        ledger, problem = Ledger(watermark), str(error)
    if watermark < first:
        problem = f"{first - watermark} records were deleted before they were finished"
    elif watermark > end:
        problem = "it lies beyond the end: the topic was made anew, or has lost records"
    return Position(
        topic=partition.topic,
        partition=partition.partition,
        first=first,
        end=end,
        watermark=watermark,
        finished_above=ledger.finished_above,
        lag=max(0, end - max(first, watermark) - ledger.finished_above),
        suspects=tuple(sorted(ledger.marks.items())),
        epoch=ledger.epoch,
        problem=problem,
    )


def _stood(remembered: Ledger | UnknownLedger) -> str:
    return str(remembered) if isinstance(remembered, UnknownLedger) else f"it stood at {remembered.watermark}"


class Positions:
    """Reads and sets the positions of one group. Opened with ``async with``."""

    def __init__(self, *, settings: Settings) -> None:
        self._settings = settings
        self._group = settings.worker.group_id
        self._ledgers_topic = LedgersTopic(settings=settings)
        options = client_options(settings.kafka)
        self._admin = AIOKafkaAdminClient(**options)
        self._prober = AIOKafkaConsumer(**options, enable_auto_commit=False)

    async def __aenter__(self) -> Self:
        try:
            await start(self._admin)
            await start(self._prober)
        except (KafkaError, OSError) as error:
            await self._close()
            raise BrokerUnavailable(f"no broker at {self._settings.kafka.bootstrap_servers}: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await close_client(self._admin.close())
        await close_consumer(self._prober)

    async def show(self) -> list[Position]:
        """Every partition of the request topics, the shared one and the models'. Raises BrokerUnavailable."""
        try:
            partitions = await self._partitions()
            first = await self._prober.beginning_offsets(partitions)
            end = await self._prober.end_offsets(partitions)
            commits = await commits_of(self._admin, self._group, partitions)
            ids = {topic: await topic_id(self._prober._client, topic) for topic in {tp.topic for tp in partitions}}
        except (KafkaError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"can't read the offsets of {self._group}: {error!r}") from error
        asked = time.monotonic()  # one reading serves all
        remembered = {tp: await self._remembered(tp, ids[tp.topic], asked) for tp in partitions}
        return [position_of(tp, (first[tp], end[tp]), commits[tp], remembered[tp]) for tp in partitions]

    async def _remembered(
        self, partition: TopicPartition, found: str | None, asked: float
    ) -> Ledger | UnknownLedger | None:
        try:
            return await self._ledgers_topic.ledger(partition, topic_id=found, asked=asked)
        except UnknownLedger as unknown:
            return unknown

    async def reset(
        self, to: Target, *, topics: Iterable[str] = (), partitions: Iterable[int] = ()
    ) -> list[tuple[Position, int]]:
        """Set the ledgers of a stopped pool, of some topics and partitions or of all: empty ones at ``to``.

        What is between the old and the new place is answered again, or never. Gives each position as it was, with
        its new offset. Raises GroupBusy, BrokerUnavailable, and ConfigError for what there is not.
        """
        await self._refuse_while_busy()
        moved = []
        for position in self._chosen(await self.show(), topics, frozenset(partitions)):
            offset = await self._offset(position, to)
            await self._commit(position, offset)
            moved.append((position, offset))
        return moved

    def _chosen(
        self, there: Sequence[Position], topics: Iterable[str], partitions: frozenset[int]
    ) -> Sequence[Position]:
        """Those of some topics, with the prefix or without it, and of some partitions."""
        known = dict.fromkeys(position.topic for position in there)
        chosen = set()
        for name in topics:
            topic = name if name in known else self._settings.topics.named(name)
            if topic not in known:
                raise ConfigError(f"no topic {name!r} of requests{nearest(topic, known)}")
            chosen.add(topic)
        found = [position for position in there if position.topic in chosen or not chosen]
        if missing := partitions - {position.partition for position in found}:
            has = max((position.partition for position in found), default=-1)
            raise ConfigError(f"no partition {min(missing)} there: the last one is {has}")
        return [position for position in found if position.partition in partitions or not partitions]

    async def _partitions(self) -> list[TopicPartition]:
        topics = self._settings.topics
        return sorted(
            TopicPartition(topic["topic"], number)
            for topic in await self._admin.describe_topics()
            if topics.takes_requests(topic["topic"])
            for number in range(len(topic["partitions"]))
        )

    async def _refuse_while_busy(self) -> None:
        try:
            (description,) = await self._admin.describe_consumer_groups([self._group])
        except (KafkaError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"can't look at the group {self._group}: {error!r}") from error
        _, _, state, *_ = description.groups[0]
        if state not in _IDLE:
            raise GroupBusy(f"the workers of {self._group} are running ({state}): stop them first")

    async def _offset(self, position: Position, to: Target) -> int:
        if to == "beginning":
            return position.first
        if to == "end":
            return position.end
        if isinstance(to, datetime):
            tp = TopicPartition(position.topic, position.partition)
            found = (await self._prober.offsets_for_times({tp: max(0, round(to.timestamp() * 1000))}))[tp]
            return position.end if found is None else int(found.offset)
        return min(max(int(to), position.first), position.end)

    async def _commit(self, position: Position, offset: int) -> None:
        """By the partition's own transactional producer, as always: whoever still believes to own it is fenced."""
        partition = TopicPartition(position.topic, position.partition)
        writer = PartitionTransactions(settings=self._settings, partition=partition, ledgers_topic=self._ledgers_topic)
        try:
            try:
                await self._commit_once(writer, position, offset)
            except OutcomeUnknown:  # perhaps for what is remembered of it, without which it goes the next time
                await self._commit_once(writer, position, offset)
        except (OutcomeUnknown, Fenced) as error:
            raise BrokerUnavailable(f"{position.topic}/{position.partition}: {error}") from error
        finally:
            await writer.close()

    @staticmethod
    async def _commit_once(writer: PartitionTransactions, position: Position, offset: int) -> None:
        epoch = max(await writer.fence(), position.epoch + 1)
        await writer.commit([], *Ledger(offset, epoch=epoch).encode())
