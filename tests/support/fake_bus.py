"""A bus in memory, for testing the worker's decisions without a broker: what is produced, settled and announced."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from aiokafka import TopicPartition

from schemas.base import Origin, Outgoing, Record
from schemas.codec import decode_result
from schemas.control import Control
from schemas.marks import Keys
from schemas.progress import Progress
from schemas.requests import ReplyTo
from schemas.results import Chunk, Result
from schemas.status import Presence, Status, StatusState
from service.consumer.encoding import settle_in_turn
from service.consumer.in_flight import Limits
from service.errors import RecordRefused
from service.kafka.reply_topics import Place
from service.ports import ControlRecord, Received, Say, Settled, SourceState, Unreadable
from service.settings import TopicSettings
from tests.support.fake_kafka import LIMITS, FakeBroker, FakeMember, FakeWriter
from tests.support.waiting import PATIENCE_S

T = TypeVar("T")


class FakeBus:
    """All four ports of the bus at once. ``refuse``: topics that take nothing; ``max_bytes``: of a record.

    Several on one ``broker`` are a pool; ``assign`` says whose the partitions are. One that was assigned nothing has
    all that there is.
    """

    def __init__(
        self,
        *,
        topics: TopicSettings | None = None,
        refuse: frozenset[str] = frozenset(),
        max_bytes: int = 1 << 20,
        keys: Keys = (),
        broker: FakeBroker | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._topics = topics or TopicSettings()
        self._assigned: frozenset[TopicPartition] | None = None
        self._deaths: dict[Origin, tuple[int, int]] = {}
        self.refuse = set(refuse)
        self._max_bytes = max_bytes
        self._keys = keys
        self.broker = broker or FakeBroker()
        self._arrived = self.broker.watch()
        self._limits = limits
        self.open()
        self._skipped: list[Unreadable] = []
        self._changed = asyncio.Condition()
        self._control: asyncio.Queue[ControlRecord] = asyncio.Queue()
        self._asked: list[Control] = []
        self.only: Collection[str] | None = None
        self.served_when_it_joined: list[Collection[str] | None] = []
        """What may be read, as of the first turn of reading: empty before that."""
        self.due: Callable[[Record], float] = lambda _record: math.inf
        self.hand_over: Callable[[], None] = lambda: None
        self.sifted = 0
        self.load: Callable[[str, float], float] = lambda _alias, requests_per_s: requests_per_s
        self.placements_asked: list[dict[str, float]] = []
        self.followed: tuple[str, ...] = ()
        self.settled: dict[Origin, list[Outgoing]] = {}
        self.settled_again: list[Origin] = []
        """What somebody tried to settle a second time."""
        self.marks: dict[Origin, bool] = {}
        """Runs that were started, and whether alone."""
        self.withdrawn: list[Origin] = []
        self.kept: dict[Origin, Progress] = {}
        """What runs had said when it was kept last."""
        self.statuses: list[Status] = []
        self.chunks: list[Chunk] = []
        self.presences: list[Presence] = []
        self.usages: list[dict[str, Any]] = []
        """What was said apart from any settlement."""
        self.witnessed = False
        """Whether the engine's death was seen before the marks were flushed."""
        self.culprit: Origin | None = None
        """Whom the engine's death was blamed on."""
        self.flushed = False
        self.full_s = 0.0
        self.stuck, self.stuck_s = "", 0.0
        self.away_s = 0.0
        """What it complains of, and how long that has been so."""
        self.overtaken = self.forgotten = 0
        self.lag: dict[str, int] = {}

    # --- the test's side ---

    def open(self) -> None:
        """A new worker reads from here: as one that starts again, it takes over what the one before it left."""
        self.member = FakeMember(self.broker, shared=self._topics.for_all, limits=self._limits, marks=self._deaths)

    def produce(
        self,
        body: Any,
        headers: dict[str, str] | None = None,
        *,
        topic: str = "requests",
        deaths: int = 0,
        evidence: int = 0,
        at: float | None = None,
        progress: Progress | None = None,
    ) -> Origin:
        """A record as a producer writes it, bytes as they are; ``progress``: what a run of it had said elsewhere."""
        value = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        pairs = [(name, text.encode()) for name, text in (headers or {}).items()]
        origin = self.broker.append(topic, value, pairs, at=at)
        if deaths:
            self._deaths[origin] = deaths, evidence
        if progress is not None:
            self.broker.progress[origin] = progress
        return origin

    def write(self, record: Record) -> Origin:
        """A record as it is, but for its place."""
        more = {"key": record.key, "at": record.timestamp, "damage": record.damage}
        return self.broker.append(record.topic, record.value, record.headers, **more)

    def assign(self, partitions: Collection[TopicPartition]) -> None:
        """The group gives this member these partitions and no others."""
        self.hand_over()
        self.member.flush(own_marks=False)
        self._assigned = frozenset(partitions)
        self.member.assign(self._assigned)
        self._arrived.set()

    def rebalance(self) -> None:
        """Another worker had every partition for a while, and settled nothing; both in one turn of reading."""
        there = self.member.consumer.assignment()
        self.member.assign(())
        self.member.assign(there)
        self._arrived.set()

    def lose(self, origin: Origin) -> None:
        """Another worker had this origin's partition for a while, and settled it."""
        where = TopicPartition(origin.topic, origin.partition)
        other = FakeWriter(self.broker, where)
        other.take_over()
        other.ledger.pick(origin.offset)
        other.settle([origin.offset])
        self.member.take_over(self.member.writers[where])
        self._arrived.set()

    def skip(self, found: Unreadable) -> None:
        """Something was written that can't be decoded."""
        self._skipped.append(found)
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
        async with asyncio.timeout(PATIENCE_S), self._changed:
            while not (value := found()):
                await self._changed.wait()
            return value

    async def result(self, origin: Origin) -> Result:
        """The result that settles an origin."""
        records = await self.until(lambda: self.settled.get(origin))
        return self.decoded(next(r for r in records if r.topic != "dead-letters"))

    def decoded(self, record: Outgoing) -> Result:
        """The result in a record."""
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
        if not self.served_when_it_joined:
            self.served_when_it_joined.append(self.only)
        received = await self._turn()
        if received.deliveries or received.lost or received.unreadable:
            return received
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await self._arrived.wait()
        return await self._turn()

    async def _turn(self) -> Received:
        self._arrived.clear()
        there = frozenset(self.broker.logs)
        if self._assigned is None and there != self.member.consumer.assignment():
            self.member.assign(there)
        await self.member.scan.turn()
        received = await self.member.receive()
        skipped, self._skipped = tuple(self._skipped), []
        return replace(received, unreadable=skipped)

    def serve_only(self, aliases: Collection[str] | None) -> None:
        self.only = aliases
        self.member.polling.serve_only(None if aliases is None else map(self._topics.for_alias, aliases))

    def hold_back(self, partitions: Collection[tuple[str, int]]) -> None:
        self.member.polling.hold_back(partitions)

    def scan_parked(self, due: Callable[[Record], float]) -> None:
        self.due = due
        self.sifted += 1
        self.member.scan.look_again(due)

    def before_rebalance(self, hand_over: Callable[[], None]) -> None:
        self.hand_over = hand_over

    def weigh(self, load: Callable[[str, float], float]) -> None:
        self.load = load

    def place_anew(self, missed: Mapping[str, float]) -> None:
        self.placements_asked.append(dict(missed))

    async def follow(self, aliases: Collection[str]) -> None:
        self.followed = tuple(aliases)

    def state(self) -> SourceState:
        return SourceState(
            partitions=self.member.partitions(),
            lag=self.lag,
            stuck=self.stuck,
            stuck_s=self.stuck_s,
            away_s=self.away_s,
            full_s=self.full_s,
            overtaken=self.overtaken + self.member.polling.overtaken,
            forgotten=self.forgotten,
        )

    async def stop(self) -> None:
        self.member.polling.stop()

    # --- Settlements ---

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        self.marks[origin] = alone
        ours = self.member.started(origin, alone=alone)
        await self._note()
        return ours

    def engine_died(self, culprit: Origin | None) -> None:
        self.witnessed = not self.flushed
        self.culprit = culprit
        self.member.engine_died(culprit)

    def withdraw(self, origin: Origin) -> None:
        self.withdrawn.append(origin)
        self.member.withdraw(origin)

    def keep(self, origin: Origin, say: Say) -> None:
        if (progress := say()) is not None:
            self.kept[origin] = progress
        self.member.keep(origin, say)

    def session(self, origin: Origin, name: str, part: int) -> Progress | None:
        return self.member.session(origin, name, part)

    def keep_session(self, origin: Origin, progress: Progress) -> None:
        self.member.keep_session(origin, progress)

    async def settle(self, origin: Origin, settlement: Settled) -> Settled | None:
        return await settle_in_turn(
            origin, settlement, self._topics, partial(self._commit, origin), self, keys=self._keys
        )

    async def place(self, reply: ReplyTo | None) -> Place:
        """Every reply topic is there that may be written to."""
        return Place(reply) if reply is not None and self._topics.allows_reply(reply.topic) else Place()

    async def gone(self, reply: ReplyTo) -> bool:
        return False

    async def _commit(self, origin: Origin, records: Sequence[Outgoing]) -> bool:
        if origin in self.settled:
            self.settled_again.append(origin)
            return False
        for record in records:
            if record.topic in self.refuse or len(record.value or b"") > self._max_bytes:
                raise RecordRefused(f"{record.topic} does not take it")
        if not self.member.settle([origin]):
            return False
        self.settled[origin] = list(records)
        for record in records:
            if record.topic == self._topics.named(self._topics.throttled):  # what is parked, tests write themselves
                self.broker.append(record.topic, record.value, record.headers, key=record.key)
        await self._note()
        return True

    async def flush(self) -> None:
        self.flushed = True
        self.member.flush()

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

    def usage(self, usage: Mapping[str, Any]) -> None:
        self.usages.append(dict(usage))

    async def others(self) -> Sequence[Presence]:
        return self.presences

    async def predecessors(self) -> Sequence[Presence]:
        served = (presence for presence in self.presences if presence.state not in {"starting", "loading"})
        return list({presence.worker: presence for presence in served}.values())


_NOWHERE = Record("control", 0, 0, 0.0, None, None)


class SlowMarks(FakeBus):
    """The broker takes its time for a mark that must be committed before its run."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = asyncio.Event()

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        ours = await super().started(origin, alone=alone)
        if alone:
            await self.committed.wait()
        return ours
