"""One worker that is asked over the broker and over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from schemas.results import Outcome
from service import settings as settings_module
from service.app import serve
from service.client import Client
from service.http.server import HttpServer
from tests.support.bus import Bus, until
from tests.support.fake_worker import parts
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker
HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def worker(bus: Bus, name: str = "one", **given: object) -> AsyncIterator[str]:
    """A whole worker with both; gives the address of its HTTP server once it is ready."""
    settings = settings_module.load(
        bootstrap_servers=bus.bootstrap,
        topic_prefix=bus.prefix,
        group_id=bus.group,
        worker_id=f"{bus.prefix}{name}",
        presence_interval_s=0.2,
        http_port=0,
        **given,
    )
    stop, server = asyncio.Event(), HttpServer(settings)
    running = asyncio.create_task(serve(settings, parts(("llama", "qwen"), step_s=0.001), stop, server))
    try:
        async with httpx.AsyncClient(base_url=server.address, timeout=30) as http:

            async def ready() -> bool:
                return running.done() or (await http.get("/ready")).status_code == 200

            await until(ready)
        yield server.address
    finally:
        stop.set()
        await running


async def test_who_asks_over_http_and_who_asks_over_the_broker_are_answered_each_there(bus: Bus) -> None:
    async with worker(bus) as address, contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        )
        given = settings_module.load(bootstrap_servers=bus.bootstrap, topic_prefix=bus.prefix)
        client = await stack.enter_async_context(Client(settings=given))
        asked = [
            http.chat.completions.create(model=model, messages=HELLO, max_tokens=5)
            if way == "http"
            else client.chat(model=model, messages=HELLO, max_tokens=5)
            for model in ("llama", "qwen") * 10
            for way in ("http", "bus")
        ]
        texts = [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]
        assert texts == [
            "".join(f"{model}{i} " for i in range(5)) for model in ("llama", "qwen") * 10 for _ in range(2)
        ]
        stream = await http.chat.completions.create(model="qwen", messages=HELLO, max_tokens=5, stream=True)
        streamed = "".join([piece.choices[0].delta.content or "" async for piece in stream])
        assert streamed == "".join(f"qwen{i} " for i in range(5))
        results = [result async for result in client.results(past=True, follow=False)]
        assert len(results) == 20
        assert {result.outcome for result in results} == {Outcome.COMPLETED}


async def test_a_switch_over_http_is_told_on_the_bus(bus: Bus) -> None:
    given = settings_module.load(bootstrap_servers=bus.bootstrap, topic_prefix=bus.prefix)
    async with worker(bus, dev_mode=True) as address, Client(settings=given) as client:
        async with httpx.AsyncClient(base_url=address) as http:
            assert (await http.post("/v1/models/switch", json={"model": "qwen"})).json()["switched"] is True
        async with asyncio.timeout(PATIENCE_S):
            async for status in client.statuses(past=True):
                if status.kind == "switch" and status.state == "completed":
                    assert status.model == "qwen"
                    break


async def test_a_worker_shows_the_others_of_its_pool_and_what_it_owns(bus: Bus) -> None:
    async with worker(bus, "one") as first, worker(bus, "two") as second, httpx.AsyncClient(timeout=30) as http:
        shown: list[dict[str, Any]] = []

        async def shared() -> bool:
            shown[:] = [(await http.get(f"{address}/state")).json() for address in (first, second)]
            return all(state["pool"] and state["worker"]["partitions"] for state in shown)

        await until(shared)
        assert shown[0]["pool"][0]["worker"] == f"{bus.prefix}two"
        assert shown[0]["pool"][0]["http"] == second
        for address, state in zip((first, second), shown, strict=True):
            metrics = (await http.get(f"{address}/metrics")).text
            for topic in state["worker"]["partitions"]:
                assert f'gearshift_partitions{{topic="{topic}"}}' in metrics
                assert f'gearshift_lag_requests{{topic="{topic}"}}' in metrics
