"""Control events: the desired state that the compacted topic folds to, and what comes after.

Who may publish them is the broker's to say (ACLs). Where a key file is set, events and tombstones carry a signature
besides, which is good for one topic and key, for some minutes, and once.
"""

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import structlog

from schemas.base import Outgoing, Record
from schemas.codec import decode_control, encode_control, explain, tombstone
from schemas.control import DESIRED_TYPES, EVERYONE, Cancel, Control, Pause, Resume, Sleep, Switch, Wake
from schemas.marks import Keys
from service.kafka.cancels import OldCancels
from service.kafka.reader import TopicReader
from service.kafka.signatures import Replays, flaw, sign
from service.ports import ControlRecord
from service.settings import Settings, TopicSettings, read_keys

log = structlog.get_logger(__name__)

CANCELS_LIVE_S = 7 * 24 * 3600.0
"""How long a cancel stands at least: a request may have a deadline of its own."""


def outgoing(event: Control, topics: TopicSettings, keys: Keys = ()) -> Outgoing:
    """The record of a control event: desired state under its key, or a command; signed where there are keys."""
    topic = topics.control if event.type in DESIRED_TYPES else topics.commands
    return sign(encode_control(topics.named(topic), event), keys, time.time())


def read_event(record: Record, keys: Keys) -> ControlRecord:
    """A record as a control event, as a tombstone that takes one back, or what is wrong with it."""
    if keys and record.damage is None and (problem := flaw(record, keys)) is not None:
        return ControlRecord(None, record, problem)
    if record.value is None and record.damage is None:
        return ControlRecord(None, record)
    try:
        event = decode_control(record)
        if isinstance(event, Cancel):  # it means what was received before it, and that is by the broker's clock
            event = event.model_copy(update={"issued": record.timestamp or event.issued})
        return ControlRecord(event, record)
    except ValueError as error:
        return ControlRecord(None, record, explain(error))


def fold(
    records: Iterable[ControlRecord], *, names: Collection[str], now: float, cancels_live_s: float = CANCELS_LIVE_S
) -> tuple[Control, ...]:
    """The desired state for whoever answers to ``names`` (everyone, its pool, its own id), in the order it was asked.

    The latest event per subject counts, whichever of the names it was addressed to; a tombstone takes back what its
    key said. A switch outlives its hold, but then holds for nothing; an old cancel cancels nothing.
    """
    latest: dict[str, tuple[bytes | None, Control]] = {}
    under: defaultdict[bytes | None, set[str]] = defaultdict(set)
    for found in records:
        key, event = found.record.key, found.event
        if found.takes_back:
            for subject in under.pop(key, ()):
                if subject in latest and latest[subject][0] == key:
                    del latest[subject]
        elif event is not None and event.type in DESIRED_TYPES and event.target in names:
            for subject in event.superseded(latest):
                latest.pop(subject, None)
            latest[event.subject] = key, event
            under[key].add(event.subject)
    asked = [_as_of(event, now, cancels_live_s) for _, event in latest.values()]
    of_all = {type(event) for event in asked if isinstance(event, Sleep | Pause) and event.model is None}
    return tuple(event for event in asked if event is not None and not _goes_without_saying(event, of_all))


def _goes_without_saying(event: Control, of_all: Collection[type[Control]]) -> bool:
    """What a worker boots into anyway, unless all models were put to sleep or paused."""
    return (isinstance(event, Resume) and Pause not in of_all) or (isinstance(event, Wake) and Sleep not in of_all)


def _as_of(event: Control, now: float, cancels_live_s: float) -> Control | None:
    """An event as it still counts now; None where it does not."""
    if isinstance(event, Cancel) and event.issued + cancels_live_s < now:
        return None
    if isinstance(event, Switch) and isinstance(event.hold, int | float):
        return event.model_copy(update={"hold": max(0.0, event.issued + event.hold - now), "issued": now})
    return event


class ControlTopics:
    """Desired state and commands from Kafka, for one worker. Opened with ``async with``."""

    def __init__(self, *, settings: Settings) -> None:
        topics, worker = settings.topics, settings.worker
        self._names = frozenset({EVERYONE, worker.group_id, worker.worker_id})
        self._keys = read_keys(worker.control_key_file, "control_key_file")
        self._replays = Replays()
        # Requests with deadlines of their own, and another pool's, may live longer than ours do by themselves.
        self._cancels_live_s = max(worker.ttl_s or 0.0, CANCELS_LIVE_S)
        self._cancels = OldCancels(self._cancels_live_s)
        self._desired = topics.named(topics.control)
        commands = topics.named(topics.commands)
        self._tail = TopicReader(
            kafka=settings.kafka, topics=(self._desired, commands), from_end={commands}, damaged=True
        )
        self._early: list[Record] = []
        self._folded = False
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self._tail)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def desired(self) -> Sequence[Control]:
        """What to boot into. Asked once, before ``events``, which goes on from here."""
        past: list[ControlRecord] = []
        async for record in self._tail.backlog():
            if record.topic != self._desired:
                self._early.append(record)
                continue
            found = self._read(record)
            self._cancels.note(found)
            if found.problem is None:
                past.append(found)  # what strangers write is told and not held: compaction keeps one of each key
            else:
                log.warning("control.malformed", at=str(record.origin), why=found.problem)
        self._folded = True
        return fold(past, names=self._names, now=time.time(), cancels_live_s=self._cancels_live_s)

    def outdated(self) -> list[Outgoing]:
        """What forgets the cancels that mean nothing any more."""
        now = time.time()
        gone = [tombstone(self._desired, key.decode("utf-8", "replace")) for key in self._cancels.take(now)]
        return [sign(record, self._keys, now) for record in gone]

    async def events(self) -> AsyncIterator[ControlRecord]:
        """What is asked from here on, malformed events included; what is meant for others is not."""
        if not self._folded:
            await self.desired()
        for record in self._early:
            yield self._read(record)
        async for record in self._tail:
            found = self._read(record)
            self._cancels.note(found)
            if not found.takes_back and (found.event is None or found.event.target in self._names):
                yield found

    def _read(self, record: Record) -> ControlRecord:
        found = read_event(record, self._keys)
        if self._keys and found.problem is None and self._replays.note(record):
            return ControlRecord(None, record, "it was written before, and its signature is good for one time")
        return found
