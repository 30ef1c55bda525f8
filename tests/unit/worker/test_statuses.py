"""What a worker says of its switches and of control events, while a broker takes its time."""

import asyncio
from types import SimpleNamespace

import pytest

from schemas.control import Switch
from schemas.status import Status, StatusState
from service.worker.statuses import MOST_WAITING, StatusQueue


class Slow:
    """Announcements that take nothing until they are let."""

    def __init__(self) -> None:
        self.said: list[Status] = []
        self.let = asyncio.Event()

    async def status(self, status: Status) -> None:
        await self.let.wait()
        self.said.append(status)


@pytest.fixture
async def slow():
    return Slow()


@pytest.fixture
async def queue(slow):
    engine = SimpleNamespace(contexts=tuple)
    made = StatusQueue(announcements=slow, watcher=SimpleNamespace(status=lambda _: None), engine=engine, worker="w")
    sending = asyncio.create_task(made.run())
    yield made
    sending.cancel()


def event(n: int) -> Switch:
    return Switch(id=f"asked-{n}", model="llama", issued=0.0)


async def test_what_was_said_is_sent_in_its_order_and_waited_for(queue, slow):
    for n in range(100):
        queue.switch(StatusState.COMPLETED, "llama", event=event(n))
    slow.let.set()
    await queue.drain(within_s=30)
    assert [status.control_id for status in slow.said] == [f"asked-{n}" for n in range(100)]


async def test_a_broker_that_is_away_costs_bounded_memory_and_no_answer_to_an_event(queue, slow):
    asked = 0
    for n in range(20 * MOST_WAITING):
        queue.switch(StatusState.COMPLETED, "llama", event=None)
        if n % 1000 == 0:
            queue.switch(StatusState.COMPLETED, "llama", event=event(asked))
            asked += 1
    slow.let.set()
    await queue.drain(within_s=30)
    assert len(slow.said) <= MOST_WAITING + 1
    assert [one.control_id for one in slow.said if one.control_id] == [f"asked-{n}" for n in range(asked)]
    assert slow.said[-1].control_id is None  # what was said last is there


async def test_answers_alone_are_bounded_too_and_the_newest_are_kept(queue, slow):
    for n in range(3 * MOST_WAITING):
        queue.switch(StatusState.COMPLETED, "llama", event=event(n))
    slow.let.set()
    await queue.drain(within_s=30)
    assert len(slow.said) <= MOST_WAITING + 1
    assert slow.said[-1].control_id == f"asked-{3 * MOST_WAITING - 1}"


async def test_a_worker_that_ends_does_not_wait_for_a_broker_that_is_away(queue, slow):
    queue.switch(StatusState.COMPLETED, "llama", event=event(0))
    await queue.drain(within_s=0.01)
    assert not slow.said
