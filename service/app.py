"""The composition root: opens everything, runs it, and closes it in the reverse order."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil
import structlog
from opentelemetry.trace import Tracer

from schemas.control import Control, Switch
from schemas.status import Presence
from service import telemetry
from service.consumer.requests import RequestConsumer
from service.http.door import Door
from service.http.doors import Doors
from service.http.serving import Serving
from service.kafka.announcements import Announcer
from service.kafka.connection import reachable
from service.kafka.control import ControlTopics
from service.kafka.topics import ensure_topics
from service.models_file import ModelsFile
from service.ports import Bus, Engine, Holdings, Measured
from service.settings import Settings
from service.worker.metrics import Metrics
from service.worker.presence import VERSION
from service.worker.worker import ModelsSource, Observers, Worker

log = structlog.get_logger(__name__)
_NEW_OBJECTS = 20_000
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


async def serve(settings: Settings, parts: Parts, stop: asyncio.Event, door: Door | None = None) -> None:
    """Run one worker until ``stop`` is set, with an HTTP door if it is given or the settings give it a port.

    The door is open while the engine is still loading, so that probes and the page can tell.

    Raises ConfigError, BrokerUnavailable, TopicError before anything is read; later an ExceptionGroup.
    """
    models = Models(parts.read_models)
    await reachable(settings.kafka, within_s=settings.kafka.startup_timeout_s)
    await ensure_topics(settings, list(models.latest.models))
    async with contextlib.AsyncExitStack() as stack:
        if door is not None or settings.http.http_port is not None:
            door = await stack.enter_async_context((door or Door(settings)).opened())
        control = ControlTopics(settings=settings)
        announcer = await stack.enter_async_context(Announcer(settings=settings, outdated=control.outdated))
        await announcer.presence(_starting(settings))
        stack.push_async_callback(announcer.farewell)
        await stack.enter_async_context(control)
        desired = await control.desired()
        engine = await _unless_stopped(stop, _opened(parts, _boot(models.latest, desired), settings))
        if engine is None:
            return
        stack.push_async_callback(engine.close)
        intake = await stack.enter_async_context(
            RequestConsumer(settings=settings, aliases=engine.aliases, holdings=partial(_holdings, engine))
        )
        bus = Bus(source=intake, settlements=intake, control=control, announcements=announcer)
        if door is not None:
            doors = Doors(local=door.local, source=intake, settlements=intake, announcements=announcer)
            stack.push_async_callback(doors.close)
            bus = replace(bus, source=doors, settlements=doors, announcements=doors)
        metrics = _metrics(engine)
        tracer = await stack.enter_async_context(telemetry.tracer(settings.log, worker=settings.worker.worker_id))
        worker = _worker(settings, engine, bus, models, door, metrics, tracer)
        metrics.watch(worker.standing)
        if door is not None:
            door.serving = _serving(worker, bus, models, metrics)
            stack.callback(door.leave)
        await _run(worker, settings, engine, stop, desired)


async def serve_http(settings: Settings, parts: Parts, stop: asyncio.Event, door: Door | None = None) -> None:
    """Run one worker without a broker: what is asked over HTTP, at ``door``, is all there is.

    Raises ConfigError; later an ExceptionGroup.
    """
    door = door or Door(settings)
    models = Models(parts.read_models)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(door.opened())
        engine = await _unless_stopped(stop, _opened(parts, models.latest, settings))
        if engine is None:
            return
        stack.push_async_callback(engine.close)
        bus = Bus(source=door.local, settlements=door.local, control=door.local, announcements=door.local)
        metrics = _metrics(engine)
        tracer = await stack.enter_async_context(telemetry.tracer(settings.log, worker=settings.worker.worker_id))
        worker = _worker(settings, engine, bus, models, door, metrics, tracer)
        metrics.watch(worker.standing)
        door.serving = _serving(worker, bus, models, metrics)
        stack.callback(door.leave)
        await _run(worker, settings, engine, stop, ())


async def _run(
    worker: Worker, settings: Settings, engine: Engine, stop: asyncio.Event, desired: Sequence[Control]
) -> None:
    log.info("worker.ready", worker=settings.worker.worker_id, active=engine.active)
    with seldom_collected():
        await worker.run(stop, desired)
    log.info("worker.stopped", worker=settings.worker.worker_id)


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """What is there by now stays: look for garbage in what comes after it, and not every 700 objects.

    Requests that wait are thousands of objects that are no garbage. By the defaults a third of a busy worker's time
    goes into looking through them, and a full collection with an engine's modules loaded stalls the loop.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _worker(
    settings: Settings,
    engine: Engine,
    bus: Bus,
    models: "Models",
    door: Door | None,
    metrics: Metrics,
    tracer: Tracer | None,
) -> Worker:
    return Worker(
        engine=engine,
        bus=bus,
        settings=settings,
        models=ModelsSource(models.read, lambda: models.latest.scheduling),
        observers=Observers((metrics,) if door is None else (metrics, door.commands, door.history), tracer),
        http=None if door is None else door.address,
    )


def _holdings(engine: Engine) -> Holdings:
    return Holdings(contexts=engine.contexts(), device_bytes=engine.device_bytes)


def _metrics(engine: Engine) -> Metrics:
    metrics = Metrics()
    if isinstance(engine, Measured):
        metrics.watch_engine(engine.registries)
    return metrics


def _serving(worker: Worker, bus: Bus, models: "Models", metrics: Metrics) -> Serving:
    return Serving(
        command=worker.command,
        presence=worker.presence.now,
        models=lambda: models.latest,
        requests=worker.inspection.requests,
        tokens=worker.inspection.tokens,
        source=bus.source.state,
        others=bus.announcements.others,
        metrics=metrics.render,
    )


class Models:
    """models.yaml as it was read last."""

    def __init__(self, read: Callable[[], ModelsFile]) -> None:
        self._read = read
        self.latest = read()

    def read(self) -> ModelsFile:
        """Read it again. Raises ConfigError, and keeps what was there."""
        self.latest = self._read()
        return self.latest


async def _opened(parts: Parts, models: ModelsFile, settings: Settings) -> Engine:
    began = time.monotonic()

    def progress(phase: str) -> None:
        log.info("engine.progress", phase=phase, after_s=round(time.monotonic() - began, 2))

    engine = await parts.open_engine(models, settings, progress)
    log.info("engine.started", engine_start_s=round(time.monotonic() - began, 3), active=engine.active)
    return engine


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


def _starting(settings: Settings) -> Presence:
    return Presence(
        worker=settings.worker.worker_id,
        pool=settings.worker.group_id,
        at=time.time(),
        interval_s=settings.worker.presence_interval_s,
        version=VERSION,
        state="starting",
        host=socket.gethostname(),
        pid=os.getpid(),
    )


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
