"""Records are looked up by their places with a consumer that stays where the last look left it."""

from collections.abc import Sequence

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

from schemas.base import Record
from service.errors import BrokerUnavailable
from service.kafka import folded
from service.kafka.folded import FoldedLog
from service.settings import load

WHERE = TopicPartition("t", 0)


class Partition:
    """aiokafka's consumer of a partition of a hundred records, which it gives a few at a time."""

    def __init__(self) -> None:
        self.at = 0
        self.sought: list[int] = []
        self.failing = False

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        assert partitions == [WHERE]

    def seek(self, _where: TopicPartition, offset: int) -> None:
        self.at = offset
        self.sought.append(offset)

    async def position(self, _where: TopicPartition) -> int:
        return self.at

    async def getmany(self, *, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Record]]:
        assert timeout_ms
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
