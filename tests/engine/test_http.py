"""OpenAI's own client against the real engine, over HTTP, on several models."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from service import settings as settings_module
from service.app import Parts, serve_http
from service.http.server import HttpServer
from service.models_file import ModelsFile
from tests.engine.test_continuing import generated
from tests.support.doors import Lent
from tests.support.profiles import traces
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine
HELLO: Any = [{"role": "user", "content": "Where do you walk?"}]


@dataclass
class Reached:
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    engine: Any


@pytest.fixture
async def reached(engine: Any) -> AsyncIterator[Reached]:
    settings = settings_module.load(worker_id="w1", http_port=0, dev_mode=True)
    models: ModelsFile = engine._models

    async def lend(*_: object) -> Any:
        return Lent(engine)

    stop, server = asyncio.Event(), HttpServer(settings)
    done = asyncio.create_task(serve_http(settings, Parts(lambda: models, lend), stop, server))
    async with (
        openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client,
        httpx.AsyncClient(base_url=server.address, timeout=120) as http,
    ):
        try:
            while (await http.get("/ready")).status_code != 200 and not done.done():
                await asyncio.wait({done}, timeout=0.1)
            yield Reached(client, http, engine)
        finally:
            stop.set()
            with contextlib.suppress(BaseExceptionGroup):
                await done


async def test_every_generator_chats_and_its_stream_says_the_same(reached):
    for model in ("llama", "qwen"):
        asked = {"model": model, "messages": HELLO, "max_tokens": 12, "temperature": 0}
        whole = await reached.openai.chat.completions.create(**asked)
        stream = await reached.openai.chat.completions.create(**asked, stream=True)
        pieces = [piece async for piece in stream]
        assert whole.model == model
        assert whole.usage.completion_tokens == 12
        assert (
            "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole.choices[0].message.content
        )


async def test_operators_ask_a_model_for_what_vllms_server_can_do(
    reached: Reached, profiles: Path, adapter: str
) -> None:
    """Each by what comes of it; those that another model of the quickstart is asked for are in test_serve."""

    async def post(path: str, body: Any = None, **query: str) -> Any:
        answer = await reached.http.post(path, params=query, json=body)
        assert answer.status_code == 200, (path, answer.text)
        return answer

    async def paused(**query: str) -> Any:
        return (await reached.http.get("/is_paused", params=query)).json()["is_paused"]

    asked: Any = {"model": "llama", "messages": HELLO, "max_tokens": 8}
    await post("/pause", model="llama")
    waiting = asyncio.create_task(reached.openai.chat.completions.create(**asked))
    assert [await paused(model="llama"), await paused(model="qwen"), await paused()] == [True, False, False]
    assert not waiting.done()
    await post("/resume", model="llama")
    assert (await waiting).usage.completion_tokens == 8
    assert not await paused(model="llama")

    for model, code, said in (("llama", 500, "is not enabled"), ("qwen", 404, "qwen is not loaded")):
        await reached.engine.drop("qwen")
        refused = await reached.http.post("/start_profile", params={"model": model})
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (code, True), refused.text
    before = traces(profiles)
    await reached.engine.switch("lynx")
    await post("/start_profile", model="lynx")
    await reached.openai.chat.completions.create(**{**asked, "model": "lynx"})
    await post("/stop_profile", model="lynx")
    assert [b"aten::" in trace for name, trace in traces(profiles).items() if name not in before] == [True]

    await post("/v1/load_lora_adapter", {"lora_name": "asked", "lora_path": adapter, "model": "tuned"})
    said = (await reached.openai.chat.completions.create(**{**asked, "model": "asked"})).choices[0].message.content
    base = (await reached.openai.chat.completions.create(**{**asked, "model": "tuned"})).choices[0].message.content
    assert said != base
    await post("/v1/unload_lora_adapter", {"lora_name": "asked"})
    with pytest.raises(openai.NotFoundError):
        await reached.openai.chat.completions.create(**{**asked, "model": "asked"})

    for cache in ("mm", "encoder", "prefix"):
        await post(f"/reset_{cache}_cache", model="llama")
    assert (await post("/collective_rpc", {"method": "list_loras"}, model="tuned")).json()["results"]


async def test_models_are_listed_with_their_resolved_lengths_however_they_were_said(reached):
    said = {
        alias: spec.engine_args.get("max_model_len", "nothing") for alias, spec in reached.engine._models.models.items()
    }
    listed = {model["id"]: model["max_model_len"] for model in (await reached.http.get("/v1/models")).json()["data"]}
    wanted = {
        "llama": (4096, 4096),
        "qwen": ("nothing", 4096),
        "lynx": (None, 4096),
        "caller": ("4K", 4096),
        "judge": (256, 256),
    }
    assert {alias: (said[alias], listed[alias]) for alias in wanted} == wanted


async def test_completions_with_logprobs_and_several_choices(reached):
    answer = await reached.openai.completions.create(
        model="llama", prompt="The sea", max_tokens=4, n=2, logprobs=2, seed=7
    )
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.token_logprobs) == 4


async def test_embeddings_come_from_their_own_model_in_the_clients_format(reached):
    floats = await reached.openai.embeddings.create(model="minilm", input=["hello", "sea"], encoding_format="float")
    packed = await reached.openai.embeddings.create(model="minilm", input=["hello", "sea"])
    assert len(floats.data) == 2
    assert packed.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-6)
    raw = await reached.http.post(
        "/v1/embeddings", json={"model": "minilm", "input": "hello", "encoding_format": "bytes_only"}
    )
    assert len(raw.content) == 4 * len(floats.data[0].embedding)


async def test_responses_answer_whole_and_as_a_stream(reached):
    asked = {"model": "llama", "input": "Where do you walk?", "max_output_tokens": 8, "temperature": 0}
    whole = await reached.openai.responses.create(**asked)
    async with reached.openai.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert whole.output_text == final.output_text
    assert events[0].type == "response.created"


async def test_an_answer_can_be_held_to_a_schema(reached):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = await reached.openai.chat.completions.create(
        model="llama",
        messages=HELLO,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert "".join(answer.choices[0].message.content.split()) in {'{"a":1}', '{"a":2}'}


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "lama"}, openai.NotFoundError),
        ({"model": "minilm"}, openai.NotFoundError),
        ({"messages": [{"role": "user", "content": "sea " * 5000}]}, openai.BadRequestError),
    ],
)
async def test_errors_are_the_servers_own(reached, more, error):
    with pytest.raises(error) as caught:
        await reached.openai.chat.completions.create(**({"model": "llama", "messages": HELLO} | more))
    assert caught.value.body["code"] == caught.value.status_code


async def test_tokens_there_and_back(reached):
    there = (await reached.http.post("/tokenize", json={"model": "qwen", "prompt": "the sea"})).json()
    back = (await reached.http.post("/detokenize", json={"model": "qwen", "tokens": there["tokens"]})).json()
    assert "the sea" in back["prompt"]


async def test_a_switch_in_the_middle_of_a_stream_freezes_it_and_nothing_is_lost(reached):
    asked = {"model": "llama", "messages": HELLO, "max_tokens": 60, "temperature": 0}
    whole = await reached.openai.chat.completions.create(**asked)
    stream = await reached.openai.chat.completions.create(**asked, stream=True)
    text = ""
    async for piece in stream:
        if not text:
            switched = await reached.http.post("/v1/models/switch", json={"model": "qwen", "mode": "keep"})
            assert switched.json()["current_model"] == "qwen"
            back = await reached.http.post("/v1/models/switch", json={"model": "llama", "mode": "keep"})
            assert back.json()["switched"] is True
        text += piece.choices[0].delta.content or "" if piece.choices else ""
    assert text == whole.choices[0].message.content


async def test_a_client_that_goes_away_frees_the_engine(reached):
    before = generated(reached.engine, "llama")
    asked = {"model": "llama", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with reached.http.stream("POST", "/v1/completions", json=asked) as answer:
        await anext(answer.aiter_lines())
    async with asyncio.timeout(PATIENCE_S):
        while any(info.unfinished for info in reached.engine.contexts()):
            await reached.http.get("/health")
    assert 0 < generated(reached.engine, "llama") - before < 4000, "it was ended, and did not end by itself"
