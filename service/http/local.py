"""A bus in memory: what is asked over HTTP runs through the same reception, queues and scheduler as what Kafka brings.

A request is a record of the topic ``http``; its settlement and the pieces of its stream go to whoever asked, and
nowhere else. It lives as long as the connection: a request whose asker has gone is lost, and one that can't be
finished before the worker ends is answered so.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from schemas.base import Headers, Origin, Record
from schemas.control import Control
from schemas.errors import ErrorObject
from schemas.requests import ReplyTo
from schemas.results import Chunk, Outcome, Result, Timing
from schemas.status import Presence, Status
from service.errors import DoorClosed, DoorCrowded
from service.ports import ControlRecord, Delivery, Received, RecordRefused, Settled, Settlement, SourceState

TOPIC = "http"
"""The topic of the origins of what was asked here; no request topic of the broker may have this name."""
_TURN_S = 0.25
_PIECES = 64
"""Pieces of a stream that wait for a slow reader; then the run waits for it, as vLLM's own server would."""


class Exchange:
    """One question and what comes back: pieces of a stream, if one was asked for, then the result."""

    def __init__(self, record: Record, id_: str) -> None:
        self.record = record
        self.id = id_
        self.started = False
        self.settled = False
        self._came: asyncio.Queue[Chunk | Result] = asyncio.Queue()
        self._room = asyncio.Semaphore(_PIECES)
        self._left = False

    async def next(self) -> Chunk | Result:
        """The next piece; the result is the last to come."""
        item = await self._came.get()
        if isinstance(item, Chunk):
            self._room.release()
        return item

    async def add(self, piece: Chunk) -> None:
        """A piece has come; waits while too many are untaken. After ``leave`` nothing waits."""
        await self._room.acquire()
        if self._left:
            self._room.release()
        else:
            self._came.put_nowait(piece)

    def settle(self, result: Result) -> None:
        """The first result counts."""
        if not self.settled:
            self.settled = True
            self._came.put_nowait(result)

    def leave(self) -> None:
        """Nobody reads any more."""
        self._left = True
        self._room.release()


