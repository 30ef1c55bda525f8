"""A bus in memory, for testing the worker's decisions without a broker: what is produced, settled and announced."""

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from schemas.base import Origin, Outgoing, Record
from schemas.codec import decode_result
from schemas.control import Control
from schemas.requests import Attempt, ReplyTo
from schemas.results import Chunk, Result
from schemas.status import Presence, Status, StatusState
from service.consumer.encoding import settle_in_turn
from service.kafka.reply_topics import Place
from service.ports import ControlRecord, Delivery, Received, RecordRefused, Settled, SourceState
from service.settings import TopicSettings

T = TypeVar("T")


class FakeBus:
    """All four ports of the bus at once. ``refuse``: topics that take nothing; ``max_bytes``: of a record."""

    def __init__(
        self,
        *,
        topics: TopicSettings | None = None,
        refuse: frozenset[str] = frozenset(),
        max_bytes: int = 1 << 20,
        secret: bytes | None = None,
    ) -> None:
        self._topics = topics or TopicSettings()
        self._refuse = refuse
        self._max_bytes = max_bytes
        self._secret = secret
        self._offsets = itertools.count()
        self._inbox: list[Delivery] = []
        self._delivered: dict[Origin, Delivery] = {}
        self._lost: set[Origin] = set()
        self._arrived = asyncio.Event()
        self._changed = asyncio.Condition()
        self._control: asyncio.Queue[ControlRecord] = asyncio.Queue()
        self._asked: list[Control] = []
        self.only: Collection[str] | None = None
        self.due: Callable[[Record], float] = lambda _record: math.inf
        self.sifted = 0
        self.followed: tuple[str, ...] = ()
        self.settled: dict[Origin, list[Outgoing]] = {}
        self.marks: dict[Origin, bool] = {}
        """Runs that were started, and whether alone."""
        self.withdrawn: list[Origin] = []
        self.statuses: list[Status] = []
        self.chunks: list[Chunk] = []
        self.presences: list[Presence] = []
        self.witnessed = False
        """Whether the engine's death was seen before the marks were flushed."""
        self.flushed = False
        self.stuck, self.stuck_s = "", 0.0
        """What it complains of, and how long that has been so."""
        self.overtaken = self.forgotten = 0
        self.lag: dict[str, int] = {}

    # --- the test's side ---

    def produce(
        self,
        body: Any,
        headers: dict[str, str] | None = None,
        *,
        topic: str = "requests",
        deaths: int = 0,
        evidence: int = 0,
        at: float | None = None,
    ) -> Origin:
        """A record as a producer writes it; bytes go as they are."""
        value = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        pairs = [(name, text.encode()) for name, text in (headers or {}).items()]
        record = Record(topic, 0, next(self._offsets), at or time.time(), None, value, pairs)
        self._inbox.append(delivery := Delivery(record, Attempt(n=deaths + 1), evidence))
        self._delivered[record.origin] = delivery
        self._arrived.set()
        return record.origin

    def write(self, record: Record) -> Origin:
        """A record as it is, but for its offset."""
        record = replace(record, offset=next(self._offsets))
        self._inbox.append(Delivery(record))
        self._arrived.set()
        return record.origin

    def redeliver(self, origin: Origin) -> None:
        """Deliver a record that was lost once more, in the same turn of reading if it was lost in this one."""
        self._inbox.append(self._delivered[origin])
        self._arrived.set()

    def lose(self, origin: Origin) -> None:
        """A rebalance gave this origin's partition to another worker."""
        self._lost.add(origin)
        self._arrived.set()

    def command(self, event: Control) -> None:
        self._control.put_nowait(ControlRecord(event, _NOWHERE))

    def malformed(self, problem: str) -> None:
        self.read(ControlRecord(None, _NOWHERE, problem))

    def read(self, record: ControlRecord) -> None:
        """A control record, whatever became of decoding it."""
        self._control.put_nowait(record)

    async def until(self, found: Callable[[], T | None]) -> T:
        """Wait until something announced, settled or marked makes ``found`` true."""
        async with asyncio.timeout(10), self._changed:
            while not (value := found()):
                await self._changed.wait()
            return value

    async def result(self, origin: Origin) -> Result:
        """The result that settles an origin."""
        records = await self.until(lambda: self.settled.get(origin))
        record = next(r for r in records if r.topic != "dead-letters")
        return decode_result(Record(record.topic, 0, 0, 0.0, record.key, record.value, record.headers))

    async def said(self, control_id: str, state: StatusState) -> Status:
        """A status that answers a control event."""
        return await self.until(
            lambda: next((s for s in self.statuses if s.control_id == control_id and s.state is state), None)
        )

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- RequestSource ---

    async def receive(self) -> Received:
        try:
            async with asyncio.timeout(0.1):
                await self._arrived.wait()
        except TimeoutError:
            return Received()
        self._arrived.clear()
        deliveries, self._inbox = tuple(self._inbox), []
        lost, self._lost = frozenset(self._lost), set()
        return Received(deliveries, lost)

    def serve_only(self, aliases: Collection[str] | None) -> None:
        self.only = aliases

    def sift(self, due: Callable[[Record], float]) -> None:
        self.due = due
        self.sifted += 1

    async def follow(self, aliases: Collection[str]) -> None:
        self.followed = tuple(aliases)

    def state(self) -> SourceState:
        return SourceState(
            lag=self.lag, stuck=self.stuck, stuck_s=self.stuck_s, overtaken=self.overtaken, forgotten=self.forgotten
        )

    async def stop(self) -> None:
        self._inbox.clear()

    # --- Settlements ---

    async def started(self, origin: Origin, *, alone: bool = False) -> None:
        self.marks[origin] = alone
        await self._note()

    def witness(self) -> None:
        self.witnessed = not self.flushed

    def withdraw(self, origin: Origin) -> None:
        self.withdrawn.append(origin)

    async def settle(self, origin: Origin, settlement: Settled) -> Settled | None:
        return await settle_in_turn(
            origin, settlement, self._topics, partial(self._commit, origin), self, secret=self._secret
        )

    async def place(self, reply: ReplyTo | None) -> Place:
        """Every reply topic is there that may be written to."""
        return Place(reply) if reply is not None and self._topics.allows_reply(reply.topic) else Place()

    async def gone(self, reply: ReplyTo) -> bool:
        return False

    async def _commit(self, origin: Origin, records: Sequence[Outgoing]) -> bool:
        assert origin not in self.settled, f"{origin} was settled twice"
        for record in records:
            if record.topic in self._refuse or len(record.value or b"") > self._max_bytes:
                raise RecordRefused(f"{record.topic} does not take it")
        self.settled[origin] = list(records)
        await self._note()
        return True

    async def flush(self) -> None:
        self.flushed = True

    # --- ControlSource ---

    async def desired(self) -> Sequence[Control]:
        return self._asked

    async def events(self) -> AsyncIterator[ControlRecord]:
        while True:
            yield await self._control.get()

    # --- Announcements ---

    async def status(self, status: Status) -> None:
        self.statuses.append(status)
        await self._note()

    async def chunk(self, origin: Origin, chunk: Chunk, reply: ReplyTo | None = None) -> None:
        self.chunks.append(chunk)
        await self._note()

    async def presence(self, presence: Presence) -> None:
        self.presences.append(presence)
        await self._note()

    async def farewell(self) -> None:
        return None

    async def control(self, event: Control) -> None:
        self._asked.append(event)

    async def others(self) -> Sequence[Presence]:
        return self.presences

    async def predecessors(self) -> Sequence[Presence]:
        served = (presence for presence in self.presences if presence.state not in {"starting", "loading"})
        return list({presence.worker: presence for presence in served}.values())


_NOWHERE = Record("control", 0, 0, 0.0, None, None)
