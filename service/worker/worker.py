"""One worker: all loops together, and an end that reads from top to bottom."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog
from opentelemetry.trace import Tracer

from schemas.control import Control
from service.errors import EngineDied, Stalled
from service.models_file import ModelsFile, Scheduling
from service.ports import Bus, Engine, Watcher
from service.scheduling.policy import Policy, PolicySettings
from service.scheduling.queues import Queues
from service.scheduling.scheduler import Scheduler
from service.settings import Inactive, Settings
from service.worker.active_time import ActiveTime
from service.worker.admission import Admission
from service.worker.control import ControlLoop
from service.worker.dispatch import Dispatcher
from service.worker.jobs import Ending, Job, Jobs, Phase
from service.worker.metrics import Standing
from service.worker.parking import Parking
from service.worker.presence import PresenceLoop
from service.worker.runner import Runner
from service.worker.statuses import StatusQueue
from service.worker.switcher import Switcher
from service.worker.tiering import Tiering
from service.worker.tracing import Tracing, Untraced
from service.worker.watchdog import Watchdog
from service.worker.watchers import Watchers

log = structlog.get_logger(__name__)


class Worker:
    """Requests in, results out, control obeyed. Its collaborators are open; who opened them closes them."""

    def __init__(
        self,
        *,
        engine: Engine,
        bus: Bus,
        settings: Settings,
        models: Mapping[str, Scheduling] | None = None,
        read_models: Callable[[], ModelsFile],
        watchers: Sequence[Watcher] = (),
        http: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self._engine = engine
        self._bus = bus
        self._settings = settings
        self._group = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._work: set[asyncio.Task[None]] = set()
        self._watcher = Watchers(watchers)
        self._turns = ActiveTime(engine.active, now)
        self.state = "serving"
        self.jobs = Jobs()
        self.statuses = StatusQueue(bus.announcements, self._watcher)
        self.scheduler: Scheduler[Job] = Scheduler(
            policy=self._policy(),
            active=engine.active,
            now=now,
            models=models,
            queues=Queues(tenant_weights=settings.worker.tenant_weights),
            max_running=settings.worker.max_running,
        )
        self._make_running(Untraced() if tracer is None else Tracing(tracer))
        self._make_reading()
        self._make_rest(read_models, http)

    def _policy(self) -> Policy:
        worker = self._settings.worker
        return Policy(
            PolicySettings(
                max_wait_s=worker.max_wait_s,
                switching_share=worker.switching_share,
                manual=worker.inactive is not Inactive.SWITCH,
                prefetch=self._engine.preloads_aside,
            )
        )

    def _make_running(self, tracing: Tracing) -> None:
        """What gives requests to the engine, and the engine its turns."""
        worker = self._settings.worker
        self.tiering = Tiering(engine=self._engine, scheduler=self.scheduler, spawn=self._spawn)
        self.runner = Runner(
            engine=self._engine,
            settlements=self._bus.settlements,
            announcements=self._bus.announcements,
            jobs=self.jobs,
            watcher=self._watcher,
            worker=worker,
            tracing=tracing,
        )
        self.switcher = Switcher(
            engine=self._engine,
            jobs=self.jobs,
            scheduler=self.scheduler,
            turns=self._turns,
            statuses=self.statuses,
            settings=worker,
        )
        self.dispatcher = Dispatcher(
            engine=self._engine,
            jobs=self.jobs,
            scheduler=self.scheduler,
            switcher=self.switcher,
            tiering=self.tiering,
            runner=self.runner,
            turns=self._turns,
            settings=worker,
            spawn=self._spawn,
        )
        self.runner.answered = self.dispatcher.pace.finished

    def _make_reading(self) -> None:
        """What takes requests from the bus, and gives back to it those that can't have a turn."""
        self.admission = Admission(
            source=self._bus.source,
            engine=self._engine,
            jobs=self.jobs,
            queues=self.scheduler.queues,
            runner=self.runner,
            turns=self._turns,
            watcher=self._watcher,
            settings=self._settings,
            spawn=self._spawn,
        )
        self.parking = Parking(
            engine=self._engine,
            source=self._bus.source,
            scheduler=self.scheduler,
            runner=self.runner,
            worker=self._settings.worker,
            topics=self._settings.topics,
            spawn=self._spawn,
        )
        self.admission.admitted = lambda _job: self.dispatcher.wake()
        self.admission.can_meet = self.dispatcher.can_meet
        self.runner.requeue = self.admission.admit
        self.runner.settled = lambda job: self.admission.cancellations.settled(job.request.id)

    def _make_rest(self, read_models: Callable[[], ModelsFile], http: str | None) -> None:
        """What listens to operators, looks after the loops, and says how all is."""
        worker = self._settings.worker
        self.control = ControlLoop(
            source=self._bus.control,
            engine=self._engine,
            switcher=self.switcher,
            admission=self.admission,
            dispatcher=self.dispatcher,
            statuses=self.statuses,
            settings=worker,
            read_models=read_models,
            spawn=self._spawn,
        )
        self.watchdog = Watchdog(
            engine=self._engine,
            source=self._bus.source,
            jobs=self.jobs,
            dispatcher=self.dispatcher,
            turns=self._turns,
            settings=worker,
        )
        self.presence = PresenceLoop(
            announcements=self._bus.announcements,
            engine=self._engine,
            dispatcher=self.dispatcher,
            source=self._bus.source,
            turns=self._turns,
            settings=worker,
            state=self._state,
            trouble=self._trouble,
            http=http,
        )

    def command(self, event: Control) -> None:
        """Do what a control event asks that came another way than over the bus; the answer is a status."""
        self._spawn(self.control.handle(event), f"control {event.type}")

    def standing(self) -> Standing:
        """How things stand, for the metrics."""
        now = asyncio.get_running_loop().time()
        active_s, switching_s = self._turns.totals(now)
        return Standing(
            presence=self.presence.now(),
            held=len(self.jobs),
            active_s=active_s,
            switching_s=switching_s,
            serving_s=self.dispatcher.pace.worked(now),
            stalled_s=self.watchdog.stalled_s,
            source=self._bus.source.state(),
        )

    def _state(self) -> str:
        if self.watchdog.trouble is not None:
            return "unhealthy"
        return "paused" if self.dispatcher.paused else self.state

    def _trouble(self) -> str | None:
        return self.watchdog.trouble

    async def run(self, stop: asyncio.Event, desired: Sequence[Control] = ()) -> None:
        """Serve until ``stop`` is set, then finish what runs and leave.

        Raises an ExceptionGroup with whatever ended it otherwise; EngineDied among it means that marks are committed.
        """
        try:
            async with self._group:
                # First, for what follows may take a while and a worker that is not heard of is taken for gone.
                announcing = self._group.create_task(_to_its_end(self.presence.run), name="presence")
                await self.control.restore(desired)
                await self._learn()
                loops = {
                    "outbox": self.statuses.run,
                    "control": self.control.run,
                    "dispatch": self.dispatcher.run,
                    "reading": self.admission.run,
                    "engine": self._watch_engine,
                    "parking": self.parking.run,
                    "watchdog": self.watchdog.run,
                    "contexts": self.tiering.run,
                }
                self._loops = [self._group.create_task(_to_its_end(loop), name=name) for name, loop in loops.items()]
                self._loops.append(announcing)
                await stop.wait()
                await self._finish()
        except* EngineDied:
            self._bus.settlements.witness()
            raise
        finally:
            await self._bus.settlements.flush()

    async def _learn(self) -> None:
        """Begin with what an earlier worker of the pool has measured."""
        before = await self._bus.announcements.predecessor()
        if before is not None:
            self.scheduler.costs.adopt(before.costs)

    async def _finish(self) -> None:
        """Stop reading, let what runs finish up to a deadline, withdraw the rest."""
        self.state = "draining"
        self.admission.stopping = True
        await self._bus.source.stop()
        for job in self.jobs:
            if job.phase is Phase.WAITING:
                self.admission.forget(job)
        log.info("worker.draining", running=len(self.jobs), within_s=self._settings.worker.shutdown_timeout_s)
        try:
            async with asyncio.timeout(self._settings.worker.shutdown_timeout_s):
                await self._idle()
        except TimeoutError:
            await self._withdraw()
        for loop in self._loops:
            loop.cancel()
        await self.statuses.drain()

    async def _idle(self) -> None:
        """Wait until every job is settled, and every control event answered."""
        while self._work:
            await asyncio.wait(set(self._work), return_when=asyncio.FIRST_COMPLETED)

    async def _withdraw(self) -> None:
        running = dict(self.dispatcher.tasks)
        log.warning("worker.withdraws", requests=[job.request.id for job in running])
        for job, task in running.items():
            job.ending = Ending.STOPPED
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)

    async def _watch_engine(self) -> None:
        raise await self._engine.died()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Part of the worker: if it fails, the worker ends."""
        task = self._group.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task


async def _to_its_end(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A task group takes a cancellation that nobody asked for, such as aiokafka lets out, for a good end.

    Raises Stalled for it: a worker whose reading had ended so would look well and do nothing.
    """
    try:
        await loop()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Stalled(f"{task.get_name()} was cancelled from inside") from error
