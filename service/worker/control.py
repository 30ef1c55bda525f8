"""Control events become actions, and every one is answered with a status by every worker that it is for."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from schemas.control import (
    Cancel,
    Control,
    LoraAdd,
    LoraList,
    LoraPin,
    LoraRemove,
    Pause,
    Pin,
    Preload,
    Profile,
    Query,
    Reload,
    ResetCache,
    Resume,
    Sleep,
    Switch,
    Unpin,
    Wake,
)
from schemas.errors import nearest
from schemas.status import Status, StatusState
from service.errors import ConfigError, EngineDied, GearshiftError, UnknownModel
from service.models_file import ModelsFile
from service.ports import ControlRecord, ControlSource, Engine
from service.settings import WorkerSettings
from service.worker.admission import Admission, Spawn
from service.worker.dispatch import Dispatcher
from service.worker.statuses import StatusQueue
from service.worker.switcher import Switcher

log = structlog.get_logger(__name__)


class ControlLoop:
    """Reads control events and does what they ask; a slow one (a draining switch) does not hold up the next."""

    def __init__(
        self,
        *,
        source: ControlSource,
        engine: Engine,
        switcher: Switcher,
        admission: Admission,
        dispatcher: Dispatcher,
        statuses: StatusQueue,
        settings: WorkerSettings,
        read_models: Callable[[], ModelsFile],
        spawn: Spawn,
    ) -> None:
        self._source = source
        self._engine = engine
        self._switcher = switcher
        self._admission = admission
        self._dispatcher = dispatcher
        self._statuses = statuses
        self._me = settings.worker_id
        self._read_models = read_models
        self._spawn = spawn

    async def run(self) -> None:
        """Until the worker ends."""
        async for record in self._source.events():
            if record.event is None:
                self._reject(record)
            else:
                self._spawn(self.handle(record.event), f"control {record.event.type}")

    async def restore(self, desired: Sequence[Control]) -> None:
        """Take up what was asked before this worker started, and answer it: whoever asked may still be waiting.

        The engine has started in the model that was asked for last; its switch need only be held.
        """
        for event in desired:
            if isinstance(event, Switch) and event.model == self._engine.active:
                self._switcher.take_up(event)
                self._say(event, StatusState.NO_OP)
            else:
                await self.handle(event)

    async def handle(self, event: Control) -> None:
        """Do it and say how it went. Raises EngineDied."""
        if isinstance(event, Switch):
            if event.model in self._engine.aliases:
                await self._switcher.by_operator(event)
                self._dispatcher.wake()
            else:
                hint = nearest(event.model, self._engine.aliases)
                self._say(event, StatusState.REJECTED, reason=f"unknown model {event.model!r}{hint}")
            return
        try:
            state, answer = await self._act(event)
        except EngineDied:
            raise
        except (UnknownModel, ConfigError) as error:
            self._say(event, StatusState.REJECTED, reason=str(error))
        except GearshiftError as error:
            self._say(event, StatusState.FAILED, reason=str(error))
        else:
            self._say(event, state, answer=answer)

    async def _act(self, event: Control) -> tuple[StatusState, Mapping[str, Any] | None]:
        """Everything but a switch: the state that ends it, and the answer where it is a question."""
        match event:
            case Cancel():
                return self._cancel(event)
            case Pause() | Resume():
                self._dispatcher.paused = isinstance(event, Pause)
                self._dispatcher.wake()
            case Reload():
                models = self._read_models()
                changes = await self._engine.reload(models)
                await self._admission.follow(self._engine.aliases)
                self._dispatcher.reschedule(models.scheduling)
                self._dispatcher.refuse_removed()
                self._dispatcher.wake()
                return StatusState.COMPLETED, {"models": dict(changes)}
            case Query():
                return StatusState.COMPLETED, self._dispatcher.describe(event.request)
            case LoraList():
                chosen = self._engine.aliases if event.model is None else (event.model,)
                return StatusState.COMPLETED, {"loras": {alias: list(self._engine.loras(alias)) for alias in chosen}}
            case _:
                await self._engine_action(event)
        return StatusState.COMPLETED, None

    async def _engine_action(self, event: Control) -> None:
        engine = self._engine
        match event:
            case Sleep():
                await engine.sleep(event.level, event.model)
            case Wake():
                await engine.wake(event.model)
            case Pin() | Unpin():
                await engine.pin(event.model, isinstance(event, Pin))
            case Preload():
                await engine.preload(event.model)
            case LoraAdd():
                await engine.add_lora(event.model, event.name, event.path)
            case LoraRemove():
                await engine.remove_lora(event.model, event.name)
            case LoraPin():
                await engine.pin_lora(event.model, event.name)
            case ResetCache():
                await engine.reset_caches(event.model)
            case Profile():
                await engine.profile(start=event.action == "start")

    def _cancel(self, event: Cancel) -> tuple[StatusState, Mapping[str, Any] | None]:
        if event.request is None and event.correlation_id is None:
            raise ConfigError("a cancel names a request or a correlation_id")
        jobs = self._dispatcher.jobs.find(id_=event.request, correlation_id=event.correlation_id)
        for job in jobs:
            self._admission.cancel(job)
        if not jobs and self._admission.cancellations.too_late(event):
            return StatusState.TOO_LATE, None
        self._admission.expect(event)
        return (StatusState.COMPLETED if jobs else StatusState.ACCEPTED), {"cancelled": len(jobs)}

    def _reject(self, record: ControlRecord) -> None:
        log.warning("control.rejected", reason=record.problem, at=str(record.record.origin))
        status = Status(
            worker=self._me,
            state=StatusState.REJECTED,
            kind="unknown",
            at=time.time(),
            reason=record.problem,
            control_id=str(record.record.origin),
        )
        self._statuses.status(status)

    def _say(
        self,
        event: Control,
        state: StatusState,
        *,
        reason: str | None = None,
        answer: Mapping[str, Any] | None = None,
    ) -> None:
        log.info("control.answered", state=state.value, kind=event.type, control_id=event.id, reason=reason)
        self._statuses.status(
            Status(
                worker=self._me,
                state=state,
                kind=event.type,
                at=time.time(),
                control_id=event.id,
                model=getattr(event, "model", None),
                reason=reason,
                contexts=self._engine.contexts(),
                answer=None if answer is None else dict(answer),
            )
        )
