"""What each kind of control event does, with what is answered."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    SetObjective,
    Sleep,
    Switch,
    Unpin,
    Wake,
)
from schemas.errors import nearest
from schemas.status import Presence, StatusState
from service.errors import ConfigError, EngineDied, GearshiftError, UnknownModel
from service.models_file import ModelsFile
from service.ports import Engine, RequestSource
from service.worker.dispatch import Dispatcher
from service.worker.inspection import Inspection
from service.worker.jobs import Why
from service.worker.lifecycle import Lifecycle
from service.worker.switcher import Switcher

Answer = tuple[StatusState, Mapping[str, Any] | None]
"""The state that ends a control event, and the answer where it is a question."""


class ModelsReload:
    """Reads models.yaml again, and tells everyone. ``read`` raises ConfigError and then nothing changes.

    ``took`` is told of a file that the engine has taken.
    """

    def __init__(
        self,
        *,
        read: Callable[[], ModelsFile],
        took: Callable[[ModelsFile], None],
        engine: Engine,
        source: RequestSource,
        dispatcher: Dispatcher,
    ) -> None:
        self._read = read
        self._took = took
        self._engine = engine
        self._source = source
        self._dispatcher = dispatcher

    async def __call__(self) -> Mapping[str, str]:
        """What became of each alias. Raises ConfigError, TopicError, BrokerUnavailable."""
        models = self._read()
        try:
            changes = await self._engine.reload(models)
        except EngineDied:
            raise
        except GearshiftError:  # it may have failed in its middle
            await self._follow()
            raise
        self._took(models)
        self._dispatcher.reschedule(models.scheduling)
        await self._follow()
        return dict(changes)

    async def _follow(self) -> None:
        """Serve what the engine has now."""
        self._dispatcher.refuse_removed()
        await self._source.follow(self._engine.aliases)


class Commands:
    """Does what control events ask. A switch says how it goes itself; of any other, the answer is returned."""

    def __init__(
        self,
        *,
        engine: Engine,
        switcher: Switcher,
        lifecycle: Lifecycle,
        dispatcher: Dispatcher,
        inspection: Inspection,
        reload: ModelsReload,
    ) -> None:
        self._engine = engine
        self._switcher = switcher
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._inspection = inspection
        self._reload = reload

    async def perform(self, event: Control) -> Answer | None:
        """Do it; None: all is said already. Raises GearshiftError."""
        answer: Mapping[str, Any] | None = None
        match event:
            case Switch():
                self._known(event.model)
                await self._switcher.by_operator(event)
                return None
            case Cancel():
                return self._cancel(event)
            case SetObjective():
                self._known(event.model)
                self._dispatcher.set_objective(event.model, event.request_class or "", event.objective)
            case Pause() | Resume():
                if event.model is not None:
                    self._known(event.model)
                self._dispatcher.pause(event.model, paused=isinstance(event, Pause))
            case Reload():
                async with self._lifecycle.runs.company():
                    answer = {"models": await self._reload()}
            case Query():
                whole = {"paused": self._dispatcher.paused} if event.request is None else {}
                answer = {**self._inspection.describe(event.request), **whole}
            case LoraList():
                chosen = self._engine.aliases if event.model is None else (event.model,)
                answer = {"loras": {alias: list(self._engine.loras(alias)) for alias in chosen}}
            case _:
                async with self._lifecycle.runs.company():
                    answer = await self._in_engine(event)
        return StatusState.COMPLETED, answer

    async def restore(self, event: Control, before: Sequence[Presence]) -> Answer | None:
        """Take up what was asked before this worker started, where that still means something. Raises GearshiftError.

        Whoever asked for a cancel was answered then, or has the cancelled result.
        """
        if isinstance(event, Cancel):
            self._lifecycle.cancellations.expect(event)
            return None
        if isinstance(event, Switch):
            self._known(event.model)
            await self._switcher.restore(event, before)
            return None
        return await self.perform(event)

    def _known(self, model: str) -> None:
        if model not in self._engine.aliases:
            raise UnknownModel(f"unknown model {model!r}{nearest(model, self._engine.aliases)}")

    def _cancel(self, event: Cancel) -> Answer:
        """End what is here and was received before the cancel was issued; the rest when it is read."""
        if event.request is None and event.correlation_id is None:
            raise ConfigError("a cancel names a request or a correlation_id")
        lifecycle = self._lifecycle
        found = lifecycle.jobs.find(id_=event.request, correlation_id=event.correlation_id)
        jobs = [job for job in found if job.request.received <= event.issued]
        if not jobs and lifecycle.cancellations.too_late(event):
            return StatusState.TOO_LATE, None
        ended = sum(lifecycle.end(job, Why.CANCELLED) for job in jobs)
        lifecycle.cancellations.expect(event)
        return StatusState.COMPLETED, {"cancelled": ended}

    async def _sleep_or_wake(self, event: Sleep | Wake) -> None:
        try:
            if isinstance(event, Sleep):
                await self._engine.sleep(event.level, event.model)
            else:
                await self._engine.wake(event.model)
        finally:
            self._lifecycle.changed.set()

    async def _in_engine(self, event: Control) -> dict[str, Any] | None:
        """What there is to be said of it; None: that it is done."""
        engine = self._engine
        match event:
            case Sleep() | Wake():
                await self._sleep_or_wake(event)
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
                running, external = event.reset_running_requests, event.reset_external
                done = await engine.reset_caches(event.model, event.cache, running=running, external=external)
                return {"success": done}
            case Profile():
                await engine.profile(event.model, start=event.action == "start")
        return None
