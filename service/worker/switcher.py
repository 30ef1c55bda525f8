"""The one place that switches models: for an operator or for the scheduler, with a status event at each step.

An operator's switch is held: the scheduler leaves the model where it is from the switch's completion until the hold's
end. There is one hold at most, and it is a value; a switch that fails changes nothing of it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from schemas.contexts import Leftover, SwitchMode, SwitchPhase, SwitchReport
from schemas.control import Switch
from schemas.status import HoldInfo, Presence, StatusState
from service.errors import EngineDied, GearshiftError
from service.ports import Engine, RequestSource, Transition
from service.scheduling.policy import Hold
from service.scheduling.scheduler import Scheduler
from service.settings import Inactive, Settings
from service.worker.jobs import Job
from service.worker.lifecycle import Lifecycle
from service.worker.statuses import StatusQueue

log = structlog.get_logger(__name__)
_UNDONE = frozenset({SwitchPhase.FAILED, SwitchPhase.ROLLED_BACK})
_DONE = frozenset({SwitchPhase.COMPLETED, SwitchPhase.NO_OP})
_UNHIDDEN_S = 0.005
"""The engine prepares each step, and takes its tokens in, while another one runs; not so the first one behind a switch.
That takes no more than a step, for else it would be hidden nowhere, and processors no longer than this: with three
small models on two cores 3 to 8 ms were lost with each switch beside its stall.
"""


@dataclass(frozen=True, slots=True)
class _Standing:
    """A hold as the policy has it, on the monotonic clock, and as it is told."""

    hold: Hold
    info: HoldInfo


class Switcher:
    """Switches, and keeps what a switch means: whose turn it is, which jobs are frozen, and the operator's hold."""

    def __init__(
        self,
        *,
        engine: Engine,
        source: RequestSource,
        lifecycle: Lifecycle,
        scheduler: Scheduler[Job],
        statuses: StatusQueue,
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._source = source
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._statuses = statuses
        self._topics = settings.topics
        self._settings = settings.worker
        self._under_way: list[Switch] = []
        self._standing: _Standing | None = None
        self.obeyed: str | None = None
        """The id of the operator's switch that was done last."""

    # --- what stands ---

    @property
    def active(self) -> str:
        """The active model, or the target of the switch under way."""
        return self._engine.active

    @property
    def asked(self) -> bool:
        """Whether an operator's switch is under way."""
        return bool(self._under_way)

    def hold(self, now: float) -> Hold | None:
        """Where the scheduler must stay: at an operator's switch until it is done, and then for as long as it holds."""
        if self._under_way:
            return Hold(self._under_way[-1].model)
        standing = self._standing
        if standing is not None and self._is_over(standing.hold, now):
            log.info("hold.ended", model=standing.hold.alias, control_id=standing.info.control_id)
            self._standing = standing = None
        return None if standing is None else standing.hold

    def hold_info(self) -> HoldInfo | None:
        """The hold as it is told; None where nothing is held."""
        self.hold(time.monotonic())
        return None if self._standing is None else self._standing.info

    def only(self, now: float) -> str | None:
        """The one model that has turns, where an operator or the manual mode says so."""
        hold = self.hold(now)
        if hold is not None:
            return hold.alias
        return None if self._settings.inactive is Inactive.SWITCH else self._engine.active

    # --- switching ---

    async def by_operator(self, event: Switch) -> None:
        """Do what a control event asks, and hold it from then on. Raises EngineDied."""
        await self._for_operator(event, lambda: self._hold_of(event, time.time()))

    async def restore(self, event: Switch, before: Sequence[Presence]) -> None:
        """Take up a switch that was asked before this worker started; ``before`` is what the pool's workers last said.

        Of its hold, what is left stands: none where it had ended. Raises EngineDied.
        """
        known = [one for one in before if one.worker == self._settings.worker_id] or list(before)
        held = next((one.hold for one in known if one.hold is not None and _is_of(one.hold, event)), None)
        if held is None and any(one.obeyed == event.id for one in known):
            hold = None
        else:
            hold = held or self._hold_of(event, event.issued)
        if event.model == self._engine.active:
            self._begin(event, hold)
            self._statuses.answer(event, StatusState.NO_OP, hold=self.hold_info())
        else:
            await self._for_operator(event, lambda: hold)

    async def by_scheduler(self, alias: str) -> str | None:
        """Freeze what runs and go to ``alias``; the reason when that failed. Raises EngineDied."""
        try:
            async with self._lifecycle.runs.company(of_switch=True):
                await self._switch(alias, SwitchMode.KEEP, 0.0, Leftover.KEEP)
        except EngineDied:
            raise
        except GearshiftError as error:
            return str(error)
        return None

    # --- inside ---

    async def _for_operator(self, event: Switch, hold: Callable[[], HoldInfo | None]) -> None:
        """``hold`` is asked for when the switch is done."""
        mode, leftover = _mode(event)
        timeout = self._settings.drain_timeout_s if event.drain_timeout is None else event.drain_timeout

        def done() -> None:
            self._begin(event, hold())

        self._under_way.append(event)
        try:
            async with self._lifecycle.runs.company(of_switch=True):
                await self._switch(event.model, mode, timeout, leftover, event=event, done=done)
        except EngineDied:
            raise
        except GearshiftError:
            pass  # it was said, and what was held before is held
        finally:
            self._under_way.remove(event)
            self._lifecycle.changed.set()

    async def _switch(
        self,
        alias: str,
        mode: SwitchMode,
        drain_timeout: float,
        leftover: Leftover,
        *,
        event: Switch | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        left, end = self._engine.active, SwitchPhase.FAILED

        def observe(step: Transition) -> None:
            nonlocal end
            self._note(step)
            if step.phase in _UNDONE:
                end = step.phase  # said below, where its reason is known
                return
            if step.phase in _DONE:
                done()
            self._say(step.phase, alias, event, report=step.report)

        try:
            report = await self._engine.switch(
                alias, mode=mode, drain_timeout=drain_timeout, leftover=leftover, observe=observe
            )
        except GearshiftError as error:
            if isinstance(error, EngineDied):
                self._lifecycle.runs.engine_died()
            else:
                self._lifecycle.go_on(self._engine.active)
            cause = error.__cause__ or error
            log.warning("switch.failed", model=alias, left=left, reason=str(error), cause=repr(cause))
            self._say(end, alias, event, reason=str(error))
            raise
        log.info("switch.completed", model=alias, left=left, ms=round(report.ms, 3), tier=report.tier_found.value)
        if report.switched:
            step_s = self._scheduler.costs.work(alias).steps_s(1, len(self._lifecycle.given(alias)))
            stall_s, now, refill_s = report.stall_ms / 1e3, time.monotonic(), min(step_s, _UNHIDDEN_S)
            self._scheduler.switched(left, alias, report.tier_found, stall_s, now, refill_s=refill_s)

    def _note(self, step: Transition) -> None:
        """Keep whose turn it is, and what that does to the running requests."""
        if step.phase is SwitchPhase.SWITCHING:
            self._lifecycle.stall(step.report.to_model)
        elif step.phase is SwitchPhase.COMPLETED:
            self._lifecycle.go_on(step.report.to_model)

    def _say(
        self,
        phase: SwitchPhase,
        alias: str,
        event: Switch | None,
        *,
        report: SwitchReport | None = None,
        reason: str | None = None,
    ) -> None:
        told = self.hold_info() if event is not None and phase in _DONE else None
        self._statuses.switch(StatusState(phase.value), alias, event=event, reason=reason, report=report, hold=told)

    def _begin(self, event: Switch, info: HoldInfo | None) -> None:
        """The operator's switch is done: what was held before is not any more."""
        self.obeyed = event.id
        self._standing = None
        if info is not None:
            until = None if info.until is None else time.monotonic() + info.until - time.time()
            self._standing = _Standing(Hold(info.model, until=until, drained=info.drained), info)

    def _hold_of(self, event: Switch, since: float) -> HoldInfo:
        """What an event asks to be held, from ``since`` on, in seconds since the epoch."""
        hold = self._settings.hold_s if event.hold is None else event.hold
        until = since + hold if isinstance(hold, int | float) else None
        return HoldInfo(model=event.model, since=since, until=until, drained=hold == "drained", control_id=event.id)

    def _is_over(self, hold: Hold, now: float) -> bool:
        if hold.drained:
            return not self._has_work(hold.alias)
        return hold.until is not None and now >= hold.until

    def _has_work(self, alias: str) -> bool:
        """Whether anything is left to do for a model, here or unread in its own topic."""
        if self._scheduler.queues.view(alias).requests or any(job.alias == alias for job in self._lifecycle.jobs):
            return True
        source = self._source.state()
        return not source.joined or source.lag.get(self._topics.for_alias(alias), 0) > 0


def _is_of(hold: HoldInfo, event: Switch) -> bool:
    """Whether a hold is what came of this event; anybody may have written the presence that tells of it."""
    return (hold.control_id, hold.model) == (event.id, event.model)


def _mode(event: Switch) -> tuple[SwitchMode, Leftover]:
    """``drain_timeout`` alone means drain, then abort what is left."""
    implied = SwitchMode.KEEP if event.drain_timeout is None else SwitchMode.DRAIN
    return event.mode or implied, event.leftover or Leftover.ABORT
