"""The composition root: opens everything, runs it, and closes it in the reverse order."""

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil
import structlog
from opentelemetry.trace import Tracer

from schemas.control import Control, Switch
from schemas.usage import Usage
from service import memory, telemetry
from service.consumer.requests import RequestConsumer
from service.engine.system import garbage
from service.errors import ConfigError, EngineDied
from service.http.combined_bus import CombinedBus
from service.http.security import is_locked
from service.http.server import HttpServer
from service.http.worker_view import WorkerView
from service.kafka.announcements import Announcer
from service.kafka.batch_runs import BatchRuns
from service.kafka.calls import Calls
from service.kafka.connection import reachable
from service.kafka.control import ControlTopics
from service.kafka.files import Files
from service.kafka.topics import ensure_topics
from service.kafka.usage import follow_usage
from service.models_file import ModelsFile
from service.ports import Announcements, Bus, Engine, Holdings, Measured, SourceState, Watcher
from service.quotas_file import WatchedQuotas
from service.scheduling.quotas import Quotas
from service.settings import Settings
from service.worker.metrics import Metrics, Standing
from service.worker.presence import PresenceLoop, Startup
from service.worker.quotas import OwnUsage
from service.worker.worker import ModelsSource, Observers, Worker

log = structlog.get_logger(__name__)
_NEW_OBJECTS = 20_000
_RESTARTS_WITHIN_S = 600.0
Progress = Callable[[str], None]
EngineOpener = Callable[[ModelsFile, Settings, Progress], Awaitable[Engine]]


@dataclass(frozen=True)
class Parts:
    """What a worker needs from outside, so that a test can run the whole service around another engine."""

    read_models: Callable[[], ModelsFile]
    open_engine: EngineOpener


async def open_vllm(models: ModelsFile, settings: Settings, progress: Progress) -> Engine:
    """The real engine. vLLM is imported here and not before."""
    from service.engine import VllmEngine

    return await VllmEngine.open(models, settings.engine, progress, log=settings.log)


def share_imports() -> None:
    """Import vLLM once for this process and all of an engine's: to be called before anything starts a thread."""
    from service.engine.processes.fork_server import server

    server.fork_here()


async def with_new_engines(run: Callable[[], Awaitable[None]], stop: asyncio.Event, settings: Settings) -> None:
    """Run a worker, and once more in this process where its engine died: all is imported then, and it takes seconds.

    Its requests are still in the log, with what is known of the death: whoever has their partitions goes on with them.
    An engine that does not start, ``engine_restarts`` and the signal to stop are the end. Raises as ``run`` does.
    """
    died: list[float] = []
    while True:
        try:
            await run()
        except BaseExceptionGroup as group:
            now = time.monotonic()
            died = [at for at in died if at > now - _RESTARTS_WITHIN_S]
            often = len(died) >= settings.worker.engine_restarts
            if often or stop.is_set() or not all(isinstance(cause, EngineDied) for cause in causes(group)):
                raise
            died.append(now)
            log.warning("engine.restarting", restarts=len(died), reason=str(next(causes(group))))
        else:
            return
        garbage.collect()  # what the dead engine left in circles was frozen while it served


