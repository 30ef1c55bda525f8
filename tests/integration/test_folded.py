"""A log that is folded into an index: how it is read, and how records are looked up in it."""

import asyncio

import pytest
from aiokafka import TopicPartition

from schemas.base import Record
from service.errors import BrokerUnavailable
from service.kafka.folded import FoldedLog
from tests.support.bus import Bus

pytestmark = pytest.mark.broker


async def test_behind_the_last_record_of_a_transaction_there_is_nothing_to_wait_for(bus: Bus) -> None:
    (origin,) = await bus.produce("one", partition=0, transactional=True)
    where, end = TopicPartition(origin.topic, 0), origin.offset + 2
    async with FoldedLog(kafka=bus.kafka, topics=[origin.topic], take=lambda _: None, tidy=lambda: None) as log:
        await log.until_read({where: end})
        assert log.read_to(where) == end
        assert [record.offset async for record in log.between(where, origin.offset, end)] == [origin.offset]


async def test_after_an_error_it_is_read_on_from_where_it_was(bus: Bus) -> None:
    origins = [(await bus.produce(str(number), partition=0))[0] for number in range(4)]
    taken: list[int] = []
    failing = iter([OSError("once")])

    def take(record: Record) -> None:
        if record.offset == origins[2].offset and (error := next(failing, None)) is not None:
            raise error
        taken.append(record.offset)

    async with FoldedLog(kafka=bus.kafka, topics=[bus.requests], take=take, tidy=lambda: None):
        assert taken == [origin.offset for origin in origins]


async def test_who_waits_for_it_to_come_further_is_told_when_it_is_closed(bus: Bus) -> None:
    (origin,) = await bus.produce("one", partition=0)
    where = TopicPartition(origin.topic, 0)
    log = FoldedLog(kafka=bus.kafka, topics=[origin.topic], take=lambda _: None, tidy=lambda: None)
    async with asyncio.timeout(10):
        async with log:
            waiting = [
                asyncio.create_task(log.moves(within_s=600), name="moves"),
                asyncio.create_task(log.until_read({where: origin.offset + 2}), name="until-read"),
            ]
        for told in await asyncio.gather(*waiting, log.moves(within_s=600), return_exceptions=True):
            assert isinstance(told, BrokerUnavailable)
            assert "closed" in str(told)
