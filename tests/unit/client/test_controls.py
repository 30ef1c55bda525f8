"""Presences and statuses when their reader ends, of whatever cause."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from schemas.base import Record
from schemas.codec import encode_presence
from schemas.control import Query
from schemas.status import Presence
from service.client.controls import Controls
from service.errors import BrokerUnavailable, NoAnswer
from service.kafka.producer import IdempotentProducer
from service.settings import load
from tests.support.virtual_time import virtual_time
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


class Slow(Reader):
    """Each of its records takes ``each_s``."""

    def __init__(self, each_s: float, count: int) -> None:
        super().__init__()
        self._each_s, self._count = each_s, count

    async def backlog(self) -> AsyncIterator[Record]:
        for n in range(self._count):
            await asyncio.sleep(self._each_s)
            self.progress += 1
            presence = Presence(worker=f"w{n}", pool="p", at=1.0, interval_s=1e12)
            yield record(f"w{n}".encode(), encode_presence("workers", presence).value or b"")


@pytest.mark.parametrize(("each_s", "found"), [(6.0, 20), (60.0, None)])
def test_presences_of_a_long_topic_are_waited_for_while_reading_comes_further(each_s: float, found: int | None):
    async def ask() -> int | None:
        controls = controls_of(Slow(each_s, 20))
        try:
            return len(await controls.presences())
        except NoAnswer:
            return None
        finally:
            await controls.close()

    with virtual_time() as loop:
        assert loop.run_until_complete(ask()) == found
