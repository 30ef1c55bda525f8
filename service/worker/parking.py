"""Requests whose model has no turn go back to the bus, to their model's own topic, where they cost nothing."""

import asyncio
import time
from collections.abc import Collection

import structlog

from service.ports import RequestSource
from service.scheduling.scheduler import Scheduler
from service.settings import Settings
from service.worker.jobs import Job
from service.worker.lifecycle import Lifecycle
from service.worker.model_states import ModelStates
from service.worker.switcher import Switcher

log = structlog.get_logger(__name__)
_BATCH = 500
"""Requests moved in one sweep, so that a backlog of them does not hold up anything else."""


class Parking:
    """Keeps reading to the models that may have a turn, and moves what waits for another one for too long.

    While an operator holds a model, or in manual mode, the others' own topics are paused, and so are those of models
    that an operator has paused; where these are all there are, nothing is read once there is no room. A request that
    was moved and comes back too early (it had been read before its topic was paused) is moved again, to the topic's
    end.
    """

    def __init__(
        self,
        *,
        source: RequestSource,
        scheduler: Scheduler[Job],
        states: ModelStates,
        switcher: Switcher,
        lifecycle: Lifecycle,
        settings: Settings,
    ) -> None:
        self._source = source
        self._scheduler = scheduler
        self._states = states
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
        served = self._served(now)
        self._source.serve_only(served)
        if served is None:
            return
        moving = [
            waiting.payload
            for alias in self._scheduler.queues.aliases
            if alias not in served
            for waiting in self._scheduler.queues.waiting(alias)
            if now - waiting.arrived >= self._park_after_s and self._may_move(waiting.payload)
        ][:_BATCH]
        for job in moving:
            self._lifecycle.move(job, self._topics.for_alias(job.alias))
        if moving:
            log.info("requests.parked", count=len(moving), served=sorted(served))

    def _served(self, now: float) -> Collection[str] | None:
        """The models that may have a turn; None: all, or none at all."""
        only, aliases = self._switcher.only(now), self._states.aliases
        unpaused = {alias for alias in aliases if alias not in self._scheduler.pauses}
        if only is None:
            return unpaused if 0 < len(unpaused) < len(aliases) else None
        return {only} & unpaused if unpaused else {only}

    def _may_move(self, job: Job) -> bool:
        """Only what came over the bus can wait there; an HTTP caller waits on the line, and a session is here."""
        if job.request.session is not None:
            return False
        return self._topics.takes_requests(job.origin.topic)
