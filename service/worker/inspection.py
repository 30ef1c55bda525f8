"""What is asked about a worker's requests: where one stands, what waits, how far it all is."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from schemas.status import QueueInfo
from service.ports import Engine
from service.scheduling.scheduler import Scheduler
from service.worker.jobs import IDLE, Job
from service.worker.lifecycle import Lifecycle
from service.worker.outlook import Outlook, Prospects, known
from service.worker.switcher import Switcher

_FRESH_S = 1.0


def _soonest(prospects: Prospects, jobs: Iterable[Job]) -> float:
    """Seconds until the first of these ends; infinite where that can't be said."""
    return min((expected.end_s for job in jobs if (expected := prospects.of(job)) is not None), default=math.inf)


class Inspection:
    """Answers questions. It changes nothing."""

    def __init__(
        self,
        *,
        engine: Engine,
        lifecycle: Lifecycle,
        scheduler: Scheduler[Job],
        switcher: Switcher,
        outlook: Outlook,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._jobs = lifecycle.jobs
        self._scheduler = scheduler
        self._switcher = switcher
        self._outlook = outlook
        self._looked: tuple[float, Prospects, float] | None = None
        """When, what was seen, and how long it then was until anything ends."""

    def queues(self) -> dict[str, QueueInfo]:
        """What waits and runs per model."""
        now = time.monotonic()
        infos = {}
        for alias in self._engine.aliases:
            view = self._scheduler.queues.view(alias)
            oldest = now - view.oldest if view.requests else 0.0
            running = len(self._lifecycle.given(alias))
            infos[alias] = QueueInfo(
                waiting=view.requests,
                running=running,
                tokens=view.tokens,
                oldest_s=oldest,
                paused=self._scheduler.pauses.paused(alias),
            )
        return infos

    def describe(self, request: str | None) -> Mapping[str, Any]:
        """Where a request stands, or the whole state."""
        if request is None:
            queues = {alias: info.model_dump() for alias, info in self.queues().items()}
            hold = self._switcher.hold_info()
            return {
                "active": self._engine.active,
                "hold": None if hold is None else hold.model_dump(),
                "queues": queues,
            }
        prospects = self._outlook.look()
        return {"request": request, "found": [self._place(job, prospects) for job in self._jobs.find(id_=request)]}

    def ends_s(self, request: str | None = None) -> float | None:
        """Seconds until a request ends, or until any does; None where that can't be said.

        Whoever is refused asks for it: what it is worked out from is up to a second old.
        """
        now = time.monotonic()
        if self._looked is None or now > self._looked[0] + _FRESH_S:
            prospects = self._outlook.look()
            self._looked = now, prospects, _soonest(prospects, self._jobs)
        at, prospects, end_s = self._looked
        if request is not None:
            end_s = _soonest(prospects, self._jobs.find(id_=request))
        return known(max(0.0, at + end_s - now))

    def requests(self, most: int) -> list[dict[str, Any]]:
        """What runs and waits, without what it says: at most so many, those that run first."""
        jobs = sorted(self._jobs, key=lambda job: (job.phase in IDLE, job.request.received))[:most]
        found, prospects = [], self._outlook.look()
        for job in jobs:
            request = job.request
            place = self._place(job, prospects)
            place |= {"id": request.id, "endpoint": request.endpoint.value, "origin": str(job.origin)}
            place["age_s"] = time.time() - request.received
            found.append(place)
        return found

    def tokens(self) -> int:
        """Tokens that the running requests have generated so far."""
        return sum(self._engine.tokens(job.call_id) for job in self._jobs.running())

    def _place(self, job: Job, prospects: Prospects) -> dict[str, Any]:
        place: dict[str, Any] = {"phase": job.phase.value, "model": job.alias, "attempt": job.attempt.n}
        if (expected := prospects.of(job)) is not None:
            if job.phase in IDLE:
                place["position"] = self._scheduler.queues.position(str(job.origin))
                standing = self._scheduler.queues.standing(str(job.origin))
                if standing:  # neither gone nor in turn
                    place["stands_aside"] = standing.name.lower()
                place |= {"turn_s": known(expected.turn_s), "expected_s": known(expected.start_s)}
            place |= {"first_token_s": known(expected.first_token_s), "end_s": known(expected.end_s)}
        if job.phase not in IDLE:
            place["tokens"] = self._engine.tokens(job.call_id)
            place["frozen"] = job.frozen_at is not None
        return place
