"""One reader per topic for everyone in this process who waits for something in it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from schemas.base import Record
from service.errors import BrokerUnavailable, GearshiftError, NoAnswer
from service.kafka.reader import TopicReader, as_unavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """What a client has read since it was opened. ``bytes`` are those of keys, values and headers."""

    records: int = 0
    bytes: int = 0
    malformed: int = 0
    """Records under a name that is waited for that are no message of the kind expected there."""
    not_ours: int = 0
    """Answers under one of our ids to a record that is not the one we wrote: somebody else used the id."""


class Box(Generic[T]):
    """What came for one name and has not been taken yet."""

    def __init__(self, name: str, expected: str) -> None:
        self.name = name
        self._expected = expected
        self._items: asyncio.Queue[T | GearshiftError] = asyncio.Queue()

    def put(self, item: T | GearshiftError) -> None:
        self._items.put_nowait(item)

    async def take(self, *, within_s: float | None = None) -> T:
        """The next item. Raises NoAnswer when none comes in time, and whatever ended the reading."""
        try:
            async with asyncio.timeout(within_s):
                item = await self._items.get()
        except TimeoutError:
            raise NoAnswer(f"no {self._expected} for {self.name} within {within_s:.3g} s") from None
        if isinstance(item, GearshiftError):
            raise item
        return item


class Feed(Generic[T]):
    """Topics read from their ends and sorted into boxes by name; what has no box is not decoded.

    The first box opens the reader, and is there only when the reader's place is fixed: what is asked for afterwards
    can't be answered unheard. However the reader ends, every box is told, and the next box opens a new one.

    ``place_of`` gives the partition that a name's records are in, where only such partitions are read; ``None``: all
    are read. A box for a name elsewhere waits until its partition is read, too.
    """

    def __init__(
        self,
        *,
        expected: str,
        open_tail: Callable[[], TopicReader],
        name_of: Callable[[Record], str | None],
        decode: Callable[[Record], T],
        traffic: Traffic | None = None,
        place_of: Callable[[str], int] | None = None,
    ) -> None:
        self._expected = expected
        self._open_tail = open_tail
        self._name_of = name_of
        self._decode = decode
        self._place_of = place_of
        self._traffic = traffic or Traffic()
        self._boxes: dict[str, Box[T]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[TopicReader]
        self._wanted: dict[int, asyncio.Future[None]] = {}
        self._opening: Counter[str] = Counter()
        """How many wait for the partition of each name to be read."""

    async def open(self) -> TopicReader:
        """The reader, whose place is fixed. Raises TopicError, BrokerUnavailable."""
        if self._reading is None or self._reading.done():
            self._opened = asyncio.get_running_loop().create_future()
            self._reading = asyncio.create_task(self._read(self._opened), name=f"client-{self._expected}")
        reading = self._reading
        tail = await asyncio.shield(self._opened)
        if reading.done():
            raise BrokerUnavailable(f"{self._expected}: the reading has ended")
        return tail

    async def open_box(self, name: str, box: Box[T] | None = None) -> Box[T]:
        """The box for ``name``, which stays until it is closed; ``box`` is one that is shared or of another kind.

        Raises TopicError, BrokerUnavailable.
        """
        tail = await self.open()
        opened = self._boxes.setdefault(name, box or Box(name, self._expected))
        if self._place_of is not None and (place := self._place_of(name)) not in tail.partitions:
            wanted = self._wanted.setdefault(place, asyncio.get_running_loop().create_future())
            self._opening[name] += 1
            try:
                await asyncio.shield(wanted)
            except BaseException:
                if self._opening[name] == 1:  # others may wait for the same
                    self.close_box(name)
                raise
            finally:
                self._opening -= Counter((name,))
        return opened

    def close_box(self, name: str) -> None:
        self._boxes.pop(name, None)

    def box(self, name: str) -> Box[T] | None:
        return self._boxes.get(name)

    @asynccontextmanager
    async def listening(self, name: str) -> AsyncIterator[Box[T]]:
        """A box for as long as somebody listens."""
        box = await self.open_box(name)
        try:
            yield box
        finally:
            self.close_box(name)

    async def close(self) -> None:
        """End every wait."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self, opened: asyncio.Future[TopicReader]) -> None:
        end: GearshiftError = BrokerUnavailable(f"{self._expected}: the client is closed")
        try:
            with as_unavailable(self._expected):
                async with self._open_tail() as tail:
                    opened.set_result(tail)
                    while True:
                        await self._widen(tail)
                        for record in await tail.read():
                            self._sort(record)
        except GearshiftError as error:
            end = error
        finally:
            self._end(opened, end)

    async def _widen(self, tail: TopicReader) -> None:
        """Read the partitions that somebody waits for, too."""
        if self._wanted:
            wanted = dict(self._wanted)
            await tail.include(wanted)
            for place, included in wanted.items():
                del self._wanted[place]
                included.set_result(None)

    def _end(self, opened: asyncio.Future[TopicReader], error: GearshiftError) -> None:
        """Nobody waits any longer for what can't come."""
        waits: list[asyncio.Future[Any]] = [opened, *self._wanted.values()]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # there may be nobody left who waits
        self._wanted.clear()
        for box in self._boxes.values():
            box.put(error)

    def _sort(self, record: Record) -> None:
        """Give a record to whoever waits for it. What can't be read is passed over: it ends nobody's wait."""
        self._traffic.records += 1
        try:
            self._traffic.bytes += record.size
            box = self._boxes.get(self._name_of(record) or "")
            if box is not None:
                box.put(self._decode(record))
        except Exception as error:
            self._traffic.malformed += 1
            log.warning("record.malformed", expected=self._expected, at=str(record.origin), why=type(error).__name__)
