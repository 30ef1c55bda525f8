"""The loop that gives the engine its work: asks the scheduler what runs next, switches, and starts what fits."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping

import structlog

from schemas.errors import FailureClass
from schemas.objectives import Objective
from service.models_file import Scheduling
from service.scheduling.scheduler import Scheduler
from service.settings import Inactive, WorkerSettings
from service.worker.jobs import Failed, Job
from service.worker.lifecycle import Lifecycle
from service.worker.model_states import ModelStates
from service.worker.settlements import unknown_model
from service.worker.switcher import Switcher
from service.worker.tiering import Tiering

log = structlog.get_logger(__name__)

_TRIALS_SHARE, _TRIAL_S = 0.1, 0.5
"""How much longer a turn may last so that a suspect is alone for a moment: what the policy leaves of the bound on any
wait, and no less than it takes to commit that it is alone and to take a few steps."""
_LEAST_S = 1e-6
_DOUBLINGS = 60


class Dispatcher:
    """Starts jobs on the active model, as many as fit, and moves on when the scheduler says so."""

    def __init__(
        self,
        *,
        scheduler: Scheduler[Job],
        lifecycle: Lifecycle,
        switcher: Switcher,
        tiering: Tiering,
        states: ModelStates,
        settings: WorkerSettings,
    ) -> None:
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._switcher = switcher
        self._tiering = tiering
        self._states = states
        self._settings = settings
        self._failures: Counter[str] = Counter()
        self._barred: dict[str, float] = {}
        self._kept: float | None = None
        """Until when the active model's turn may last for a suspect's sake, once it is over otherwise."""

    @property
    def paused(self) -> bool:
        """Whether nothing is started of any model."""
        return all(map(self.is_paused, self._states.aliases))

    def is_paused(self, alias: str) -> bool:
        """Whether nothing is started of a model."""
        return alias in self._scheduler.pauses

    def pause(self, alias: str | None, *, paused: bool) -> None:
        """Start nothing more of a model, or of all of them, or go on."""
        self._scheduler.pauses.say(alias, paused=paused)
        self._lifecycle.changed.set()

    def set_objective(self, alias: str, request_class: str, objective: Objective | None) -> None:
        """What requests that come from now on are to get; None: what models.yaml says."""
        self._scheduler.set_objective(alias, request_class, objective)

    def reschedule(self, models: Mapping[str, Scheduling]) -> None:
        """Take what a new models.yaml says of how requests are scheduled."""
        self._scheduler.models = models
        self._lifecycle.changed.set()

    async def run(self) -> None:
        """Until the worker ends."""
        while True:
            self._lifecycle.changed.clear()
            again = await self._turn()
            if (quota_s := self._lifecycle.throttle.next_s()) is not None:
                again = min(math.inf if again is None else again, time.monotonic() + quota_s)
            await self._until(again)

    async def _turn(self) -> float | None:
        """One decision and what follows from it; returns when to decide again, on the monotonic clock."""
        now = time.monotonic()
        self._states.look(now)
        self._lifecycle.release()
        if self.paused:
            return None
        if self._settings.inactive is Inactive.REFUSE:
            self._refuse_inactive()
        contexts = self._states.contexts(now, but=self._still_barred(now))
        decision = self._scheduler.decide(now, contexts, self._switcher.hold(now))
        self._tiering.follow(decision, contexts, now)
        if decision.run != self._switcher.active:
            if self._switcher.asked:
                return None  # the operator's switch comes first; it is told here when it is done
            if (trial := min(self._lifecycle.runs.trial_until(), self._waits_at_most(now))) > now:
                return trial
            self._kept = None
            self._states.leave(now)
            log.debug("switch.decided", model=decision.run, why=decision.why)
            if (reason := await self._switcher.by_scheduler(decision.run)) is not None:
                self._failed_load(decision.run, reason)
            self._failures.pop(self._switcher.active, None)
            return time.monotonic()
        self._kept = None
        if not self.is_paused(decision.run):
            self._lifecycle.start(decision.run, now)
        self._states.look(now)
        moments = [*self._barred.values(), *([] if decision.until is None else [decision.until])]
        if now < (takes := self._scheduler.takes_at(decision.run)) < math.inf:
            moments.append(takes)
        return min(moments, default=None)

    def _waits_at_most(self, now: float) -> float:
        """Until when a trial may keep a turn that is over otherwise."""
        if self._kept is None:
            self._kept = now + max(_TRIAL_S, _TRIALS_SHARE * self._settings.max_wait_s)
        return self._kept

    def _still_barred(self, now: float) -> set[str]:
        """Models whose load has just failed are left out for a while."""
        self._barred = {alias: until for alias, until in self._barred.items() if until > now}
        return set(self._barred)

    def _failed_load(self, alias: str, reason: str) -> None:
        """Try again a little later; after a few times, say so to everyone who waits for it."""
        self._failures[alias] += 1
        delay = self._settings.retry_backoff_s * 2 ** min(self._failures[alias] - 1, _DOUBLINGS)
        self._barred[alias] = time.monotonic() + min(delay, self._settings.retry_backoff_max_s)
        if self._failures[alias] < self._settings.max_attempts:
            return
        del self._failures[alias]
        message = f"The model `{alias}` could not be loaded: {reason}"
        failed = Failed(FailureClass.LOAD_FAILED, message, 503, "ServiceUnavailableError")
        self._lifecycle.end_waiting(alias, lambda _job: failed, frozen=True)

    def refuse_removed(self) -> None:
        """What waited for a model that is no more is answered as a request for any unknown one."""
        for alias in {job.alias for job in self._lifecycle.jobs} - set(self._states.aliases):
            self._lifecycle.end_waiting(alias, _unknown)

    def _refuse_inactive(self) -> None:
        """What waited for a model that was switched away from is refused, as vllm-gaudi's server refuses it."""
        for alias in self._scheduler.queues.aliases:
            if alias != self._switcher.active:
                self._lifecycle.end_waiting(alias, _unknown)

    async def _until(self, moment: float | None) -> None:
        """Sleep until something changes, or until ``moment``; never for no time at all.

        A sum and a difference of the same moments are rounded differently: what is due by the one may not be by the
        other, until the clock has moved.
        """
        left = None if moment is None else max(_LEAST_S, moment - time.monotonic())
        try:
            async with asyncio.timeout(left):
                await self._lifecycle.changed.wait()
        except TimeoutError:
            pass


def _unknown(job: Job) -> Failed:
    return unknown_model(job.request.model)
