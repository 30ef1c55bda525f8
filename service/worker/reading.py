"""The loop that reads requests, and does with each what admission says."""

import asyncio
import math
import time

from service.ports import Delivery, RequestSource
from service.worker.admission import Admission, Admit, End, Refuse
from service.worker.lifecycle import Lifecycle
from service.worker.statuses import StatusQueue

_LOOK_AGAIN_S = 1.0
"""Looking through all that is parked for cancels that have come since: at most once in so many seconds."""


class Reading:
    """Reads for as long as it may. Raises whatever ends the source."""

    def __init__(
        self, *, source: RequestSource, admission: Admission, lifecycle: Lifecycle, statuses: StatusQueue
    ) -> None:
        self._source = source
        self._admission = admission
        self._lifecycle = lifecycle
        self._statuses = statuses
        self._stopping = False
        self._looked_at = -math.inf

    def stop(self) -> None:
        """Take nothing more."""
        self._stopping = True

    async def run(self) -> None:
        """Read until told to stop."""
        while not self._stopping:
            received = await self._source.receive()
            for origin in received.lost:
                self._lifecycle.lose(origin)
            for origin in received.unwanted:
                self._lifecycle.give_up(origin)
            for unreadable in received.unreadable:
                self._statuses.unreadable(unreadable)
            for delivery in received.deliveries:
                self._take(delivery)
            self._lifecycle.make_room()
            self._source.hold_back(self._lifecycle.throttle.crowded())

    async def watch_parked(self) -> None:
        """Until the worker ends: ask when parked requests are due, again when cancels have come; many at once."""
        changed = self._lifecycle.cancellations.changed
        while True:
            changed.clear()
            self._source.scan_parked(self._admission.due)
            await changed.wait()
            wait_s = self._looked_at + _LOOK_AGAIN_S - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._looked_at = time.monotonic()

    def _take(self, delivery: Delivery) -> None:
        match self._admission.judge(delivery):
            case Refuse(refusal, record):
                self._lifecycle.refuse(refusal, record)
            case End(job, why):
                self._lifecycle.turn_down(job, why)
            case Admit(job):
                self._lifecycle.admit(job)
