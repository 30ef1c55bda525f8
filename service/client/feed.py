"""One reader per topic for everyone in this process who waits for something in it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import structlog
from pydantic import ValidationError

from schemas.base import Record
from service.errors import GearshiftError, NoAnswer
from service.kafka.reader import TopicReader

log = structlog.get_logger(__name__)

T = TypeVar("T")


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
    """A topic, read from its end and sorted into boxes by name; what has no box is not decoded.

    The first box opens the reader, and is there only when the reader's place is fixed: what is asked for afterwards
    can't be answered unheard.
    """

    def __init__(
        self,
        *,
        expected: str,
        open_tail: Callable[[], TopicReader],
        name_of: Callable[[Record], str | None],
        decode: Callable[[Record], T],
    ) -> None:
        self._expected = expected
        self._open_tail = open_tail
        self._name_of = name_of
        self._decode = decode
        self._boxes: dict[str, Box[T]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    async def open_box(self, name: str, box: Box[T] | None = None) -> Box[T]:
        """The box for ``name``, which stays until it is closed; ``box`` is one of another feed to be shared.

        Raises TopicError, BrokerUnavailable.
        """
        if self._reading is None or self._reading.done():
            await self._start()
        return self._boxes.setdefault(name, box or Box(name, self._expected))

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
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _start(self) -> None:
        async with self._opening:
            if self._reading is not None and not self._reading.done():
                return
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._reading = asyncio.create_task(self._read(opened), name=f"client-{self._expected}")
            await opened

    async def _read(self, opened: asyncio.Future[None]) -> None:
        try:
            async with self._open_tail() as tail:
                opened.set_result(None)
                while True:
                    for record in await tail.read():
                        self._sort(record)
        except GearshiftError as error:
            if not opened.done():
                opened.set_exception(error)
            for box in self._boxes.values():
                box.put(error)

    def _sort(self, record: Record) -> None:
        try:
            box = self._boxes.get(self._name_of(record) or "")
            if box is not None:
                box.put(self._decode(record))
        except ValidationError:
            log.warning("record.malformed", expected=self._expected, at=str(record.origin))
