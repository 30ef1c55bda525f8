"""Control events: the desired state that the compacted topic folds to, and what comes after.

Who may publish them is the broker's to say (ACLs). Where a key file is set, events carry a signature besides: the
header ``signature`` is the HMAC-SHA256 of the record's value, in hexadecimal, made with the file's content.
"""

import hmac
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import structlog

from schemas import headers as h
from schemas.base import Outgoing, Record
from schemas.codec import decode_control, encode_control, explain, tombstone
from schemas.control import DESIRED_TYPES, EVERYONE, Cancel, Control, Resume, Sleep, Switch, Wake
from service.kafka.cancels import OldCancels
from service.kafka.reader import TopicReader
from service.ports import ControlRecord
from service.settings import Settings, TopicSettings, read_key

log = structlog.get_logger(__name__)

CANCELS_LIVE_S = 7 * 24 * 3600.0
"""How long a cancel stands where requests have no time to live of their own."""


def outgoing(event: Control, topics: TopicSettings, secret: bytes | None = None) -> Outgoing:
    """The record of a control event: desired state under its key, or a command; signed where there is a secret."""
    topic = topics.control if event.type in DESIRED_TYPES else topics.commands
    record = encode_control(topics.named(topic), event)
    if secret is None:
        return record
    return replace(record, headers=[*record.headers, (h.SIGNATURE, signature(record.value or b"", secret))])


def signature(value: bytes, secret: bytes) -> bytes:
    """The signature of a control record's value."""
    return hmac.new(secret, value, "sha256").hexdigest().encode()


def read_event(record: Record, secret: bytes | None) -> ControlRecord:
    """A record as a control event, or what is wrong with it."""
    if secret is not None and record.damage is None:
        given = h.attributes(record.headers).get(h.SIGNATURE) or ""
        if not hmac.compare_digest(given.encode(), signature(record.value or b"", secret)):
            return ControlRecord(None, record, "the signature is missing or wrong")
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
        if _takes_back(found.record):
            for subject in under.pop(key, ()):
                if subject in latest and latest[subject][0] == key:
                    del latest[subject]
        elif event is not None and event.type in DESIRED_TYPES and event.target in names:
            for subject in event.superseded(latest):
                latest.pop(subject, None)
            latest[event.subject] = key, event
            under[key].add(event.subject)
    asked = [_as_of(event, now, cancels_live_s) for _, event in latest.values()]
    everyone_sleeps = any(isinstance(event, Sleep) and event.model is None for event in asked)
    return tuple(event for event in asked if event is not None and not _goes_without_saying(event, everyone_sleeps))


def _takes_back(record: Record) -> bool:
    """Whether it is a tombstone, and not one whose value could not be read."""
    return record.value is None and record.damage is None


def _goes_without_saying(event: Control, everyone_sleeps: bool) -> bool:
    """What a worker boots into anyway."""
    return isinstance(event, Resume) or (isinstance(event, Wake) and not everyone_sleeps)


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
        self._secret = read_key(worker.control_key_file, "control_key_file")
        self._cancels_live_s = worker.ttl_s or CANCELS_LIVE_S
        # Another pool's requests may live longer than ours.
        self._cancels = OldCancels(max(self._cancels_live_s, CANCELS_LIVE_S))
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
        records = [record async for record in self._tail.backlog()]
        self._folded = True
        self._early += [record for record in records if record.topic != self._desired]
        past = [read_event(record, self._secret) for record in records if record.topic == self._desired]
        for found in past:
            self._cancels.note(found)
            if found.problem is not None and not _takes_back(found.record):
                log.warning("control.malformed", at=str(found.record.origin), why=found.problem)
        return fold(past, names=self._names, now=time.time(), cancels_live_s=self._cancels_live_s)

    def outdated(self) -> list[Outgoing]:
        """What forgets the cancels that mean nothing any more."""
        return [tombstone(self._desired, key.decode("utf-8", "replace")) for key in self._cancels.take(time.time())]

    async def events(self) -> AsyncIterator[ControlRecord]:
        """What is asked from here on, malformed events included; what is meant for others is not."""
        if not self._folded:
            await self.desired()
        for record in self._early:
            yield read_event(record, self._secret)
        async for record in self._tail:
            found = read_event(record, self._secret)
            self._cancels.note(found)
            if not _takes_back(record) and (found.event is None or found.event.target in self._names):
                yield found
