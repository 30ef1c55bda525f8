"""A bus in memory: what is asked over HTTP runs through the same reception, queues and scheduler as what Kafka brings.

A request is a record of the topic ``http``; its settlement and the pieces of its stream go to whoever asked, and
nowhere else. It lives as long as the connection: a request whose asker has gone is cancelled, and what it has cost is
told; one that can't be finished before the worker ends is answered so.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from schemas.base import Headers, Origin, Record
from schemas.control import Control
from schemas.errors import ErrorObject
from schemas.progress import Progress
from schemas.requests import ReplyTo
from schemas.results import Chunk, Outcome, Result, Timing
from schemas.status import Presence, Status
from service.errors import Overloaded, RecordRefused, Unavailable
from service.ports import ControlRecord, Delivery, Received, Say, Settled, Settlement, SourceState

TOPIC = "http"
"""The topic of the origins of what was asked here; no request topic of the broker may have this name."""
_TURN_S = 0.25


class Exchange:
    """One request and what comes back: pieces of a stream, if one was asked for, then the result.

    A run never waits for its reader: ``backlog`` pieces wait here, and with one more the exchange has overflowed.
    """

    def __init__(self, record: Record, id_: str, *, backlog: int) -> None:
        self.record = record
        self.id = id_
        self.started = False
        self.settled = False
        self.overflowed = False
        self._backlog = backlog
        self._came: asyncio.Queue[Chunk | Result] = asyncio.Queue()

    async def next(self) -> Chunk | Result:
        """The next piece; the result is the last to come."""
        return await self._came.get()

    def add(self, piece: Chunk) -> None:
        """A piece has come; what comes after an overflow is nobody's."""
        if self._came.qsize() < self._backlog and not self.overflowed:
            self._came.put_nowait(piece)
        else:
            self.overflowed = True

    def settle(self, result: Result) -> None:
        """The first result counts."""
        if not self.settled:
            self.settled = True
            self._came.put_nowait(result)


