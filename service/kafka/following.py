"""What comes of one durable call: its pieces and its result as the log has them, without the runs given up."""

import asyncio
from collections.abc import AsyncIterator, Callable

from schemas.base import Record
from schemas.requests import Attempt
from schemas.results import Chunk, Result
from service.errors import GearshiftError

_BACKLOG = 1000
"""Answers that wait in memory for whoever follows a call."""


class Runs:
    """The runs that the pieces of one call are of, in the order of the log. Pure.

    A run begins where the attempt is another one, or the numbers go back. With it all is void that was said from its
    first number on, and all that still comes of an attempt before it.
    """

    def __init__(self) -> None:
        self._attempts: list[Attempt] = []
        self._last = -1
        self._begins: list[tuple[int, int]] = []
        """The offset of each run's first piece, and its number."""

    def take(self, offset: int, piece: Chunk) -> bool:
        """Note the next piece; False: it is of an attempt that was given up before."""
        another = not self._attempts or piece.attempt != self._attempts[-1]
        if another and piece.attempt in self._attempts:
            return False
        if another:
            self._attempts.append(piece.attempt)
        if another or piece.seq <= self._last:
            self._begins.append((offset, piece.seq))
        self._last = piece.seq
        return True

    def voids(self, offset: int, piece: Chunk) -> bool:
        """Whether a run that began behind a piece tells it again."""
        return any(begin > offset and first <= piece.seq for begin, first in self._begins)


class Following:
    """What comes of one call, from its beginning: pieces of its attempts, and the result, as the log has them.

    ``past`` reads those answers in the log that there are by now, from an offset on, and ``answer_in`` what they say.
    Of what lies there the pieces are left out that a later run has told again. A reader that is slow costs no memory:
    what it has not taken in time is read in the log again.
    """

    def __init__(
        self,
        id_: str,
        *,
        past: Callable[[int], AsyncIterator[Record]],
        answer_in: Callable[[Record], Chunk | Result | None],
    ) -> None:
        self.id = id_
        self._past_since = past
        self._answer_in = answer_in
        self._came: asyncio.Queue[Record | GearshiftError] = asyncio.Queue()
        self._next = 0
        self._runs = Runs()
        self._ahead = Runs()
        self._behind = False
        self._ended = False
        self._past: AsyncIterator[Record] | None = past(0)
        self._looked_ahead = False

    def put(self, record: Record) -> None:
        """Another answer of this call has come."""
        if self._ended:
            return
        if self._came.qsize() >= _BACKLOG:
            self._behind = True
            self._came = asyncio.Queue()
        if not self._behind:
            self._came.put_nowait(record)

    def end(self, why: GearshiftError) -> None:
        """Nothing more comes here: ``why`` is raised to whoever waits for it."""
        self._ended = True
        self._came.put_nowait(why)

    async def next(self) -> Chunk | Result:
        """The next piece; the result is the last to come, but for pieces that are late.

        Raises what it was ended with, and BrokerUnavailable.
        """
        while True:
            record = await self._record()
            self._next = record.offset + 1
            found = self._answer_in(record)
            if isinstance(found, Result):
                return found
            if found is None or not self._runs.take(record.offset, found) or self._ahead.voids(record.offset, found):
                continue
            return found

    async def _record(self) -> Record:
        while True:
            if self._past is not None:
                await self._look_ahead()
                async for record in self._past:
                    return record
                self._past = None
            elif self._behind:
                self._behind, self._looked_ahead = False, False
                self._past = self._past_since(self._next)
            else:
                came = await self._came.get()
                if isinstance(came, GearshiftError):
                    raise came
                return came

    async def _look_ahead(self) -> None:
        """Learn which runs there are in what is about to be read, once."""
        if self._looked_ahead:
            return
        self._looked_ahead, self._ahead = True, Runs()
        async for record in self._past_since(self._next):
            if isinstance(found := self._answer_in(record), Chunk):
                self._ahead.take(record.offset, found)
