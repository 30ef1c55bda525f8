"""What is told while a model is loaded: at the start, before there is an engine, and in a switch."""

import asyncio
import time

from service.http.server import HttpServer
from service.settings import load
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S


async def test_a_worker_that_loads_says_what_and_since_when(served):
    opens, began = asyncio.Event(), time.time()
    async with served(opens=opens, wait=False) as s:
        health = await s.http.get("/health")
        while health.json()["state"] == "starting":
            health = await s.http.get("/health")
        ready = await s.http.get("/ready")
        assert (health.status_code, ready.status_code) == (200, 503)
        for told in (health.json(), ready.json()):
            assert told["state"] == "loading"
            assert (told["loading"]["model"], told["loading"]["phase"]) == ("llama", "reading weights")
            assert began <= told["loading"]["since"] <= time.time()
        state = (await s.http.get("/state")).json()
        assert (state["ready"], state["worker"]["loading"]["model"]) == (False, "llama")
        models = await s.http.get("/v1/models")
        assert models.status_code == 503
        assert models.json()["error"]["message"] == "the worker is loading"
        opens.set()
        async with asyncio.timeout(PATIENCE_S):
            while (ready := await s.http.get("/ready")).status_code != 200:
                pass
        assert ready.json() == {"ready": True, "state": "serving", "joined": True}


async def test_a_scrape_tells_a_worker_that_loads_from_one_that_serves(served):
    opens = asyncio.Event()
    async with served(opens=opens, wait=False) as s:
        while (await s.http.get("/health")).json()["state"] == "starting":
            pass
        loading = await scraped(s)
        assert loading["gearshift_worker_ready"] == 0
        assert loading['gearshift_worker_state{state="loading"}'] == 1
        assert loading["gearshift_loading_seconds"] > 0
        assert loading["process_resident_memory_bytes"] > 0
        opens.set()
        async with asyncio.timeout(PATIENCE_S):
            while (await s.http.get("/ready")).status_code != 200:
                pass
        serving = await scraped(s)
        assert serving["gearshift_worker_ready"] == 1
        assert serving['gearshift_worker_state{state="serving"}'] == 1
        assert serving["gearshift_loading_seconds"] == 0


async def test_before_anything_is_known_a_scrape_says_that_it_is_not_ready():
    server = HttpServer(load(http_port=0))
    async with server.opened():
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rsplit(":", 1)[1]))
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert b"gearshift_worker_ready 0" in await reader.read()
            writer.close()


async def scraped(s) -> dict[str, float]:
    lines = (await s.http.get("/metrics")).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_a_switch_that_loads_a_model_says_so_and_one_that_does_not_load_does_not(served):
    async with served(engine=FakeEngine(switch_s=0.3), dev_mode=True) as s:

        async def heard(model: str) -> set[str]:
            """What was said to be loading while the switch was done."""
            switching = asyncio.create_task(s.http.post("/v1/models/switch", json={"model": model}))
            found = set()
            while not switching.done():
                told = (await s.http.get("/health")).json()
                found |= {told["loading"]["model"]} if "loading" in told else set()
            assert switching.result().status_code == 200
            return found

        assert await heard("qwen") == {"qwen"}
        assert await heard("llama") == set()
        assert "loading" not in (await s.http.get("/health")).json()
