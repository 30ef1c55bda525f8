"""Models and switches as the Gaudi server has them; keys, origins, health."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import openai
import pytest

from service.errors import ConfigError
from service.http.server import HttpServer
from service.settings import load
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S


async def test_models_are_listed_with_tier_and_which_is_active_loras_too(served):
    async with served() as s:
        await s.engine.add_lora("qwen", "poet", "adapters/poet")
        listed = {model.id: model for model in (await s.openai.models.list()).data}
        assert list(listed) == ["llama", "qwen", "poet"]
        assert (listed["llama"].active, listed["llama"].tier, listed["llama"].root) == (
            True,
            "resident",
            "/models/llama",
        )
        assert (listed["qwen"].active, listed["qwen"].tier, listed["qwen"].max_model_len) == (False, "dropped", 4096)
        assert (listed["poet"].parent, listed["poet"].root) == ("qwen", "adapters/poet")
        assert (await s.openai.models.retrieve("qwen")).id == "qwen"
        with pytest.raises(openai.NotFoundError):
            await s.openai.models.retrieve("quen")


async def test_a_switch_answers_with_the_gaudi_servers_fields(served):
    async with served(dev_mode=True) as s:
        answer = await s.http.post("/v1/models/switch", json={"model": "qwen", "drain_timeout": 1})
        assert answer.status_code == 200
        body = answer.json()
        assert (body["previous_model"], body["current_model"], body["switched"]) == ("llama", "qwen", True)
        assert body.keys() == {
            "previous_model", "current_model", "switched", "duration_ms", "reconfigure_ms", "memory_before_mb",
            "memory_after_unload_mb", "freed_memory_mb", "stash_memory_after_mb",
        }  # fmt: skip
        again = (await s.http.post("/v1/models/switch", json={"model": "qwen"})).json()
        assert (again["previous_model"], again["current_model"], again["switched"]) == ("qwen", "qwen", False)


@pytest.mark.parametrize(
    ("body", "status"),
    [({"model": "quen"}, 404), ({}, 400), ({"model": "qwen", "drain_timeout": -1}, 400), ({"model": "phi"}, 500)],
)
async def test_a_switch_that_can_not_be_is_answered_with_its_status(served, body, status):
    engine = FakeEngine(aliases=("llama", "qwen", "phi"), broken_loads=frozenset({"phi"}))
    async with served(dev_mode=True, engine=engine) as s:
        answer = await s.http.post("/v1/models/switch", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert s.engine.active == "llama"


@pytest.mark.parametrize("hold", ["forever", 3600])
async def test_a_switch_is_held_for_as_long_as_it_says(served, hold):
    async with served(dev_mode=True) as s:
        answer = await s.http.post("/v1/models/switch", json={"model": "qwen", "hold": hold})
        assert answer.status_code == 200, answer.text
        held = s.server.worker.presence().hold
        assert (held.model, held.until is None) == ("qwen", hold == "forever")


async def test_there_are_no_switches_outside_of_dev_mode(served):
    async with served() as s:
        assert (await s.http.post("/v1/models/switch", json={"model": "qwen"})).status_code in {404, 405}
        assert s.engine.active == "llama"


async def test_three_switches_at_once_each_report_what_they_did(served):
    engine = FakeEngine(aliases=("llama", "qwen", "phi"), switch_s=0.01)
    async with served(dev_mode=True, engine=engine) as s:
        wanted = ("qwen", "phi", "llama")
        asked = [s.http.post("/v1/models/switch", json={"model": model}) for model in wanted]
        answers = [answer.json() for answer in await asyncio.gather(*asked)]
        steps = {(answer["previous_model"], answer["current_model"]) for answer in answers}
        assert {to for _, to in steps} == set(wanted)
        assert len({came_from for came_from, _ in steps}) == 3


async def test_a_request_for_a_model_that_is_not_active_is_refused_where_that_is_the_rule(served):
    async with served(inactive="refuse", dev_mode=True) as s:
        with pytest.raises(openai.NotFoundError):
            await s.openai.completions.create(model="qwen", prompt="x")
        await s.http.post("/v1/models/switch", json={"model": "qwen"})
        assert (await s.openai.completions.create(model="qwen", prompt="x")).model == "qwen"


async def test_only_who_has_a_key_may_ask(served, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# staff\nsesame\n\nother\n")
    async with served(api_keys_file=keys, key="sesame") as s:
        assert (await s.openai.completions.create(model="llama", prompt="x")).model == "llama"
        with pytest.raises(openai.AuthenticationError):
            await s.openai.with_options(api_key="guess").completions.create(model="llama", prompt="x")
        assert (await s.http.post("/tokenize", json={})).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await s.http.get(path)).status_code == 200


def test_a_file_of_keys_without_a_key_is_no_protection(tmp_path):
    (tmp_path / "keys").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no keys"):
        HttpServer(load(http_port=0, api_keys_file=tmp_path / "keys"))


async def test_browsers_of_allowed_origins_may_ask(served):
    async with served(cors_origins="https://a.example", api_keys_file=None) as s:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = await s.http.options("/v1/completions", headers=headers)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = await s.http.options("/v1/completions", headers=headers | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in refused.headers


async def test_a_port_that_is_taken_is_a_plain_error():
    taken = HttpServer(load(http_port=0))
    port = taken.address.rsplit(":", 1)[1]
    with pytest.raises(ConfigError, match=port):
        HttpServer(load(http_port=port))
    async with taken.opened():
        pass


@pytest.mark.delicate
async def test_an_answer_does_not_wait_for_its_headers_to_be_acknowledged(served):
    async with served() as s:
        took = []
        for _ in range(20):
            began = time.perf_counter()
            await s.http.get("/v1/models")
            took.append(time.perf_counter() - began)
        assert min(took) < 0.03  # it was never less than the 40 ms of a delayed acknowledgement


@pytest.mark.parametrize(
    ("given", "port"), [({}, 8000), ({"http_port": 0}, None), ({"http_port": 18231}, 18231)], ids=["none", "any", "one"]
)
def test_the_port_is_what_the_settings_say_and_otherwise_vllms(given, port):
    try:
        server = HttpServer(load(**given))
    except ConfigError as taken:
        assert str(port) in str(taken)  # noqa: PT017  # somebody else's: it was tried
        return
    assert port in {None, int(server.address.rsplit(":", 1)[1])}
    server._socket.close()


def test_a_server_open_to_everyone_is_named_by_its_machine():
    server = HttpServer(load(http_port=0, http_host="0.0.0.0"))
    assert socket.gethostname() in server.address
    server._socket.close()


async def test_before_the_engine_is_there_it_is_alive_but_not_ready(served):
    server = HttpServer(load(http_port=0))
    async with (
        server.opened(),
        openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="starting"):
            await client.models.list()
        assert (await client.get("/../health", cast_to=object)) == {"state": "starting"}
        with pytest.raises(openai.InternalServerError):
            await client.get("/../ready", cast_to=object)


async def test_a_stopping_worker_is_not_ready_but_alive(served):
    async with served(engine=FakeEngine(step_s=0.001)) as s:
        body = {"model": "llama", "prompt": "x", "max_tokens": 500, "stream": True}
        async with s.http.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            s.stop.set()
            ready = await s.http.get("/ready")
            while ready.status_code == 200:
                ready = await s.http.get("/ready")
            assert ready.json()["state"] == "draining"
            assert (await s.http.get("/health")).status_code == 200


async def test_the_version_names_the_engines_too(served):
    async with served() as s:
        assert (await s.http.get("/version")).json().keys() == {"version", "vllm"}


async def test_health_says_what_is_stuck(served):
    async with served(engine=FakeEngine(step_s=1000.0), stall_after_s=0.2) as s:
        asking = asyncio.create_task(s.openai.completions.create(model="llama", prompt="hello"))
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await s.http.get("/health")).status_code == 200:
                pass
        assert answer.json()["state"] == "unhealthy"
        assert "1 requests are here" in answer.json()["trouble"]
        asking.cancel()


@pytest.mark.parametrize("given", ["variable", "option", "assignment"])
def test_gearshift_serve_listens_where_the_variable_or_the_option_says(given, tmp_path):
    """Both ports are somebody else's, so that it says which one it tried, and does so before it imports vLLM."""
    with socket.create_server(("127.0.0.1", 0)) as by_variable, socket.create_server(("127.0.0.1", 0)) as by_option:
        ports = {"variable": by_variable.getsockname()[1], "option": by_option.getsockname()[1]}
        ports["assignment"] = ports["option"]
        port = str(ports["option"])
        options = {"variable": [], "option": ["--port", port], "assignment": ["--set", f"http_port={port}"]}[given]
        (tmp_path / "models.yaml").write_text("default_model: m\nmodels: {m: {model: /m}}\n")
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", "serve", "--models", tmp_path / "models.yaml", *options],
            env={**os.environ, "GEARSHIFT_HTTP_PORT": str(ports["variable"]), "PYTHONPROFILEIMPORTTIME": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert {"uvicorn", "vllm"} & imported == {"uvicorn"}
        assert f"127.0.0.1:{ports[given]}:" in (done.stdout + done.stderr).replace("\n", "")


async def test_the_length_of_a_model_is_the_resolved_one_and_not_what_its_file_says(served):
    """models.yaml has ``4k``, as vLLM takes it, or nothing."""
    async with served(engine=FakeEngine(max_model_len=4000)) as s:
        assert {model["max_model_len"] for model in (await s.http.get("/v1/models")).json()["data"]} == {4000}
