"""Presences and statuses when their reader ends, of whatever cause."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from schemas.base import Outgoing, Record
from schemas.codec import encode_presence, encode_status, tombstone
from schemas.control import Query
from schemas.status import Presence, Status, StatusState
from service.client.controls import Controls
from service.errors import BrokerUnavailable, NoAnswer
from service.kafka.producer import IdempotentProducer
from service.settings import load
from tests.support.client_log import SETTINGS, Log
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


def said(worker: str, event: Query) -> Outgoing:
    done = Status(worker=worker, state=StatusState.COMPLETED, kind="query", at=1.0, control_id=event.id)
    return encode_status("status", done)


def there_is(worker: str, *, state: str = "ready") -> Outgoing:
    return encode_presence("workers", Presence(worker=worker, pool="p", at=1.0, interval_s=1e12, state=state))


@pytest.mark.parametrize("gone", [tombstone("workers", "b"), there_is("b", state="left")], ids=["forgotten", "left"])
@pytest.mark.parametrize("first", ["it leaves", "the other answers"])
def test_a_worker_that_leaves_is_waited_for_no_longer_and_the_answers_of_others_are_given(gone: Outgoing, first: str):
    async def ask() -> tuple[list[str], float]:
        log, event = Log(), Query()
        controls = Controls(settings=SETTINGS, outlet=log, reader=log.reader)  # type: ignore[arg-type]
        for worker in ("a", "b"):
            log.write(there_is(worker))
        asking = asyncio.create_task(controls.ask(event, timeout_s=600), name="asking")
        begun = asyncio.get_running_loop().time()
        for come in (gone, said("a", event)) if first == "it leaves" else (said("a", event), gone):
            await asyncio.wait([asking], timeout=10)
            assert not asking.done()
            log.write(come)
        answers = await asking
        await controls.close()
        return [status.worker for status in answers], asyncio.get_running_loop().time() - begun

    with virtual_time() as loop:
        answered, took_s = loop.run_until_complete(ask())
    assert answered == ["a"]
    assert took_s < 30


def test_who_does_not_answer_though_it_is_there_is_named_and_one_answer_is_needed_at_least():
    async def ask(*workers: str) -> str:
        log, event = Log(), Query()
        controls = Controls(settings=SETTINGS, outlet=log, reader=log.reader)  # type: ignore[arg-type]
        for worker in workers:
            log.write(there_is(worker))
        asking = asyncio.create_task(controls.ask(event, timeout_s=60), name="asking")
        await asyncio.wait([asking], timeout=10)
        log.write(said("a", event) if "b" in workers else tombstone("workers", "a"))
        with pytest.raises(NoAnswer) as error:
            await asking
        await controls.close()
        return str(error.value)

    with virtual_time() as loop:
        assert loop.run_until_complete(ask("a", "b")) == "query: no answer of b within 60 s"
        assert loop.run_until_complete(ask("a")) == "query: no answer of any worker within 60 s"