class LocalBus:
    """The ports RequestSource, Settlements, ControlSource and Announcements, without a broker.

    ``max_requests`` and ``max_bytes`` bound what is held; more is refused.
    """

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._offsets = itertools.count()
        self._exchanges: dict[Origin, Exchange] = {}
        self._bytes = 0
        self._inbox: list[Delivery] = []
        self._lost: set[Origin] = set()
        self._arrived = asyncio.Event()
        self._stopped = False
        self._presence: Presence | None = None

    def __len__(self) -> int:
        return len(self._exchanges)

    # --- the asker's side ---

    @contextmanager
    def ask(self, value: bytes, headers: Headers, *, id_: str) -> Iterator[Exchange]:
        """Deliver a request. Leaving the block before its result gives it up, and what runs of it is aborted.

        Raises DoorClosed, DoorCrowded.
        """
        if self._stopped:
            raise DoorClosed("the worker is stopping")
        if len(self._exchanges) >= self._max_requests or self._bytes + len(value) > self._max_bytes:
            raise DoorCrowded(f"{len(self._exchanges)} requests are waiting or running already")
        record = Record(TOPIC, 0, next(self._offsets), time.time(), None, value, [("ce_id", id_.encode()), *headers])
        exchange = Exchange(record, id_)
        self._exchanges[record.origin] = exchange
        self._bytes += record.size
        self._inbox.append(Delivery(record, active_meant=True))
        self._arrived.set()
        try:
            yield exchange
        finally:
            self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        exchange.leave()
        del self._exchanges[exchange.record.origin]
        self._bytes -= exchange.record.size
        if not exchange.settled:
            self._lost.add(exchange.record.origin)
            self._arrived.set()

    def close(self, reason: str = "The worker is stopping") -> None:
        """Answer everyone who still waits."""
        self._stopped = True
        for exchange in self._exchanges.values():
            if not exchange.settled:
                exchange.settle(_unavailable(exchange, reason))

    def holds(self, origin: Origin) -> bool:
        """Whether an origin is one of this bus, asked for still or not."""
        return origin.topic == TOPIC

    # --- RequestSource ---

    async def receive(self) -> Received:
        """What was asked, and what nobody waits for any more."""
        try:
            async with asyncio.timeout(_TURN_S):
                await self._arrived.wait()
        except TimeoutError:
            return Received()
        self._arrived.clear()
        inbox, self._inbox = self._inbox, []
        lost, self._lost = frozenset(self._lost), set()
        return Received(tuple(one for one in inbox if one.record.origin not in lost), lost)

    def serve_only(self, aliases: Collection[str] | None) -> None:
        """There are no topics per model here."""

    def scan_parked(self, due: Callable[[Record], float]) -> None:
        """Nothing is parked here."""

    async def follow(self, aliases: Collection[str]) -> None:
        """Nor do they come and go."""

    def state(self) -> SourceState:
        return SourceState()

    async def stop(self) -> None:
        """Take nothing more, and send away whoever's request has not begun."""
        self._stopped = True
        self._inbox.clear()
        for exchange in self._exchanges.values():
            if not exchange.started and not exchange.settled:
                exchange.settle(_unavailable(exchange, "The worker is stopping"))

    # --- Settlements ---

    async def started(self, origin: Origin, *, alone: bool = False) -> None:  # noqa: ARG002
        """It runs; nothing is written down, for nothing outlives this process."""
        exchange = self._exchanges.get(origin)
        if exchange is not None:
            exchange.started = True

    def engine_died(self) -> None:
        """Nobody will run again what runs here."""

    def withdraw(self, origin: Origin) -> None:
        """A run ended without a settlement: it is run again, unless the worker is stopping."""
        exchange = self._exchanges.get(origin)
        if exchange is not None:
            exchange.started = False
            if self._stopped:
                exchange.settle(_unavailable(exchange, "The worker stopped before the request was finished"))

    async def settle(self, origin: Origin, settlement: Settled) -> Settled | None:
        """Hand the result to who asked; None when nobody waits for it any more. Dead letters have no topic here.

        Raises RecordRefused for a request that is to be moved: whoever asked waits on this connection.
        """
        if not isinstance(settlement, Settlement):
            raise RecordRefused(f"{origin} was asked over HTTP; there is no topic to move it to")
        exchange = self._exchanges.get(origin)
        if exchange is None or exchange.settled:
            return None
        exchange.settle(settlement.result)
        return settlement

    async def flush(self) -> None:
        """Nothing waits to be written."""

    # --- ControlSource: control comes through the door's own routes ---

    async def desired(self) -> Sequence[Control]:
        return ()

    async def events(self) -> AsyncIterator[ControlRecord]:
        """None, for as long as the worker lives."""
        await asyncio.Future[None]()
        yield ControlRecord(None, _NOWHERE)

    # --- Announcements ---

    async def status(self, status: Status) -> None:
        """Whoever asked for a switch here hears of it as an observer of the worker."""

    async def chunk(self, origin: Origin, chunk: Chunk, reply: ReplyTo | None = None) -> None:  # noqa: ARG002
        """Hand a piece of a stream to who asked for it; waits for a reader that is slow."""
        exchange = self._exchanges.get(origin)
        if exchange is not None:
            await exchange.add(chunk)

    async def presence(self, presence: Presence) -> None:
        self._presence = presence

    async def farewell(self) -> None:
        self._presence = None

    async def control(self, event: Control) -> None:
        """There is nobody else to tell."""

    async def others(self) -> Sequence[Presence]:
        """A pool of one."""
        return () if self._presence is None else (self._presence,)

    async def predecessors(self) -> Sequence[Presence]:
        """Nobody was here before."""
        return ()


def _unavailable(exchange: Exchange, message: str) -> Result:
    now, origin = time.time(), exchange.record.origin
    return Result(
        id=exchange.id,
        origin=origin,
        outcome=Outcome.FAILED,
        status=503,
        error=ErrorObject(message=message, type="ServiceUnavailableError", code=503),
        timing=Timing(received=exchange.record.timestamp, finished=now, latency_s=now - exchange.record.timestamp),
    )


_NOWHERE = Record(TOPIC, 0, 0, 0.0, None, None)
