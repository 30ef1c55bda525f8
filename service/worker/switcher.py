"""The one place that switches models: for an operator or for the scheduler, with a status event at each step."""

import time

import structlog

from schemas.contexts import Leftover, SwitchMode, SwitchPhase, SwitchReport
from schemas.control import Switch
from schemas.results import Freeze
from schemas.status import Status, StatusState
from service.errors import EngineDied, GearshiftError
from service.ports import Engine, Transition
from service.scheduling.policy import Hold
from service.scheduling.scheduler import Scheduler
from service.settings import WorkerSettings
from service.worker.active_time import ActiveTime
from service.worker.jobs import Job, Jobs
from service.worker.statuses import StatusQueue

log = structlog.get_logger(__name__)
_UNDONE = frozenset({SwitchPhase.FAILED, SwitchPhase.ROLLED_BACK})


class Switcher:
    """Switches, and keeps what a switch means for the requests: freezes, whose turn it was, and the operator's hold."""

    def __init__(
        self,
        *,
        engine: Engine,
        jobs: Jobs,
        scheduler: Scheduler[Job],
        turns: ActiveTime,
        statuses: StatusQueue,
        settings: WorkerSettings,
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._scheduler = scheduler
        self._turns = turns
        self._statuses = statuses
        self._settings = settings

    async def by_operator(self, event: Switch) -> None:
        """Do what a control event asks, and hold it. Raises EngineDied."""
        mode, leftover = _mode(event)
        self._scheduler.hold = self._hold_for(event)
        timeout = self._settings.drain_timeout_s if event.drain_timeout is None else event.drain_timeout
        try:
            await self._switch(event.model, mode, timeout, leftover, control_id=event.id)
        except EngineDied:
            raise
        except GearshiftError:
            self._scheduler.hold = None

    def take_up(self, event: Switch) -> None:
        """Hold a switch that was asked before this worker started, for what is left of its time."""
        hold = self._hold_for(event)
        spent = max(0.0, time.time() - event.issued)
        if hold.until is not None:
            hold = Hold(hold.alias, until=hold.until - spent)
        self._scheduler.hold = hold

    async def by_scheduler(self, alias: str) -> str | None:
        """Freeze what runs and go to ``alias``; the reason when that failed. Raises EngineDied."""
        try:
            await self._switch(alias, SwitchMode.KEEP, 0.0, Leftover.KEEP, control_id=None)
        except EngineDied:
            raise
        except GearshiftError as error:
            return str(error)
        return None

    async def _switch(
        self, alias: str, mode: SwitchMode, drain_timeout: float, leftover: Leftover, *, control_id: str | None
    ) -> SwitchReport:
        left, end = self._engine.active, SwitchPhase.FAILED

        def observe(step: Transition) -> None:
            nonlocal end
            self._note(step)
            if step.phase in _UNDONE:
                end = step.phase  # said below, where its reason is known
            else:
                self._say(step.phase, alias, control_id, report=step.report)

        try:
            report = await self._engine.switch(
                alias, mode=mode, drain_timeout=drain_timeout, leftover=leftover, observe=observe
            )
        except GearshiftError as error:
            self._turns.enter(self._engine.active, time.monotonic())
            cause = error.__cause__ or error
            log.warning("switch.failed", model=alias, left=left, reason=str(error), cause=repr(cause))
            self._say(end, alias, control_id, reason=str(error))
            raise
        log.info("switch.completed", model=alias, left=left, ms=round(report.ms, 3), tier=report.tier_found.value)
        if report.switched:
            self._scheduler.switched(left, alias, report.tier_found, report.stall_ms / 1e3, time.monotonic())
        return report

    def _note(self, step: Transition) -> None:
        """Keep whose turn it is, and what a freeze did to each running request."""
        now = time.monotonic()
        if step.phase is SwitchPhase.SWITCHING:
            self._turns.leave(now)
            for job in self._jobs.running(step.report.to_model):
                if job.frozen_at is not None:
                    tokens, frozen = self._engine.tokens(job.call_id), now - job.frozen_at
                    began = time.time() - frozen
                    job.freezes.append(Freeze(tokens=tokens, seconds=frozen, model=job.frozen_for, began=began))
                    job.frozen_at = None
        elif step.phase is SwitchPhase.COMPLETED:
            self._turns.enter(step.report.to_model, now)
            for job in self._jobs.running():
                if job.alias != step.report.to_model and job.frozen_at is None:
                    job.frozen_at, job.frozen_for = now, step.report.to_model
        elif step.phase in _UNDONE:
            self._turns.enter(self._engine.active, now)

    def _say(
        self,
        phase: SwitchPhase,
        alias: str,
        control_id: str | None,
        *,
        report: SwitchReport | None = None,
        reason: str | None = None,
    ) -> None:
        self._statuses.status(
            Status(
                worker=self._settings.worker_id,
                state=StatusState(phase.value),
                kind="switch",
                at=time.time(),
                control_id=control_id,
                model=alias,
                reason=reason,
                switch=report,
                contexts=self._engine.contexts() if phase is SwitchPhase.COMPLETED else (),
            )
        )

    def _hold_for(self, event: Switch) -> Hold:
        now = time.monotonic()
        hold = self._settings.hold_s if event.hold is None else event.hold
        if hold == "forever":
            return Hold(event.model)
        if hold == "drained":
            return Hold(event.model, drained=True)
        return Hold(event.model, until=now + hold)


def _mode(event: Switch) -> tuple[SwitchMode, Leftover]:
    """``drain_timeout`` alone means drain, then abort what is left."""
    implied = SwitchMode.KEEP if event.drain_timeout is None else SwitchMode.DRAIN
    return event.mode or implied, event.leftover or Leftover.ABORT
