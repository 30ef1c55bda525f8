"""Who else is there: the workers' presences, folded from their compacted topic."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable

import structlog

from schemas.base import Record
from schemas.codec import decode_presence
from schemas.status import LEFT, Presence
from service.kafka.reader import TopicReader

log = structlog.get_logger(__name__)

STALE_INTERVALS = 4
GONE_INTERVALS = 20


class Roster:
    """The latest presence per worker, and how long ago it was heard.

    Ages count from when we heard a presence, by our clock, not from what another host's clock says: only for those
    that were there before us the record's timestamp has to do. Pure but for the clocks it is given.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._heard: dict[str, tuple[Presence, float]] = {}
        self._learnt: dict[str, tuple[Presence, float]] = {}

    def hear(self, records: Iterable[Record], *, live: bool) -> None:
        """Fold records in. ``live``: they were written while we listened."""
        for record in records:
            worker = (record.key or b"").decode("utf-8", "replace")
            at = self._clock() - (0.0 if live else max(0.0, self._wall() - record.timestamp))
            self._heard.pop(worker, None)
            try:
                presence = decode_presence(record)
            except ValueError:
                log.warning("presence.malformed", worker=worker)
                continue
            if presence is not None:
                self._heard[worker] = (presence, at)
                if any(presence.costs.values()) and at >= self._learnt.get(presence.pool, (presence, -math.inf))[1]:
                    self._learnt[presence.pool] = (presence, at)

    def present(self) -> tuple[Presence, ...]:
        """Those heard within a few of their intervals that have not left."""
        fresh = (presence for presence, age in self._ages() if age <= STALE_INTERVALS * presence.interval_s)
        return tuple(presence for presence in fresh if presence.state != LEFT)

    def learnt(self, pool: str) -> Presence | None:
        """The presence heard last in a pool that has learnt costs, of a worker that is there or is gone."""
        found = self._learnt.get(pool)
        return found[0] if found else None

    def gone(self) -> tuple[str, ...]:
        """The workers whose presence nobody renews any more: to be tombstoned."""
        return tuple(presence.worker for presence, age in self._ages() if age > GONE_INTERVALS * presence.interval_s)

    def _ages(self) -> Iterable[tuple[Presence, float]]:
        now = self._clock()
        return [(presence, now - at) for presence, at in self._heard.values()]


async def listen(tail: TopicReader, roster: Roster, caught_up: asyncio.Event) -> None:
    """Keep a roster current, until cancelled."""
    roster.hear([record async for record in tail.backlog()], live=False)
    caught_up.set()
    while True:
        roster.hear(await tail.read(), live=True)