async def serve(settings: Settings, parts: Parts, stop: asyncio.Event, server: HttpServer | None = None) -> None:
    """Run one worker until ``stop`` is set, with an HTTP server if it is given or the settings give it a port.

    The server is open and the worker's presence is kept while the engine is still loading, so that probes, the page
    and the pool can tell.

    Raises ConfigError, BrokerUnavailable, TopicError before anything is read; later an ExceptionGroup.
    """
    if settings.worker.quotas_file is not None and not settings.topics.usage_records:
        raise ConfigError("quotas_file: tokens are counted by the topic of usage, and usage_records is off")
    models = Models(parts.read_models)
    await reachable(settings.kafka, within_s=settings.kafka.startup_timeout_s)
    await ensure_topics(settings, list(models.latest.models))
    async with contextlib.AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(_tracer(settings))  # it ends last: others wait for the partitions
        if server is not None or settings.http.http_port is not None:
            server = server or HttpServer(settings)
            server.has_broker = True
            await stack.enter_async_context(server.opened())
        starting = _Starting(settings, models, server, tracer)
        await stack.enter_async_context(_counted(starting))
        control = ControlTopics(settings=settings)
        announcer = await stack.enter_async_context(Announcer(settings=settings, outdated=control.outdated))
        stack.push_async_callback(announcer.farewell)
        async with _announced(announcer, starting):
            await stack.enter_async_context(control)
            calls = await stack.enter_async_context(Calls(settings=settings))
            files = await stack.enter_async_context(Files(settings=settings))
            if server is not None:
                server.calls, server.files = calls, files
            desired = await control.desired()
            engine = await _unless_stopped(stop, starting.opened(parts, _boot(models.latest, desired)))
            if engine is None:
                return
            stack.push_async_callback(engine.close)
            requests = await stack.enter_async_context(
                RequestConsumer(
                    settings=settings, aliases=engine.aliases, holdings=partial(_holdings, engine), calls=calls
                )
            )
            await stack.enter_async_context(BatchRuns(calls=calls, files=files, owned=requests.owned_calls))
        bus = Bus(source=requests, settlements=requests, control=control, announcements=announcer)
        if server is not None:
            combined = CombinedBus(memory=server.bus, source=requests, settlements=requests, announcements=announcer)
            stack.push_async_callback(combined.close)
            bus = replace(bus, source=combined, settlements=combined, announcements=combined)
        await _serve(stack, starting, engine, bus, stop, desired)


async def serve_http(settings: Settings, parts: Parts, stop: asyncio.Event, server: HttpServer | None = None) -> None:
    """Run one worker without a broker: what is asked over HTTP, at ``server``, is all there is.

    Raises ConfigError; later an ExceptionGroup.
    """
    if is_locked(settings.http):
        raise ConfigError(
            f"http_host: others reach {settings.http.http_host}, and nobody would be answered there without keys: "
            "set api_keys_file, or http_anonymous"
        )
    server = server or HttpServer(settings)
    models = Models(parts.read_models)
    async with contextlib.AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(_tracer(settings))
        await stack.enter_async_context(server.opened())
        starting = _Starting(settings, models, server, tracer)
        engine = await _unless_stopped(stop, starting.opened(parts, models.latest))
        if engine is None:
            return
        stack.push_async_callback(engine.close)
        bus = Bus(source=server.bus, settlements=server.bus, control=server.bus, announcements=server.bus)
        await _serve(stack, starting, engine, bus, stop, (), watchers=[OwnUsage(starting.quotas)])


def _tracer(settings: Settings) -> contextlib.AbstractAsyncContextManager[Tracer | None]:
    return telemetry.tracer(settings.log, worker=settings.worker.worker_id)


@contextlib.asynccontextmanager
async def _counted(starting: "_Starting") -> AsyncIterator[None]:
    """Keep count of what tenants with quotas spend, wherever in the pool, for as long as the block lasts."""
    quotas = starting.quotas
    if starting.settings.worker.quotas_file is None:
        yield
        return

    def spent(usage: Usage, at: float) -> None:
        quotas.spent(usage.tenant, usage.prompt_tokens + usage.generated_tokens, at)
        quotas.ended(usage.tenant, usage.id)

    counting = asyncio.create_task(follow_usage(starting.settings, spent), name="usage")
    try:
        yield
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


class _Starting:
    """A worker on its way up: what it is made of, and what is told of it meanwhile."""

    def __init__(self, settings: Settings, models: "Models", server: HttpServer | None, tracer: Tracer | None) -> None:
        self.settings = settings
        self.tracer = tracer
        self.models = models
        self.server = server
        self.quotas = Quotas(WatchedQuotas(settings.worker.quotas_file)) if server is None else server.quotas
        self.metrics = Metrics(tenants=lambda: self.quotas.limits.now.tenants)
        self._startup = Startup(settings.worker, http=None if server is None else server.address)
        self.presence = self._startup.presence
        self.metrics.watch(lambda: Standing(presence=self.presence(), source=SourceState(joined=False)))
        if server is not None:
            server.worker = WorkerView(
                presence=self.presence,
                models=lambda: models.latest,
                source=partial(SourceState, joined=False),
                metrics=self.metrics.render,
            )

    async def opened(self, parts: Parts, models: ModelsFile) -> Engine:
        """The engine, in the default model."""
        began = time.monotonic()

        def progress(phase: str) -> None:
            self._startup.progress(phase)
            log.info("engine.progress", phase=phase, after_s=round(time.monotonic() - began, 2))

        self._startup.load(models.default_model)
        engine = await parts.open_engine(models, self.settings, progress)
        log.info("engine.started", engine_start_s=round(time.monotonic() - began, 3), active=engine.active)
        return engine


