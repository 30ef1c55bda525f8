"""A streamed answer as it comes: pieces in order, of one attempt, and the result at the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from schemas.requests import Attempt, Endpoint
from schemas.results import Chunk, Outcome, Result
from service.client.answers import answer_of, piece_of
from service.client.feed import Box
from service.errors import NoAnswer, RequestFailed, StreamBroken

_LAST_PIECES_WITHIN_S = 5.0
"""Chunks travel beside the result: how long they may be behind it."""

Pieces = Box[Chunk | Result]


class Opened(Protocol):
    """Sends the request, gives the box of its chunks and its result, and takes back what is left undone."""

    def __call__(self) -> AbstractAsyncContextManager[Pieces]: ...


class Order:
    """Which chunk continues what was given out. Pure."""

    def __init__(self) -> None:
        self._attempt: tuple[int, int] | None = None
        self._next = 0
        self._final = False

    def admits(self, chunk: Chunk) -> bool:
        """Whether the chunk is the next one; False for one of an attempt that is over.

        Raises StreamBroken when a chunk is missing, or a new attempt tells again what was given out.
        """
        attempt = chunk.attempt.rank
        if self._attempt is not None and attempt < self._attempt:
            return False
        if attempt != self._attempt:
            if chunk.seq < self._next:
                raise StreamBroken(f"request {chunk.id} was started again; its result will have the whole answer")
            self._attempt, self._final = attempt, False
        if chunk.seq < self._next:
            return False
        if chunk.seq > self._next:
            raise StreamBroken(f"request {chunk.id}: chunk {self._next} is missing; the result has the whole answer")
        self._next += 1
        self._final = chunk.final
        return True

    def is_whole(self, attempt: Attempt) -> bool:
        """Whether what was given out is all that an attempt has said: another one's answer is another answer."""
        return self._final and self._attempt is not None and self._attempt >= attempt.rank


class Stream:
    """Iterate over it for the pieces; ``result`` is there when it has ended.

    Leaving the iteration early cancels the request. ``request_id`` is known when the iteration has begun.
    """

    def __init__(self, *, request_id: str | None, endpoint: Endpoint | None, opened: Opened, within_s: float) -> None:
        self.request_id = request_id
        self._endpoint = endpoint
        self._opened = opened
        self._within_s = within_s
        self.result: Result | None = None

    @property
    def answer(self) -> Any:
        """The whole answer, typed, once the stream has ended."""
        if self.result is None:
            raise NoAnswer("the stream has not ended")
        return answer_of(self.result)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Raises RequestFailed, StreamBroken, NoAnswer."""
        order = Order()
        end = asyncio.get_running_loop().time() + self._within_s
        async with self._opened() as pieces:
            self.request_id = pieces.name
            while self.result is None or not order.is_whole(self.result.attempt):
                item = await self._next(pieces, end)
                if isinstance(item, Result):
                    self.result = item
                    if item.outcome is not Outcome.COMPLETED:
                        raise RequestFailed.of(item)
                    end = asyncio.get_running_loop().time() + _LAST_PIECES_WITHIN_S
                elif order.admits(item) and item.data is not None:
                    yield piece_of(self._endpoint, item.data)

    async def _next(self, pieces: Pieces, end: float) -> Chunk | Result:
        try:
            return await pieces.take(within_s=max(0.0, end - asyncio.get_running_loop().time()))
        except NoAnswer:
            if self.result is None:
                raise
            raise StreamBroken("the stream's end did not come; the result has the whole answer") from None
