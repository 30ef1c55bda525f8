"""Presences and statuses when their reader ends, of whatever cause."""

import asyncio

import pytest

from schemas.codec import encode_presence
from schemas.control import Query
from schemas.status import Presence
from service.client.controls import Controls
from service.errors import BrokerUnavailable
from service.kafka.producer import IdempotentProducer
from service.settings import load
from tests.unit.client.test_feed import Reader, record

CAUSES = [AssertionError("no brokers"), asyncio.CancelledError(), KeyError("x")]


def controls_of(*readers: Reader) -> Controls:
    opened = iter(readers)
    settings = load(bootstrap_servers="127.0.0.1:1")
    outlet = IdempotentProducer(kafka=settings.kafka, max_record_bytes=1 << 20)
    return Controls(settings=settings, outlet=outlet, reader=lambda **_: next(opened))  # type: ignore[arg-type, return-value]


def there() -> Reader:
    """A reader of presences that finds one worker."""
    written = encode_presence("workers", Presence(worker="w", pool="p", at=1.0, interval_s=1e12))
    return Reader(backlog=[record(b"w", written.value or b"")])


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
async def test_presences_are_told_the_end_of_their_reader_and_then_have_a_new_one(cause: BaseException):
    first, second = there(), there()
    controls = controls_of(Reader(cause), first, second)
    async with asyncio.timeout(5):
        with pytest.raises(BrokerUnavailable):
            await controls.presences()
        assert [presence.worker for presence in await controls.presences()] == ["w"]
        first.queue.put_nowait(cause)
        await first.closed.wait()
        assert [presence.worker for presence in await controls.presences()] == ["w"]
        assert second.opened
    await controls.close()


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
async def test_who_asks_the_workers_is_told_the_end_of_the_statuses_reader(cause: BaseException):
    controls = controls_of(there(), Reader(cause))
    async with asyncio.timeout(5):
        with pytest.raises(BrokerUnavailable):
            await controls.ask(Query(), timeout_s=600)
    await controls.close()
