"""A broker that goes away and comes back, on one of our own."""

import asyncio
from collections.abc import Iterator

import pytest

from deploy.local.broker import LocalBroker
from service.bus.intake import Intake
from service.errors import BrokerUnavailable, Stalled
from tests.support.bus import Bus, Member, deliveries, until

pytestmark = [pytest.mark.broker, pytest.mark.long]


@pytest.fixture(scope="module")
def own_broker() -> Iterator[LocalBroker]:
    if reason := LocalBroker.missing():
        pytest.skip(f"needs a broker that may be stopped: {reason}")
    with LocalBroker(say=lambda _line: None) as own:
        yield own


async def test_a_broker_that_is_away_at_the_start_is_named(bootstrap: str) -> None:
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        async with Bus("127.0.0.1:1").intake():
            pass


async def test_nothing_is_lost_or_repeated_when_the_broker_restarts_while_serving(own_broker: LocalBroker) -> None:
    bus = await Bus(own_broker.bootstrap).create()
    origins = await bus.produce(*(f"before {n}" for n in range(200)))
    member = Member(bus, "one")
    away = asyncio.Event()

    async def wait_for_the_broker_to_be_away(_delivery: object) -> None:
        if len(member.settled) > 50:
            await away.wait()

    member.hold = wait_for_the_broker_to_be_away
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(member.run())
        await until(lambda: len(member.settled) > 50)
        await asyncio.to_thread(own_broker.stop)
        away.set()
        await asyncio.to_thread(own_broker.start)
        origins += await bus.produce(*(f"after {n}" for n in range(50)))
        await until(lambda: len(member.settled) + len(member.refused) >= len(origins))
        member.stop()
    assert await bus.answered() == {str(origin): 1 for origin in origins}


async def test_a_worker_whose_broker_stays_away_says_so_and_then_gives_up(own_broker: LocalBroker) -> None:
    bus = await Bus(own_broker.bootstrap).create()
    await bus.produce("request", partition=0)
    async with bus.intake(stall_after_s=2.0, exit_after_stall_s=8.0) as intake:
        await deliveries(intake, 1)
        assert intake.state().trouble is None
        await asyncio.to_thread(own_broker.kill)
        async with asyncio.timeout(30):
            while intake.state().trouble is None:
                await intake.receive()
        assert "no broker answers" in (intake.state().trouble or "")
        with pytest.raises(Stalled, match="no broker answers"):
            await forever(intake)
    await asyncio.to_thread(own_broker.start)


async def forever(intake: Intake) -> None:
    async with asyncio.timeout(30):
        while True:
            await intake.receive()
