"""Who else is there: the workers' presences, folded from their compacted topic."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import structlog
from aiokafka import TopicPartition

from schemas import headers as h
from schemas.base import Record
from schemas.codec import decode_presence
from schemas.marks import Keys, is_signed
from schemas.status import LEFT, Presence
from service.kafka.reader import TopicReader

log = structlog.get_logger(__name__)

_BEFORE_SERVING = frozenset({"starting", "loading"})
STALE_INTERVALS = 4
GONE_INTERVALS = 20
_LONGEST_NAME = 256
_REMEMBERED = 256
"""Workers of which is known what they said last, though they may be gone."""


class Roster:
    """The latest presence per worker, and how long ago it was heard.

    Ages count from when we heard a presence, by our clock, not from what another host's clock says: only for those
    that were there before us the record's timestamp has to do. Pure but for the clocks it is given. ``keys``: the
    pool's, without whose signature nothing is believed.
    """

    def __init__(
        self,
        *,
        keys: Keys = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._wall = wall
        self._heard: dict[str, tuple[Presence, float]] = {}
        self._served: OrderedDict[str, Presence] = OrderedDict()
        self.places: dict[TopicPartition, int] = {}
        """Where what has not been heard yet begins."""

    def hear(self, records: Iterable[Record], *, live: bool) -> None:
        """Fold records in. ``live``: they were written while we listened."""
        for record in records:
            self.places[TopicPartition(record.topic, record.partition)] = record.offset + 1
            if self._keys and not is_signed(record, h.attributes(record.headers), self._keys):
                log.debug("presence.not_ours", at=str(record.origin))
                continue
            worker = (record.key or b"").decode("utf-8", "replace")[:_LONGEST_NAME]
            at = self._clock() - (0.0 if live else max(0.0, self._wall() - record.timestamp))
            self._heard.pop(worker, None)
            try:
                presence = decode_presence(record)
            except ValueError:
                log.warning("presence.malformed", worker=worker)
                continue
            if presence is not None and presence.worker.encode() != record.key:
                log.warning("presence.malformed", worker=worker, reason="its key names another worker")
                continue
            if presence is not None:
                self._heard[worker] = (presence, at)
                if presence.state not in _BEFORE_SERVING:
                    self._remember(worker, presence)

    def present(self) -> tuple[Presence, ...]:
        """Those heard within a few of their intervals that have not left."""
        fresh = (presence for presence, age in self._ages() if age <= STALE_INTERVALS * presence.interval_s)
        return tuple(presence for presence in fresh if presence.state != LEFT)

    def served(self, pool: str) -> tuple[Presence, ...]:
        """What each worker of a pool said last while it served, of those that are gone too; the latest last."""
        return tuple(presence for presence in self._served.values() if presence.pool == pool)

    def leads(self, worker: str) -> bool:
        """Whether what one worker does for all is this one's to do: the first by name of those that are there."""
        return worker <= min((presence.worker for presence in self.present()), default=worker)

    def gone(self) -> tuple[str, ...]:
        """The workers whose presence nobody renews any more: to be tombstoned."""
        return tuple(presence.worker for presence, age in self._ages() if age > GONE_INTERVALS * presence.interval_s)

    def _remember(self, worker: str, presence: Presence) -> None:
        self._served[worker] = presence
        self._served.move_to_end(worker)
        if len(self._served) > _REMEMBERED:
            self._served.popitem(last=False)

    def _ages(self) -> Iterable[tuple[Presence, float]]:
        now = self._clock()
        return [(presence, now - at) for presence, at in self._heard.values()]


async def listen(tail: TopicReader, roster: Roster, caught_up: asyncio.Event) -> None:
    """Keep a roster current, until cancelled."""
    async for record in tail.backlog():
        roster.hear([record], live=False)
    caught_up.set()
    while True:
        roster.hear(await tail.read(), live=True)