class InMemoryBus:
    """The ports RequestSource, Settlements, ControlSource and Announcements, without a broker.

    ``max_requests`` and ``max_bytes`` bound what is held, bodies that are still arriving included; more is refused.
    ``backlog`` bounds the pieces of each stream that its reader has not taken.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, backlog: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._backlog = backlog
        self._offsets = itertools.count()
        self._exchanges: dict[Origin, Exchange] = {}
        self._bytes = 0
        self._inbox: dict[Origin, Delivery] = {}
        self._unwanted: set[Origin] = set()
        """What was given up since it was last said."""
        self._unsettled: dict[Origin, Exchange] = {}
        """What was given up in the worker's hands, and has not ended there."""
        self._arrived = asyncio.Event()
        self._stopped = False
        self._presence: Presence | None = None

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def held_bytes(self) -> int:
        """Bytes of what is arriving, waiting or running: by them tests see that the bound is kept, and all let go."""
        return self._bytes

    # --- the asker's side ---

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], None]]:
        """Count what arrives of a body, or is made of it, for as long as the block lasts.

        Calling what it gives with a number of bytes takes these, too. Both raise Unavailable, Overloaded.
        """
        self._admit(0)
        held = 0
        with self.holding() as hold:

            def take(size: int) -> None:
                nonlocal held
                self._admit(size)
                held += size
                hold(held)

            yield take

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Count what is held of a body that is no request, as long as the block lasts; a file is stored as it comes.

        Calling what it gives says how many bytes that is from now on. It raises Overloaded where there is no room.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._make_room(size - held)
            self._bytes += size - held
            held = size

        try:
            yield hold
        finally:
            self._bytes -= held

    def _admit(self, size: int) -> None:
        if self._stopped:
            raise Unavailable("the worker is stopping")
        if len(self._exchanges) >= self._max_requests:
            raise Overloaded(f"{len(self._exchanges)} requests are waiting or running already")
        self._make_room(size)

    def _make_room(self, size: int) -> None:
        """What becomes less has room whatever there is."""
        if size > 0 and self._bytes + size > self._max_bytes:
            raise Overloaded(f"requests with {self._bytes} bytes are arriving, waiting or running already")

    @contextmanager
    def ask(self, value: bytes, headers: Headers, *, id_: str) -> Iterator[Exchange]:
        """Deliver a request. Leaving the block before its result gives it up, and what runs of it is aborted.

        Raises Unavailable, Overloaded.
        """
        record = Record(TOPIC, 0, next(self._offsets), time.time(), None, value, [("ce_id", id_.encode()), *headers])
        self._admit(record.size)
        exchange = Exchange(record, id_, backlog=self._backlog)
        self._exchanges[record.origin] = exchange
        self._bytes += record.size
        self._inbox[record.origin] = Delivery(record, active_meant=True)
        self._arrived.set()
        try:
            yield exchange
        finally:
            del self._exchanges[exchange.record.origin]
            self._bytes -= exchange.record.size
            if not exchange.settled:
                self._give_up(exchange)

    def _give_up(self, exchange: Exchange) -> None:
        """Nobody wants it any more: it is not delivered, or what runs of it is aborted."""
        origin = exchange.record.origin
        if self._inbox.pop(origin, None) is None:
            self._unwanted.add(origin)
            self._unsettled[origin] = exchange
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
        inbox, self._inbox = self._inbox, {}
        unwanted, self._unwanted = self._unwanted, set()
        return Received(tuple(inbox.values()), unwanted=frozenset(unwanted))

    def serve_only(self, aliases: Collection[str] | None) -> None:
        """There are no topics per model here."""

    def hold_back(self, partitions: Collection[tuple[str, int]]) -> None:
        """Nor is anything read from any."""

    def scan_parked(self, due: Callable[[Record], float]) -> None:
        """Nothing is parked here."""

    def before_rebalance(self, hand_over: Callable[[], None]) -> None:
        """Nobody else is there."""

    def weigh(self, load: Callable[[str, float], float]) -> None:
        """Nor is anything to be shared out."""

    def place_anew(self, missed: Mapping[str, float]) -> None:
        """Nor is anything to be shared out."""

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

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:  # noqa: ARG002
        """It runs; nothing is written down, for nothing outlives this process. False: nobody waits for it any more."""
        given_up = self._unsettled.get(origin)
        if given_up is not None and given_up.started:
            return True  # it ends as what is cancelled does
        self._unsettled.pop(origin, None)
        exchange = self._exchanges.get(origin)
        if exchange is None or given_up is not None:
            return False
        exchange.started = True
        return True

    def engine_died(self, culprit: Origin | None) -> None:
        """Nobody will run again what runs here."""

    def withdraw(self, origin: Origin) -> None:
        """A run ended without a settlement: it is run again, unless the worker is stopping."""
        exchange = self._exchanges.get(origin)
        if exchange is not None:
            exchange.started = False
            if self._stopped:
                exchange.settle(_unavailable(exchange, "The worker stopped before the request was finished"))

    def keep(self, origin: Origin, say: Say) -> None:
        """Nobody asks: nobody will own what is here but this process."""

    def session(self, origin: Origin, name: str, part: int) -> Progress | None:  # noqa: ARG002
        """None: what is asked on a connection is no part of a session."""
        return None

    def keep_session(self, origin: Origin, progress: Progress) -> None:
        """As for what a run has said."""

    async def settle(self, origin: Origin, settlement: Settled) -> Settled | None:
        """Hand the result to who asked; what was given up ends with it, too. Dead letters have no topic here.

        None: it has ended already.

        Raises RecordRefused for a request that is to be moved: whoever asked waits on this connection.
        """
        if not isinstance(settlement, Settlement):
            raise RecordRefused(f"{origin} was asked over HTTP; there is no topic to move it to")
        exchange = self._exchanges.get(origin)
        if exchange is not None and not exchange.settled:
            exchange.settle(settlement.result)
        elif origin in self._unsettled:
            del self._unsettled[origin]
        else:
            return None
        return settlement

    async def flush(self) -> None:
        """Nothing waits to be written."""

    # --- ControlSource: control comes through routes of the server ---

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
        """Hand a piece of a stream to who asked for it; a run whose reader is too far behind is given up."""
        exchange = self._exchanges.get(origin)
        if exchange is None or exchange.settled:
            return
        exchange.add(chunk)
        if exchange.overflowed:
            self._give_up(exchange)
            message = f"The stream was not read: {self._backlog} pieces of it were waiting, and its run was aborted"
            exchange.settle(_failed(exchange, message, status=408, kind="RequestTimeoutError"))

    async def presence(self, presence: Presence) -> None:
        self._presence = presence

    async def farewell(self) -> None:
        self._presence = None

    def usage(self, usage: Mapping[str, Any]) -> None:
        """There is no topic for it."""

    async def control(self, event: Control) -> None:
        """There is nobody else to tell."""

    async def others(self) -> Sequence[Presence]:
        """A pool of one."""
        return () if self._presence is None else (self._presence,)

    async def predecessors(self) -> Sequence[Presence]:
        """Nobody was here before."""
        return ()


def _unavailable(exchange: Exchange, message: str) -> Result:
    return _failed(exchange, message, status=503, kind="ServiceUnavailableError")


def _failed(exchange: Exchange, message: str, *, status: int, kind: str) -> Result:
    now, origin = time.time(), exchange.record.origin
    return Result(
        id=exchange.id,
        origin=origin,
        outcome=Outcome.FAILED,
        status=status,
        error=ErrorObject(message=message, type=kind, code=status),
        timing=Timing(received=exchange.record.timestamp, finished=now, latency_s=now - exchange.record.timestamp),
    )


_NOWHERE = Record(TOPIC, 0, 0, 0.0, None, None)
