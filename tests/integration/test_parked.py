"""Requests that wait on the bus for a model without a turn, and what is answered of them all the same."""

import asyncio
import math
import time
from collections.abc import AsyncIterator

import pytest
from aiokafka.structs import ConsumerRecord

from schemas.base import Origin, Record
from schemas.results import Outcome
from service.client import Client
from tests.support.bus import Bus, deliveries, until
from tests.support.pool import delete_topics, serving, settings_for
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def parked(bootstrap: str) -> AsyncIterator[Bus]:
    corner = await Bus(bootstrap, partitions=1, aliases=("llama", "qwen")).create()
    yield corner
    await corner.delete()


def due(record: Record) -> float:
    """Requests say themselves when they are due."""
    return float(record.value or b"inf")


async def test_parked_requests_are_delivered_when_they_are_due_and_not_again_with_their_neighbours(parked: Bus) -> None:
    qwen = parked.topics.for_alias("qwen")
    soon = time.time() + 8.0
    origins = await parked.produce("inf", str(soon), "inf", "0", topic=qwen)
    async with parked.intake() as intake:
        intake.serve_only(["llama"])
        intake.scan_parked(due)
        got = await deliveries(intake, 1)
        assert (time.time() < soon) == (len(got) == 1)
        got += await deliveries(intake, 2 - len(got))
        assert [one.record.origin for one in got] == [origins[3], origins[1]]
        assert time.time() >= soon
        for one in got:
            assert await intake.settle(one.record.origin, parked.result(one))
        (new,) = await parked.produce("0", topic=qwen)
        (fresh,) = await deliveries(intake, 1)
        assert fresh.record.origin == new, "what is parked later is looked at, too"
        assert (await parked.committed(topic=qwen)).offset == 0
    async with parked.intake("second") as intake:
        rest = await deliveries(intake, 3)
        assert [one.record.origin for one in rest] == [origins[0], origins[2], new]


async def test_parked_requests_are_looked_at_again_when_that_is_said(parked: Bus) -> None:
    qwen = parked.topics.for_alias("qwen")
    origins = await parked.produce(*["inf"] * 1200, topic=qwen)
    async with parked.intake() as intake:
        intake.serve_only(["llama"])
        intake.scan_parked(lambda _record: math.inf)
        for _ in range(4):
            assert not (await intake.receive()).deliveries
        intake.scan_parked(lambda record: 0.0 if record.origin == origins[1100] else math.inf)
        (one,) = await deliveries(intake, 1)
        assert one.record.origin == origins[1100]
        intake.serve_only(None)
        rest = await deliveries(intake, 1199)
        assert origins[1100] not in {one.record.origin for one in rest}


async def test_more_than_are_remembered_may_be_due_at_once(parked: Bus) -> None:
    origins = await parked.produce(*["0"] * 5000, topic=parked.topics.for_alias("qwen"))
    settled: set[Origin] = set()
    async with parked.intake() as intake:
        intake.serve_only(["llama"])
        intake.scan_parked(due)
        while len(settled) < 5000:
            got = (await intake.receive()).deliveries
            assert all(await asyncio.gather(*(intake.settle(one.record.origin, parked.result(one)) for one in got)))
            assert settled.isdisjoint(one.record.origin for one in got)
            settled |= {one.record.origin for one in got}
    assert settled == set(origins)


async def test_a_partition_is_read_on_after_a_hold_in_which_many_of_its_requests_expired(parked: Bus) -> None:
    """Those that were answered early fill the ledger with runs ahead of the position, far from each other."""
    qwen = parked.topics.for_alias("qwen")
    count, every = 40_000, 40
    await parked.produce(*["0" if n % every == every - 1 else "inf" for n in range(count)], topic=qwen)
    settled: set[Origin] = set()

    async def settle_what_comes(least: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(settled) < least:
                got = (await intake.receive()).deliveries
                outcomes = [intake.settle(one.record.origin, parked.result(one)) for one in got]
                assert all(await asyncio.gather(*outcomes))
                assert settled.isdisjoint(one.record.origin for one in got)
                settled.update(one.record.origin for one in got)

    async with parked.intake() as intake:
        intake.serve_only(["llama"])
        intake.scan_parked(due)
        await settle_what_comes(600)
        intake.serve_only(None)
        await settle_what_comes(12_000)
    assert (await parked.committed(topic=qwen)).offset > 10_000


async def test_a_parked_request_that_expires_or_is_cancelled_is_answered_while_another_model_is_held(
    bootstrap: str,
) -> None:
    settings = settings_for(bootstrap, park_after_s=0.2)
    async with serving(settings), Client(settings=settings, timeout_s=PATIENCE_S) as client:
        await client.switch("llama", hold="forever")
        body = {"model": "qwen", "messages": HELLO}
        asking = (client.submit(body, timeout_s=10.0), client.submit(body), client.submit(body))
        expiring, cancelled, waiting = await asyncio.gather(*asking)

        async def parked_there() -> bool:
            topic = settings.topics.for_alias("qwen")
            found = await _read(bootstrap, topic)
            return len(found) == 3

        await until(parked_there)
        await client.cancel(cancelled)
        assert (await client.result(cancelled)).outcome is Outcome.CANCELLED
        result = await client.result(expiring)
        assert result.outcome is Outcome.EXPIRED
        assert result.timing.latency_s < 60
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client.result(waiting)
        await client.switch("qwen", hold=0)
        assert (await client.result(waiting)).outcome is Outcome.COMPLETED
    await delete_topics(settings)


async def _read(bootstrap: str, topic: str) -> list[ConsumerRecord]:
    return await Bus(bootstrap).read(topic)
