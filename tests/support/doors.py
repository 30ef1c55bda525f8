"""One worker behind both of its doors, on the real broker and the session's engine, with who knocks at each."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai

from schemas.control import Reload
from schemas.status import StatusState
from service.app import Parts, serve
from service.client import Client
from service.http.server import HttpServer
from service.models_file import ModelsFile, ModelSpec
from service.settings import Settings
from tests.support.pool import delete_topics, settings_for


class Lent:
    """The session's engine, which outlives the worker that it is lent to."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def close(self) -> None:
        """It is not the worker's to close."""


@dataclass
class Models:
    """models.yaml, as the worker reads it next."""

    now: ModelsFile


@dataclass(frozen=True)
class Doors:
    """``bus`` is our client, ``openai`` OpenAI's own on the HTTP door, ``engine`` the Python door."""

    bus: Client
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    engine: Any
    models: Models
    settings: Settings


@asynccontextmanager
async def open_doors(engine: Any, bootstrap: str, **given: Any) -> AsyncIterator[Doors]:
    """A worker that is ready; ``given`` are settings."""
    settings = settings_for(bootstrap, http_port=0, dev_mode=True, **{"hold_s": 0.0, **given})

    async def lend(*_: object) -> Any:
        return Lent(engine)

    stop, server = asyncio.Event(), HttpServer(settings)
    models = Models(engine._models)
    try:
        async with asyncio.TaskGroup() as tasks:
            parts = Parts(read_models=lambda: models.now, open_engine=lend)
            done = tasks.create_task(serve(settings, parts, stop, server), name="worker")
            async with (
                httpx.AsyncClient(base_url=server.address, timeout=120) as http,
                openai.AsyncOpenAI(
                    base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120
                ) as official,
                Client(settings=settings, timeout_s=120) as bus,
            ):
                while (await http.get("/ready")).status_code != 200 and not done.done():
                    await asyncio.wait({done}, timeout=0.1)
                yield Doors(bus, http, official, engine, models, settings)
            stop.set()
    finally:
        await delete_topics(settings)


@asynccontextmanager
async def with_models(doors: Doors, *specs: ModelSpec) -> AsyncIterator[None]:
    """The worker's models.yaml has these too, while the block runs."""
    before = doors.models.now
    try:
        await _reload(doors, replace(before, models={**before.models, **{spec.alias: spec for spec in specs}}))
        yield
        await doors.bus.switch(before.default_model)
    finally:
        await _reload(doors, before)


async def _reload(doors: Doors, models: ModelsFile) -> None:
    doors.models.now = models
    (status,) = await doors.bus.control(Reload(), timeout_s=60)
    assert status.state is StatusState.COMPLETED, status.reason
