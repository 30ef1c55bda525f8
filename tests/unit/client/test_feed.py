"""What becomes of those who wait when the reader they wait for ends, of whatever cause."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from schemas.base import Record
from service.client.feed import Feed
from service.errors import BrokerUnavailable, GearshiftError
from service.kafka.reader import as_unavailable

CAUSES = [AssertionError("no brokers"), asyncio.CancelledError(), KeyError("x"), UnicodeDecodeError("u", b"", 0, 1, "")]


class Reader:
    """A reader whose records come from a queue; an exception in it is raised where the next record is read."""

    def __init__(self, opening: BaseException | None = None, *, backlog: Sequence[Record] = ()) -> None:
        self._backlog = backlog
        self.opened = False
        self.closed = asyncio.Event()
        self.queue: asyncio.Queue[Record | BaseException] = asyncio.Queue()
        self.opening = opening
        self.partitions = frozenset({0})
        self.gate = asyncio.Event()
        self.gate.set()
        self.progress = 0

    async def __aenter__(self) -> "Reader":
        await self.gate.wait()
        if self.opening is not None:
            raise self.opening
        self.opened = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed.set()

    async def backlog(self) -> AsyncIterator[Record]:
        for record in self._backlog:
            yield record

    async def read(self) -> list[Record]:
        item = await self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return [item]

    async def include(self, partitions: dict[int, object]) -> None:
        self.partitions |= frozenset(partitions)


def record(key: bytes, value: bytes = b"") -> Record:
    return Record("results", 0, 0, 0.0, key, value)


def decode(read: Record) -> str:
    if read.value == b"recursion":
        raise RecursionError
    return (read.value or b"").decode()


def feed_of(*readers: Reader, place_of: Callable[[str], int] | None = None) -> Feed[str]:
    opened = iter(readers)
    return Feed(
        expected="result",
        open_tail=lambda: next(opened),  # type: ignore[arg-type, return-value]
        name_of=lambda read: (read.key or b"").decode("utf-8", "replace"),
        decode=decode,
        place_of=place_of,
    )


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
async def test_every_wait_ends_with_an_error_and_the_next_one_has_a_new_reader(cause: BaseException):
    first, second = Reader(), Reader()
    feed = feed_of(first, second)
    boxes = [await feed.open_box(name) for name in ("a", "b")]
    first.queue.put_nowait(cause)
    says = "from inside" if isinstance(cause, asyncio.CancelledError) else type(cause).__name__
    for box in boxes:
        with pytest.raises(BrokerUnavailable, match=says):
            await box.take(within_s=5)
    later = await feed.open_box("c")
    second.queue.put_nowait(record(b"c", b"answer"))
    assert await later.take(within_s=5) == "answer"
    await feed.close()


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
async def test_all_that_wait_for_the_opening_are_told_and_the_next_one_opens_again(cause: BaseException):
    feed = feed_of(Reader(cause), Reader())
    async with asyncio.timeout(5):
        opened = await asyncio.gather(feed.open_box("a"), feed.open_box("b"), return_exceptions=True)
        assert [type(error) for error in opened] == [BrokerUnavailable] * 2
        assert await feed.open_box("c")
    await feed.close()


async def test_who_gives_up_while_the_reader_opens_takes_it_from_nobody():
    reader = Reader()
    reader.gate.clear()
    feed = feed_of(reader)
    first = asyncio.create_task(feed.open_box("a"), name="first")
    second = asyncio.create_task(feed.open_box("b"), name="second")
    await asyncio.wait({first, second}, timeout=0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    reader.gate.set()
    async with asyncio.timeout(5):
        box = await second
    reader.queue.put_nowait(record(b"b", b"answer"))
    assert await box.take(within_s=5) == "answer"
    await feed.close()


async def test_a_reader_that_ends_before_another_partition_is_read_ends_that_wait_too():
    reader = Reader()
    feed = feed_of(reader, place_of=int)
    await feed.open_box("0")
    waiting = asyncio.create_task(feed.open_box("1"), name="waiting")
    await asyncio.wait({waiting}, timeout=0)
    reader.queue.put_nowait(AssertionError())
    async with asyncio.timeout(5):
        with pytest.raises(BrokerUnavailable):
            await waiting
    assert feed.box("1") is None


async def test_what_waits_for_another_partition_gets_what_comes_there():
    reader = Reader()
    feed = feed_of(reader, place_of=int)
    await feed.open_box("0")
    waiting = asyncio.create_task(feed.open_box("1"), name="waiting")
    await asyncio.wait({waiting}, timeout=0)
    reader.queue.put_nowait(record(b"x"))  # ends the read that is under way
    async with asyncio.timeout(5):
        box = await waiting
    assert reader.partitions == {0, 1}
    reader.queue.put_nowait(record(b"1", b"answer"))
    assert await box.take(within_s=5) == "answer"
    await feed.close()


async def test_who_gives_up_while_another_partition_is_opened_takes_it_from_nobody():
    reader = Reader()
    feed = feed_of(reader, place_of=lambda _name: 1)
    gives_up, stays = (asyncio.create_task(feed.open_box("a")) for _ in range(2))
    while not feed._wanted:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    gives_up.cancel()
    await asyncio.wait([gives_up])
    reader.queue.put_nowait(record(b"other"))
    box = await stays
    reader.queue.put_nowait(record(b"a", b"result"))
    assert await box.take(within_s=5) == "result"
    assert not feed._opening
    await feed.close()


async def test_closing_ends_every_wait():
    feed = feed_of(Reader())
    box = await feed.open_box("a")
    waiting = asyncio.create_task(box.take(), name="waiting")
    await feed.close()
    async with asyncio.timeout(5):
        with pytest.raises(GearshiftError, match="closed"):
            await waiting


@pytest.mark.parametrize("hostile", [Record("results", 0, 0, 0.0, b"a", b"\xff"), record(b"a", b"recursion")])
async def test_a_record_that_nothing_can_be_made_of_ends_nobodys_wait(hostile: Record):
    reader = Reader()
    feed = feed_of(reader)
    box = await feed.open_box("a")
    reader.queue.put_nowait(hostile)
    reader.queue.put_nowait(record(b"a", b"answer"))
    assert await box.take(within_s=5) == "answer"
    await feed.close()


async def test_the_callers_own_cancellation_stays_one():
    async def reading() -> None:
        with as_unavailable("results"):
            await asyncio.Event().wait()

    task = asyncio.create_task(reading(), name="reading")
    await asyncio.wait({task}, timeout=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
