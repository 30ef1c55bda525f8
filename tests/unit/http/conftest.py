import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from schemas.objectives import Objective
from service import settings as settings_module
from service.app import Parts, Progress, serve_http
from service.http.server import HttpServer
from service.models_file import ModelsFile, ModelSpec, Scheduling
from tests.support.chromium import chromium
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S


@dataclass
class Served:
    """A worker and its HTTP server, and the hands to reach it with."""

    engine: FakeEngine
    server: HttpServer
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    stop: asyncio.Event
    done: "asyncio.Task[None]"


Open = Callable[..., AbstractAsyncContextManager[Served]]


def models_of(engine: FakeEngine, objective: Objective | None = None) -> ModelsFile:
    models = {
        alias: ModelSpec(
            alias=alias,
            engine_args={"model": f"/models/{alias}", "max_model_len": "4k"},
            scheduling=Scheduling(loras={"poet": "adapters/poet"}, objective=objective),
        )
        for alias in engine.aliases
    }
    return ModelsFile(path=Path("models.yaml"), default_model=engine.active, models=models)


@pytest.fixture
def served() -> Open:
    """``async with served(engine=..., **settings) as s``: ``gearshift serve`` around the fake engine.

    ``opens``: when the engine is up. ``objective``: what its models' requests are to get. ``read_models``: models.yaml.
    """

    @asynccontextmanager
    async def open_server(
        *,
        engine: FakeEngine | None = None,
        opens: asyncio.Event | None = None,
        key: str = "none",
        wait: bool = True,
        objective: Objective | None = None,
        read_models: Callable[[], ModelsFile] | None = None,
        **given: object,
    ) -> AsyncIterator[Served]:
        engine = engine or FakeEngine()
        settings = settings_module.load(worker_id="w1", http_port=0, presence_interval_s=0.1, **given)

        async def open_engine(_models: object, _settings: object, progress: Progress) -> FakeEngine:
            progress("reading weights")
            if opens is not None:
                await opens.wait()
            return engine

        read_models = read_models or partial(models_of, engine, objective)
        parts = Parts(read_models=read_models, open_engine=open_engine)
        stop, server = asyncio.Event(), HttpServer(settings)
        done = asyncio.create_task(serve_http(settings, parts, stop, server))
        base = server.address
        async with (
            # Without the authorities' certificates, which take a while to read and are for https.
            httpx.AsyncClient(base_url=base, timeout=PATIENCE_S, verify=False) as http,
            openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, http_client=http) as client,
        ):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while wait and (await http.get("/ready")).status_code != 200:
                        pass
                yield Served(engine, server, http, client, stop, done)
            finally:
                stop.set()
                with contextlib.suppress(BaseExceptionGroup):
                    await done
                await engine.close()

    return open_server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    with chromium() as opened:
        yield opened