@contextlib.asynccontextmanager
async def _announced(announcements: Announcements, starting: _Starting) -> AsyncIterator[None]:
    """Keep the presence of a worker that starts for as long as the block lasts."""
    loop = PresenceLoop(
        announcements=announcements,
        presence=starting.presence,
        interval_s=starting.settings.worker.presence_interval_s,
    )
    saying = asyncio.create_task(loop.run(), name="presence")
    try:
        yield
    finally:
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)


async def _serve(
    stack: contextlib.AsyncExitStack,
    starting: _Starting,
    engine: Engine,
    bus: Bus,
    stop: asyncio.Event,
    desired: Sequence[Control],
    watchers: Sequence[Watcher] = (),
) -> None:
    """Run the worker, until ``stop`` is set."""
    settings, models, server, metrics = starting.settings, starting.models, starting.server, starting.metrics
    if isinstance(engine, Measured):
        metrics.watch_engine(engine.registries)
    of_server = () if server is None else (server.commands, server.history)
    worker = Worker(
        engine=engine,
        bus=bus,
        settings=settings,
        models=ModelsSource(models.read, lambda: models.latest.scheduling, models.took),
        observers=Observers((metrics, *watchers, *of_server), starting.tracer),
        http=None if server is None else server.address,
        quotas=starting.quotas,
    )
    metrics.watch(worker.standing)
    if server is not None:
        server.worker = _view(worker, engine, bus, models, metrics)
        stack.callback(server.leave)
    log.info("worker.ready", worker=settings.worker.worker_id, active=engine.active)
    async with memory.given_back():
        with seldom_collected():
            await worker.run(stop, desired)
    log.info("worker.stopped", worker=settings.worker.worker_id)


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """What is there by now stays: look for garbage in what comes after it, and not every 700 objects.

    Requests that wait are thousands of objects that are no garbage. By the defaults a third of a busy worker's time
    goes into looking through them, and a full collection with an engine's modules loaded stalls the loop.
    It stays so afterwards, until an engine is replaced (``with_new_engines``).
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _holdings(engine: Engine) -> Holdings:
    return Holdings(contexts=engine.contexts(), device_bytes=engine.device_bytes)


def _view(worker: Worker, engine: Engine, bus: Bus, models: "Models", metrics: Metrics) -> WorkerView:
    return WorkerView(
        command=worker.command,
        presence=worker.presence.now,
        models=lambda: models.latest,
        requests=worker.inspection.requests,
        tokens=worker.inspection.tokens,
        ends_s=worker.inspection.ends_s,
        objectives=worker.objectives,
        source=bus.source.state,
        others=bus.announcements.others,
        metrics=metrics.render,
        inquire=worker.inquire,
        openapi=engine.openapi,
    )


class Models:
    """models.yaml: ``read`` reads it, and raises ConfigError; ``latest`` is what the engine took last."""

    def __init__(self, read: Callable[[], ModelsFile]) -> None:
        self.read = read
        self.latest = read()

    def took(self, models: ModelsFile) -> None:
        """The engine's models are those of a file that was read."""
        self.latest = models


async def _unless_stopped(stop: asyncio.Event, opening: Awaitable[Engine]) -> Engine | None:
    """The engine, or None if the signal to stop came while it was starting."""
    task = asyncio.ensure_future(opening)
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        log.info("worker.stopped_while_starting")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    finally:
        stopped.cancel()


def _boot(models: ModelsFile, desired: Sequence[Control]) -> ModelsFile:
    """models.yaml with the model that operators asked for last as the one to boot into."""
    asked = [event.model for event in desired if isinstance(event, Switch) and event.model in models.models]
    return replace(models, default_model=asked[-1]) if asked else models


@contextlib.asynccontextmanager
async def stop_on_signals() -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGTERM or SIGINT sets; the second one leaves at once, and takes the engine along."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.warning("worker.left_at_once", signal=signal.Signals(number).name)
            kill_children()
            os._exit(128 + number)
        log.info("worker.stopping", signal=signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def kill_children() -> None:
    """End every process that this one started, at once."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def causes(error: BaseException) -> Iterator[BaseException]:
    """The errors in an exception group, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from causes(inner)
    else:
        yield error
