"""What is asked about a worker's requests: where one stands, what waits, how far it all is."""

import math
import time
from collections.abc import Mapping
from typing import Any

from schemas.status import QueueInfo
from service.ports import Engine
from service.scheduling.estimate import Forecast
from service.scheduling.scheduler import Scheduler
from service.worker.jobs import Job, Phase
from service.worker.lifecycle import Lifecycle
from service.worker.model_states import ModelStates
from service.worker.switcher import Switcher

_BEFORE_RUN = frozenset({Phase.THROTTLED, Phase.WAITING, Phase.HELD, Phase.BACKING_OFF})


class Inspection:
    """Answers questions. It changes nothing."""

    def __init__(
        self,
        *,
        engine: Engine,
        lifecycle: Lifecycle,
        scheduler: Scheduler[Job],
        states: ModelStates,
        switcher: Switcher,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._jobs = lifecycle.jobs
        self._scheduler = scheduler
        self._states = states
        self._switcher = switcher

    def queues(self) -> dict[str, QueueInfo]:
        """What waits and runs per model."""
        now = time.monotonic()
        infos = {}
        for alias in self._engine.aliases:
            view = self._scheduler.queues.view(alias)
            oldest = now - view.oldest if view.requests else 0.0
            running = len(self._lifecycle.given(alias))
            infos[alias] = QueueInfo(waiting=view.requests, running=running, tokens=view.tokens, oldest_s=oldest)
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
        forecast = self._forecast()
        return {"request": request, "found": [self._place(job, forecast) for job in self._jobs.find(id_=request)]}

    def requests(self, most: int) -> list[dict[str, Any]]:
        """What runs and waits, without what it says: at most so many, those that run first."""
        jobs = sorted(self._jobs, key=lambda job: (job.phase in _BEFORE_RUN, job.request.received))[:most]
        found, forecast = [], self._forecast()
        for job in jobs:
            request = job.request
            place = self._place(job, forecast)
            place |= {"id": request.id, "endpoint": request.endpoint.value, "origin": str(job.origin)}
            place["age_s"] = time.time() - request.received
            found.append(place)
        return found

    def tokens(self) -> int:
        """Tokens that the running requests have generated so far."""
        return sum(self._engine.tokens(job.call_id) for job in self._jobs.running())

    def _forecast(self) -> Forecast:
        now = time.monotonic()
        return self._scheduler.forecast(now, self._states.contexts(now), self._switcher.hold(now))

    def _place(self, job: Job, forecast: Forecast) -> dict[str, Any]:
        place: dict[str, Any] = {"phase": job.phase.value, "model": job.alias, "attempt": job.attempt.n}
        if job.phase is Phase.WAITING:
            estimate = self._scheduler.estimate(str(job.origin), forecast)
            if estimate is not None:
                known = math.isfinite(estimate.turn_s)  # not while the operator holds another model without an end
                place["position"] = estimate.position
                place |= {"turn_s": estimate.turn_s, "expected_s": estimate.wait_s} if known else {"expected_s": None}
        elif job.phase not in _BEFORE_RUN:
            place["tokens"] = self._engine.tokens(job.call_id)
            place["frozen"] = job.frozen_at is not None
        return place
