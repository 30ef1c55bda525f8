import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from schemas.contexts import Tier
from service import settings as settings_module
from service.errors import ConfigError
from service.models_file import ModelsFile, Scheduling
from service.ports import Bus
from service.quotas_file import WatchedQuotas
from service.scheduling.quotas import Quotas
from service.worker.worker import ModelsSource, Worker
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine


@dataclass
class Serving:
    """A worker that runs, and the hands to reach it with."""

    bus: FakeBus
    engine: FakeEngine
    worker: Worker
    stop: asyncio.Event
    done: "asyncio.Task[None]"

    async def finish(self) -> None:
        """Ask it to stop, and wait until it has."""
        self.stop.set()
        await self.done


Serve = Callable[..., AbstractAsyncContextManager[Serving]]


@pytest.fixture
def serve() -> Serve:
    """``async with serve(engine=..., bus=..., **settings) as serving``: the whole worker around fakes."""

    @asynccontextmanager
    async def open_worker(
        *,
        engine: FakeEngine | None = None,
        bus: FakeBus | None = None,
        models: dict[str, Scheduling] | None = None,
        read_models: Callable[[], ModelsFile] | None = None,
        desired: tuple = (),
        **given: object,
    ) -> AsyncIterator[Serving]:
        engine = engine or FakeEngine()
        quick = {"presence_interval_s": 0.1, "shutdown_timeout_s": 0.5}
        loaded = settings_module.load(worker_id="w1", **(quick | given))
        keys = settings_module.read_keys(loaded.worker.pool_key_file, "pool_key_file")
        bus = bus or FakeBus(topics=loaded.topics, keys=keys)
        bus.open()
        worker = Worker(
            engine=engine,
            bus=Bus(source=bus, settlements=bus, control=bus, announcements=bus),
            settings=loaded,
            models=ModelsSource(read_models or _no_models, lambda: models or {}),
            quotas=Quotas(WatchedQuotas(loaded.worker.quotas_file)),
        )
        for alias in engine.aliases:  # as every model here: or a worker waits and sees for what a real load is worth
            worker.scheduler.costs.switched(None, alias, Tier.DROPPED, 0.0)
        stop = asyncio.Event()
        done = asyncio.create_task(worker.run(stop, desired))
        try:
            yield Serving(bus, engine, worker, stop, done)
        finally:
            stop.set()
            with contextlib.suppress(BaseExceptionGroup):
                await done
            await engine.close()
        assert not bus.settled_again

    return open_worker


def _no_models() -> ModelsFile:
    raise ConfigError("there is no models.yaml here")
