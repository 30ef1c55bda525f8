"""Records are looked up by their places with a consumer that stays where the last look left it."""

import asyncio
from collections.abc import Sequence

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

from schemas.base import Record
from service.errors import BrokerUnavailable
from service.kafka import folded
from service.kafka.folded import FoldedLog
from service.settings import load
from tests.support.virtual_time import virtual_time

WHERE, SILENT, ALONE = (TopicPartition("t", number) for number in range(3))
"""A partition that answers, one whose leader says nothing, and one without a leader."""


class Partition:
    """aiokafka's consumer of a partition of a hundred records, which it gives a few at a time.

    It is its own client, and what that knows of the cluster.
    """

    def __init__(self) -> None:
        self._client = self.cluster = self
        self.assigned = WHERE
        self.leaders = {WHERE: 0, SILENT: 1, ALONE: -1}
        self.at = 0
        self.sought: list[int] = []
        self.failing = False

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        (self.assigned,) = partitions

    def leader_for_partition(self, where: TopicPartition) -> int:
        return self.leaders[where]

    async def force_metadata_update(self) -> None:
        """It knows all that there is to know."""

    def seek(self, _where: TopicPartition, offset: int) -> None:
        self.at = offset
        self.sought.append(offset)

    async def position(self, _where: TopicPartition) -> int:
        return self.at

    async def getmany(self, *, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Record]]:
        if self.assigned != WHERE:
            await asyncio.sleep(timeout_ms / 1000)
            return {}
        first, self.at = self.at, min(100, self.at + min(10, max_records))
        if self.failing:
            self.failing = False
            raise KafkaConnectionError("away")
        return {WHERE: [Record("t", 0, offset, 0.0, b"k", b"v") for offset in range(first, self.at)]}


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Partition:
    made = Partition()
    monkeypatch.setattr(folded, "Consumer", lambda *_given, **_options: made)
    return made


@pytest.fixture
def log(consumer: Partition) -> FoldedLog:
    made = FoldedLog(kafka=load().kafka, topics=["t"], take=lambda _record: None, tidy=lambda: None)
    assert made._looker is consumer
    return made


async def offsets(log: FoldedLog, first: int, end: int) -> list[int]:
    return [record.offset async for record in log.between(WHERE, first, end)]


async def test_what_follows_is_read_on_without_another_fetch(log: FoldedLog, consumer: Partition) -> None:
    assert await offsets(log, 5, 65) == list(range(5, 65))
    assert consumer.sought == [5]
    assert await offsets(log, 65, 70) == list(range(65, 70))
    assert consumer.sought == [5]
    assert await offsets(log, 60, 62) == [60, 61]
    assert consumer.sought == [5, 60]


async def test_what_a_look_that_failed_had_fetched_is_fetched_again(log: FoldedLog, consumer: Partition) -> None:
    assert await offsets(log, 0, 10) == list(range(10))
    consumer.failing = True
    with pytest.raises(BrokerUnavailable):
        await offsets(log, 10, 20)
    assert await offsets(log, 10, 20) == list(range(10, 20))


def times(log: FoldedLog, *places: TopicPartition) -> list[tuple[int | str, float]]:
    """What looks that begin together come to, how many records or why none, and after how many seconds."""

    async def look(where: TopicPartition) -> tuple[int | str, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            found: int | str = len([record async for record in log.between(where, 0, 10)])
        except BrokerUnavailable as error:
            found = str(error)
        return found, loop.time() - began

    async def looks() -> list[tuple[int | str, float]]:
        return await asyncio.gather(*map(look, places))

    with virtual_time() as loop:
        return loop.run_until_complete(looks())


def test_a_partition_without_a_leader_is_soon_given_up_and_no_other_look_waits_for_it(log: FoldedLog) -> None:
    *alone, (found, took) = times(log, *[ALONE] * 20, WHERE)
    assert (found, took) == (10, 0.0)
    assert all("no leader" in str(why) and after < 3 for why, after in alone)


def test_no_look_waits_longer_for_its_turn_than_it_may_take_itself(log: FoldedLog) -> None:
    assert max(after for _, after in times(log, *[SILENT] * 4, WHERE)) <= folded._WITHIN_S


async def test_a_leader_that_is_elected_meanwhile_is_waited_for(
    log: FoldedLog, consumer: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.leaders[WHERE] = -1

    async def elected() -> None:
        consumer.leaders[WHERE] = 2

    monkeypatch.setattr(consumer, "force_metadata_update", elected)
    assert await offsets(log, 0, 10) == list(range(10))
