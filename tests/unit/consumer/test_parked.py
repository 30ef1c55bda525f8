"""What is remembered of a parked partition: the nearest moments, never more than so many."""

import asyncio
import math

import pytest
from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from service.consumer import parked
from service.consumer.ledger import Ledger
from service.consumer.parked import ParkedScan, Shelf
from tests.support.fake_kafka import CAUSES, FakeBroker, FakeConsumer
from tests.support.waiting import PATIENCE_S


def test_what_is_due_is_taken_once_and_in_order():
    shelf = Shelf(Ledger(), looked_to=0)
    for moment, offset in [(30.0, 1), (10.0, 2), (20.0, 3)]:
        shelf.note(moment, offset)
    assert shelf.take(20.0) == [2, 3]
    assert shelf.take(20.0) == []
    assert shelf.take(30.0) == [1]


def test_a_request_that_may_wait_for_ever_takes_no_room():
    shelf = Shelf(Ledger(), looked_to=0)
    shelf.note(math.inf, 1)
    assert (shelf.moments, shelf.horizon) == ([], math.inf)


@given(moments=st.lists(st.floats(0, 1e9), max_size=60), kept=st.integers(1, 20))
def test_nothing_before_the_horizon_is_forgotten(moments, kept):
    shelf = Shelf(Ledger(), looked_to=0, most=kept)
    for offset, moment in enumerate(moments):
        shelf.note(moment, offset)
    assert len(shelf.moments) <= kept
    near = {offset for offset, moment in enumerate(moments) if moment < shelf.horizon}
    assert near <= {offset for _, offset in shelf.moments}
    assert (shelf.horizon == math.inf) == (len(moments) <= kept)


async def test_what_is_said_while_the_consumer_connects_is_looked_at():
    broker, connecting, connected = FakeBroker(), asyncio.Event(), asyncio.Event()

    class Connecting(FakeConsumer):
        async def start(self) -> None:
            connecting.set()
            await connected.wait()

    delivered: list[int] = []
    where = TopicPartition("requests.qwen", 0)
    ledgers = {where: Ledger()}
    broker.append(where.topic, b"{}", ())
    scan = ParkedScan(
        open_consumer=lambda: Connecting(broker, reset=True),
        parked=lambda: ledgers,
        deliver=lambda record: delivered.append(record.offset) is None,
    )
    scan.look_again(lambda _record: math.inf)
    turn = asyncio.create_task(scan.turn())
    await connecting.wait()
    scan.look_again(lambda _record: 0.0)
    connected.set()
    await turn
    await scan.turn()
    assert delivered == [0]
    await scan.close()


@pytest.mark.parametrize("cause", CAUSES)
async def test_it_goes_on_after_any_trouble_with_reading(cause, monkeypatch):
    broker, where, delivered = FakeBroker(), TopicPartition("requests.qwen", 0), asyncio.Event()
    broker.append(where.topic, b"{}", ())
    ledgers = {where: Ledger()}

    class Stumbling(FakeConsumer):
        async def getmany(self, *only, **limits):
            if not stumbled:
                stumbled.append(cause)
                raise cause
            return await super().getmany(*only, **limits)

    stumbled: list[type[BaseException]] = []
    monkeypatch.setattr(parked, "_TURN_S", 0.0)
    scan = ParkedScan(
        open_consumer=lambda: Stumbling(broker, reset=True),
        parked=lambda: ledgers,
        deliver=lambda _record: delivered.set() is None,
    )
    scan.look_again(lambda _record: 0.0)
    running = asyncio.create_task(scan.run())
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait((running, asyncio.create_task(delivered.wait())), return_when=asyncio.FIRST_COMPLETED)
    assert stumbled
    assert delivered.is_set()
    running.cancel()
    await asyncio.wait((running,))
    assert running.cancelled()
