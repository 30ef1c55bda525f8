"""One worker: all loops together, and an end that reads from top to bottom."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from opentelemetry.trace import Tracer

from schemas.control import Control
from schemas.objectives import Objective
from schemas.status import Presence
from service.errors import EngineDied
from service.models_file import ModelsFile, Scheduling
from service.ports import Bus, Engine, Inquiry, Reply, Watcher
from service.scheduling.pauses import Pauses
from service.scheduling.policy import Policy, PolicySettings
from service.scheduling.queues import Queues
from service.scheduling.quotas import Quotas
from service.scheduling.scheduler import Scheduler
from service.settings import Inactive, Settings
from service.worker.active_time import ActiveTime
from service.worker.admission import Admission
from service.worker.commands import Commands, ModelsReload
from service.worker.control import ControlLoop
from service.worker.dispatch import Dispatcher
from service.worker.inspection import Inspection
from service.worker.jobs import Job, Jobs
from service.worker.lifecycle import Lifecycle
from service.worker.metrics import Standing
from service.worker.model_states import ModelStates
from service.worker.outlook import Outlook
from service.worker.parking import Parking
from service.worker.placing import Placing
from service.worker.presence import PresenceLoop, PresenceView, loading
from service.worker.progress import ProgressLoop
from service.worker.publisher import Publisher
from service.worker.quotas import QuotaLoop
from service.worker.reading import Reading
from service.worker.runner import Runner
from service.worker.statuses import StatusQueue
from service.worker.switcher import Switcher
from service.worker.tasks import Tasks
from service.worker.throttle import Throttle
from service.worker.throughput import Throughput
from service.worker.tiering import Tiering
from service.worker.tracing import Tracing, Untraced
from service.worker.watchdog import Watchdog
from service.worker.watchers import Watchers

log = structlog.get_logger(__name__)
_STATUSES_WITHIN_S = 2.0
"""How long the last statuses may take to be sent, once everything else is done."""


class ModelsSource:
    """models.yaml as the worker needs it: ``scheduling`` by alias as it is in use, and reading it again.

    ``took`` is told what was read once the engine has it.
    """

    def __init__(
        self,
        read: Callable[[], ModelsFile],
        scheduling: Callable[[], Mapping[str, Scheduling]] = dict,
        took: Callable[[ModelsFile], None] = lambda _models: None,
    ) -> None:
        self.read = read
        """Raises ConfigError."""
        self.scheduling = scheduling
        self.took = took


@dataclass(frozen=True)
class Observers:
    """Who is told what the worker does."""

    watchers: Sequence[Watcher] = ()
    tracer: Tracer | None = None


class Worker:
    """Requests in, results out, control obeyed. Its collaborators are open; who opened them closes them."""

    def __init__(
        self,
        *,
        engine: Engine,
        bus: Bus,
        settings: Settings,
        models: ModelsSource,
        observers: Observers = Observers(),
        http: str | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self._engine = engine
        self._bus = bus
        self._settings = settings
        self._http = http
        self._quotas = quotas or Quotas()
        self._tasks = Tasks()
        self._state = "starting"
        self._tracing = Untraced() if observers.tracer is None else Tracing(observers.tracer)
        self._active_time = ActiveTime(engine.active, now)
        self.jobs = Jobs()
        self.scheduler: Scheduler[Job] = Scheduler(
            policy=self._policy(),
            active=engine.active,
            now=now,
            models=models.scheduling(),
            queues=Queues(tenant_weights=settings.worker.tenant_weights),
            pauses=Pauses(engine.asleep),
            max_running=settings.worker.max_running,
        )
        self.placing = Placing(source=bus.source, scheduler=self.scheduler, topics=settings.topics)
        self._watcher = Watchers((*observers.watchers, self.placing))
        self._make_running()
        self._make_reading()
        self._make_control(models)

    def _policy(self) -> Policy:
        worker = self._settings.worker
        return Policy(
            PolicySettings(
                max_wait_s=worker.max_wait_s,
                switching_share=worker.switching_share,
                manual=worker.inactive is not Inactive.SWITCH,
                beside=self._engine.brings_beside,
            )
        )

    def _make_running(self) -> None:
        """What gives requests to the engine, and the engine its turns."""
        bus, worker = self._bus, self._settings.worker
        pace = Throughput(self.scheduler.costs, said=self._engine.tokens)
        self.lifecycle = Lifecycle(
            jobs=self.jobs,
            scheduler=self.scheduler,
            runner=Runner(
                engine=self._engine,
                settlements=bus.settlements,
                announcements=bus.announcements,
                pace=pace,
                tracing=self._tracing,
                settings=worker,
            ),
            publisher=Publisher(
                settlements=bus.settlements, watcher=self._watcher, tracing=self._tracing, worker=worker.worker_id
            ),
            active_time=self._active_time,
            tasks=self._tasks,
            throttle=Throttle(quotas=self._quotas, settings=self._settings),
        )
        self.progress = ProgressLoop(lifecycle=self.lifecycle, interval_s=self._settings.worker.progress_interval_s)
        bus.source.before_rebalance(self.lifecycle.hand_over)
        self.tiering = Tiering(
            engine=self._engine, lifecycle=self.lifecycle, scheduler=self.scheduler, tasks=self._tasks
        )
        self.states = ModelStates(
            engine=self._engine,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            tiering=self.tiering,
            active_time=self._active_time,
            pace=pace,
        )
        self.statuses = StatusQueue(
            announcements=bus.announcements, watcher=self._watcher, engine=self._engine, worker=worker.worker_id
        )
        self.switcher = Switcher(
            engine=self._engine,
            source=bus.source,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            statuses=self.statuses,
            settings=self._settings,
        )
        self.outlook = Outlook(
            engine=self._engine,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            states=self.states,
            switcher=self.switcher,
            pace=pace,
        )
        self.dispatcher = Dispatcher(
            scheduler=self.scheduler,
            lifecycle=self.lifecycle,
            switcher=self.switcher,
            tiering=self.tiering,
            states=self.states,
            settings=worker,
        )

    def _make_reading(self) -> None:
        """What takes requests from the bus, and gives back to it those that can't have a turn."""
        admission = Admission(
            engine=self._engine,
            scheduler=self.scheduler,
            states=self.states,
            cancellations=self.lifecycle.cancellations,
            quotas=self._quotas,
            settings=self._settings,
        )
        self.reading = Reading(
            source=self._bus.source, admission=admission, lifecycle=self.lifecycle, statuses=self.statuses
        )
        self.parking = Parking(
            source=self._bus.source,
            scheduler=self.scheduler,
            states=self.states,
            switcher=self.switcher,
            lifecycle=self.lifecycle,
            settings=self._settings,
        )

    def _make_control(self, models: ModelsSource) -> None:
        """What listens to operators, looks after the loops, and says how all is."""
        source, worker = self._bus.source, self._settings.worker
        self.inspection = Inspection(
            engine=self._engine,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            switcher=self.switcher,
            outlook=self.outlook,
        )
        commands = Commands(
            engine=self._engine,
            switcher=self.switcher,
            lifecycle=self.lifecycle,
            dispatcher=self.dispatcher,
            inspection=self.inspection,
            reload=ModelsReload(
                read=models.read, took=models.took, engine=self._engine, source=source, dispatcher=self.dispatcher
            ),
        )
        self.control = ControlLoop(
            source=self._bus.control, commands=commands, statuses=self.statuses, tasks=self._tasks
        )
        self.watchdog = Watchdog(
            engine=self._engine,
            source=source,
            jobs=self.jobs,
            dispatcher=self.dispatcher,
            active_time=self._active_time,
            settings=worker,
        )
        self._view = PresenceView(
            engine=self._engine,
            source=source,
            inspection=self.inspection,
            switcher=self.switcher,
            costs=self.scheduler.costs,
            quotas=self._quotas,
            settings=worker,
        )
        self.quotas = QuotaLoop(quotas=self._quotas, announcements=self._bus.announcements, worker=worker.worker_id)
        self.presence = PresenceLoop(
            announcements=self._bus.announcements, presence=self._presence, interval_s=worker.presence_interval_s
        )

    def command(self, event: Control) -> None:
        """Do what a control event asks that came another way than over the bus; the answer is a status."""
        self.control.command(event)

    async def inquire(self, alias: str, inquiry: Inquiry) -> Reply:
        """Ask a model's server of its inside; a death meanwhile is no request's doing. Raises as the engine does."""
        async with self.lifecycle.runs.company():
            return await self._engine.inquire(alias, inquiry)

    def objectives(self) -> Mapping[str, Mapping[str, Objective]]:
        """What requests are to get, by model and class."""
        return {alias: self.scheduler.objectives(alias) for alias in self._engine.aliases}

    def standing(self) -> Standing:
        """How things stand, for the metrics."""
        now = asyncio.get_running_loop().time()
        active_s, switching_s = self._active_time.totals(now)
        return Standing(
            presence=self.presence.now(),
            held=len(self.jobs),
            throttled=self.lifecycle.throttle.waiting,
            throttled_moved=self.lifecycle.throttle.moved,
            active_s=active_s,
            switching_s=switching_s,
            serving_s=self.states.served_s(now),
            stalled_s=self.watchdog.stalled_s,
            objectives=self.objectives(),
            source=self._bus.source.state(),
        )

    def _presence(self) -> Presence:
        trouble, disconnected = self.watchdog.trouble, self.watchdog.disconnected
        state = "paused" if self.dispatcher.paused else self._state
        return self._view.now(
            state="unhealthy" if trouble else "disconnected" if disconnected else state,
            trouble=trouble or disconnected,
            http=self._http,
            loading=loading(self._engine, self._active_time),
        )

    async def run(self, stop: asyncio.Event, desired: Sequence[Control] = ()) -> None:
        """Serve until ``stop`` is set, then finish what runs and leave.

        That takes ``shutdown_timeout_s`` and some seconds at most, whatever hangs. Raises an ExceptionGroup with
        whatever ended it otherwise; EngineDied among it means that marks are committed.
        """
        try:
            await self._tasks.until(partial(self._serve, stop, desired))
        except* EngineDied:
            culprit = self.lifecycle.runs.culprit
            log.critical("engine.died", blamed=None if culprit is None else str(culprit))
            self._bus.settlements.engine_died(culprit)
            raise
        finally:
            await self._bus.settlements.flush()

    async def _serve(self, stop: asyncio.Event, desired: Sequence[Control]) -> None:
        stopped = self._tasks.loop("stop", _set, stop)
        self._tasks.loop("presence", self.presence.run)  # first: who is not heard of is taken for gone
        restored = self._tasks.spawn("restore", self._restore, desired)
        await asyncio.wait({stopped, restored}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            self._state = "serving"
            self.parking.sweep(time.monotonic())  # so that the worker joins its group with what a hold lets it serve
            loops = {
                "statuses": self.statuses.run,
                "control": self.control.run,
                "dispatch": self.dispatcher.run,
                "reading": self.reading.run,
                "parked": self.reading.watch_parked,
                "engine": self._watch_engine,
                "parking": self.parking.run,
                "watchdog": self.watchdog.run,
                "contexts": self.tiering.run,
                "progress": self.progress.run,
                "quotas": self.quotas.run,
                "placing": self.placing.run,
            }
            for name, run in loops.items():
                self._tasks.loop(name, run)
            await stop.wait()
        await self._finish()

    async def _restore(self, desired: Sequence[Control]) -> None:
        """Take up what operators asked for, and what earlier workers of the pool have measured."""
        before = await self._bus.announcements.predecessors()
        for presence in before:
            self.scheduler.costs.adopt(presence.costs, self._engine.aliases)
        await self.control.restore(desired, before)  # what it measures counts for more

    async def _finish(self) -> None:
        """Stop reading, let what runs finish up to a deadline, give the rest up."""
        within_s = self._settings.worker.shutdown_timeout_s
        self._state = "draining"
        self.reading.stop()
        await self._bus.source.stop()
        self.lifecycle.stop()
        log.info("worker.draining", running=len(self.jobs), within_s=within_s)
        try:
            async with asyncio.timeout(within_s):
                await self._tasks.idle()
        except TimeoutError:
            self.lifecycle.abandon()
        await self.statuses.drain(within_s=_STATUSES_WITHIN_S)

    async def _watch_engine(self) -> None:
        death = await self._engine.died()
        self.lifecycle.runs.engine_died()
        raise death


async def _set(event: asyncio.Event) -> None:
    await event.wait()
