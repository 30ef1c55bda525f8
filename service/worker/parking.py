"""Requests whose model has no turn go back to the bus, to their model's own topic, where they cost nothing."""

import asyncio
import time

import structlog

from service.ports import RequestSource
from service.scheduling.queues import Queues
from service.settings import Settings
from service.worker.jobs import Job
from service.worker.lifecycle import Lifecycle
from service.worker.switcher import Switcher

log = structlog.get_logger(__name__)
_BATCH = 500
"""Requests moved in one sweep, so that a backlog of them does not hold up anything else."""


class Parking:
    """Keeps reading to the models that may have a turn, and moves what waits for another one for too long.

    While an operator holds a model, or in manual mode, the others' own topics are paused. A request that was moved
    and comes back too early (it had been read before its topic was paused) is moved again, to the topic's end.
    """

    def __init__(
        self,
        *,
        source: RequestSource,
        queues: Queues[Job],
        switcher: Switcher,
        lifecycle: Lifecycle,
        settings: Settings,
    ) -> None:
        self._source = source
        self._queues = queues
        self._switcher = switcher
        self._lifecycle = lifecycle
        self._park_after_s = settings.worker.park_after_s
        self._topics = settings.topics

    async def run(self) -> None:
        """Until the worker ends."""
        pause_s = min(1.0, max(0.05, self._park_after_s / 4))
        while True:
            self.sweep(time.monotonic())
            await asyncio.sleep(pause_s)

    def sweep(self, now: float) -> None:
        """Look once at who may have a turn and who has waited for one too long."""
        only = self._switcher.only(now)
        self._source.serve_only(None if only is None else {only})
        if only is None:
            return
        moving = [
            waiting.payload
            for alias in self._queues.aliases
            if alias != only
            for waiting in self._queues.waiting(alias)
            if now - waiting.arrived >= self._park_after_s and self._may_move(waiting.payload)
        ][:_BATCH]
        for job in moving:
            self._lifecycle.move(job, self._topics.for_alias(job.alias))
        if moving:
            log.info("requests.parked", count=len(moving), active=only)

    def _may_move(self, job: Job) -> bool:
        """Only what came over the bus can wait there; an HTTP caller waits on the line, and a session is here."""
        if job.request.session is not None:
            return False
        return self._topics.takes_requests(job.origin.topic)
