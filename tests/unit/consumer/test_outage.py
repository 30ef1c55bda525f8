"""Whether nothing moves because no broker is there, or because we hang."""

import asyncio
from collections.abc import Iterator

import pytest

from service.consumer.outage import Outage
from tests.support.virtual_time import VirtualLoop, virtual_time


class Pool:
    """A source that has been stuck since a moment, and brokers that are there or not."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.stuck_since: float | None = None
        self.there = True
        self.asked = 0

    def stuck_s(self) -> float:
        return 0.0 if self.stuck_since is None else self._loop.time() - self.stuck_since

    async def answers(self) -> bool:
        self.asked += 1
        return self.there

    def stops(self) -> None:
        self.stuck_since = self._loop.time()


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with virtual_time() as loop:
        yield loop


@pytest.fixture
def pool(loop: VirtualLoop) -> Pool:
    return Pool(loop)


@pytest.fixture
def outage(loop: VirtualLoop, pool: Pool) -> Iterator[Outage]:
    async def new() -> Outage:
        return Outage(answers=pool.answers, stuck_s=pool.stuck_s)

    outage = loop.run_until_complete(new())
    running = loop.create_task(outage.run())
    yield outage
    running.cancel()
    loop.run_until_complete(asyncio.gather(running, return_exceptions=True))


def test_nobody_is_asked_while_something_moves(loop: VirtualLoop, pool: Pool, outage: Outage) -> None:
    pool.there = False
    loop.run_until_complete(asyncio.sleep(100))
    assert (pool.asked, outage.away_s) == (0, 0.0)


def test_what_stands_still_before_brokers_that_answer_is_stuck(loop: VirtualLoop, pool: Pool, outage: Outage) -> None:
    pool.stops()
    loop.run_until_complete(asyncio.sleep(100))
    assert pool.asked > 10
    assert (outage.away_s, outage.without(pool.stuck_s())) == (0.0, pool.stuck_s())


def test_without_brokers_nothing_is_stuck_and_time_counts_anew_when_one_is_back(
    loop: VirtualLoop, pool: Pool, outage: Outage
) -> None:
    pool.stops()
    pool.there = False
    loop.run_until_complete(asyncio.sleep(600))
    assert 590 < outage.away_s < 600
    assert outage.without(pool.stuck_s()) == 0.0

    pool.there = True
    loop.run_until_complete(asyncio.sleep(10))
    assert outage.away_s == 0.0
    assert 8 < outage.without(pool.stuck_s()) <= 10  # stuck still: that is ours now
    pool.stuck_since = None
    assert outage.without(pool.stuck_s()) == 0.0

    pool.stops()
    pool.there = False
    loop.run_until_complete(asyncio.sleep(60))
    assert 50 < outage.away_s < 60
