"""Whether anything moves while there is work: the difference between waiting for a model and being stuck."""

import asyncio
import time
from collections.abc import Hashable

import structlog

from service.errors import Stalled
from service.ports import Engine, RequestSource
from service.settings import WorkerSettings
from service.worker.active_time import ActiveTime
from service.worker.dispatch import Dispatcher
from service.worker.jobs import IDLE, Jobs, Phase

log = structlog.get_logger(__name__)
_LOOK_S = 1.0
_NO_WORK = frozenset({Phase.THROTTLED, Phase.BACKING_OFF, Phase.SETTLING})
"""Phases of a job that gives the active model nothing to do."""


class Progress:
    """For how long there has been work and nothing has moved. Pure; time is an argument."""

    def __init__(self, now: float) -> None:
        self._mark: Hashable = None
        self._moved = now

    def look(self, mark: Hashable, *, busy: bool, now: float) -> float:
        """``mark`` is anything that changes as work moves. Seconds since it last did, 0 where there is no work."""
        if not busy or mark != self._mark:
            self._mark, self._moved = mark, now
        return now - self._moved


class Watchdog:
    """Looks every second at the engine's work and at the source of requests.

    Ends the worker when one of them has been stuck for too long, so that another worker takes over. While no broker
    answers none could: the worker keeps its models, and waits.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        source: RequestSource,
        jobs: Jobs,
        dispatcher: Dispatcher,
        active_time: ActiveTime,
        settings: WorkerSettings,
    ) -> None:
        self._engine = engine
        self._source = source
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._active_time = active_time
        self._settings = settings
        self.stalled_s = 0.0
        self._still_s = 0.0
        """For how long nothing has moved, whether the active model has something to do or not."""
        self.trouble: str | None = None
        """Why this worker is unhealthy, if it is: what has been stuck for long enough to say so."""
        self.disconnected: str | None = None
        """Why this worker can do nothing though it is healthy, if so: there is no broker."""

    async def run(self) -> None:
        """Until the worker ends. Raises Stalled."""
        progress, anything = Progress(time.monotonic()), Progress(time.monotonic())
        while True:
            await asyncio.sleep(_LOOK_S)
            mark, now = self._mark(), time.monotonic()
            away_s = self._source.state().away_s  # meanwhile nothing can end, and what runs keeps its slots
            self.stalled_s = progress.look(mark, busy=not away_s and self._busy(), now=now)
            self._still_s = anything.look(mark, busy=not away_s and self._may_work(), now=now)
            if (reason := self._stuck_for(self._settings.exit_after_stall_s)) is not None:
                raise Stalled(reason)
            self.disconnected = f"no broker has answered for {away_s:.0f} s" if away_s else None
            trouble = self._stuck_for(self._settings.stall_after_s)
            if trouble is not None and self.trouble is None:
                log.error("worker.stalled", reason=trouble, active=self._engine.active)
            self.trouble = trouble

    def _stuck_for(self, least_s: float) -> str | None:
        if self.stalled_s >= least_s:
            return f"{len(self._jobs)} requests are here, and nothing has moved for {self.stalled_s:.0f} s"
        source = self._source.state()
        if min(source.full_s, self._still_s) >= least_s:
            return (
                f"nothing more is read: {len(self._jobs)} requests are here, none was settled for {source.full_s:.0f} s"
            )
        return f"{source.stuck}, for {source.stuck_s:.0f} s" if source.stuck_s >= least_s else None

    def _mark(self) -> Hashable:
        """Requests that came or went, turns, tokens, steps: something of it changes as long as anything moves."""
        running = self._jobs.running()
        tokens = sum(self._engine.tokens(job.call_id) for job in running)
        return self._jobs.removed, self._active_time.active_since, len(running), tokens, self._engine.steps

    def _busy(self) -> bool:
        """Whether the active model has something to do and may do it: it is there, no switch is under way."""
        if not self._may_work():
            return False
        active = self._engine.active
        if active in self._engine.asleep():
            return False
        if not any(info.alias == active and info.active for info in self._engine.contexts()):
            return False
        none = _NO_WORK | IDLE if self._dispatcher.is_paused(active) else _NO_WORK
        return any(job.alias == active and job.phase not in none for job in self._jobs)

    def _may_work(self) -> bool:
        return not (self._dispatcher.paused or self._active_time.switching)
