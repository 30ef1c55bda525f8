"""Anthropic's own client against a worker's HTTP server: messages, their streams, their errors and their keys."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from tests.support.fake_engine import BROKEN, FakeEngine

USER: Any = [{"role": "user", "content": "hello"}]
PATHS = ("/v1/messages", "/v1/messages/count_tokens")


@asynccontextmanager
async def client_of(s: Any, **given: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client, as it is."""
    given = {"api_key": "none", **given}
    async with anthropic.AsyncAnthropic(base_url=str(s.http.base_url), max_retries=0, timeout=20, **given) as client:
        yield client


def body(model: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": USER, "max_tokens": 2, **more}


async def test_anthropics_client_asks_every_alias_and_counts_tokens(served):
    async with served() as s, client_of(s) as client:
        for model in ("llama", "qwen"):
            message = await client.messages.create(model=model, messages=USER, max_tokens=3)
            assert message.content[0].text == f"{model}0 {model}1 {model}2 "
            assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)
            counted = await client.messages.count_tokens(model=model, messages=USER)
            assert counted.input_tokens == message.usage.input_tokens == 1


async def test_a_stream_has_anthropics_events_and_no_end_mark(served):
    async with served() as s, client_of(s) as client:
        answer = await s.http.post("/v1/messages?beta=true", json=body(stream=True))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, end = answer.text.split("\n\n")
        assert end == ""
        names = [event.split("\n")[0].removeprefix("event: ") for event in events]
        said = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
        assert names == [event["type"] for event in said]
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        async with client.messages.stream(**body(max_tokens=20)) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            assert (await stream.get_final_message()).content[0].text == text
        assert text == "".join(f"llama{i} " for i in range(20))


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_stream_whose_model_must_leave_the_memory_goes_on_or_is_broken(served, forgets):
    async with served(engine=FakeEngine(step_s=0.001)) as s, client_of(s) as client:
        s.engine.forgets = forgets
        text = ""
        async with client.messages.stream(**body(max_tokens=200)) as stream:
            pieces = aiter(stream.text_stream)
            text += await anext(pieces)
            s.engine.hand_back("llama")
            if forgets:
                with pytest.raises(anthropic.APIStatusError, match="interrupted"):
                    text += "".join([piece async for piece in pieces])
                return
            text += "".join([piece async for piece in pieces])
        assert text == "".join(f"llama{i} " for i in range(200))
        assert s.engine.steps == 200


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"model": "lama"}, anthropic.NotFoundError),
        ({"max_tokens": "many"}, anthropic.BadRequestError),
        ({"messages": "none"}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": BROKEN}]}, anthropic.InternalServerError),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, anthropic.RequestTooLargeError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_typed_by_anthropics_client(served, more, error, stream):
    async with served(max_request_bytes=4000, retry_backoff_s=0.001) as s, client_of(s) as client:
        with pytest.raises(error) as caught:
            await client.messages.create(**body(**more), stream=stream)
        found = caught.value.body
        assert found.keys() == {"type", "error"}
        assert (found["type"], found["error"].keys()) == ("error", {"type", "message"})


@pytest.mark.parametrize("path", PATHS)
async def test_every_refusal_has_anthropics_shape_on_these_paths_alone(served, tmp_path, path):
    (keys := tmp_path / "keys").write_text("asks\nlooks look\n")
    async with served(api_keys_file=keys) as s:
        asks = {"x-api-key": "asks", "content-type": "application/json"}
        refused = [
            await s.http.post(path, json=body(), headers={"authorization": ""}),
            await s.http.post(path, json=body(), headers={"x-api-key": "nobody"}),
            await s.http.post(path, json=body(), headers={"x-api-key": "looks"}),
            await s.http.get(path, headers=asks),
            await s.http.post(path, content=b"{", headers=asks),
            await s.http.post(path, content=b"{}", headers={**asks, "content-type": "text/plain"}),
            await s.http.post(path, json=body(), headers={**asks, "filler": "x" * 100_000}),
        ]
        assert [answer.status_code for answer in refused] == [401, 401, 403, 405, 400, 400, 431]
        for answer in refused:
            assert answer.json()["type"] == "error"
            assert answer.json()["error"].keys() == {"type", "message"}
            assert int(answer.headers["content-length"]) == len(answer.content)
        elsewhere = await s.http.post("/v1/chat/completions", json={"model": "lama", "messages": USER}, headers=asks)
        assert elsewhere.json().keys() == {"error"}
        assert elsewhere.json()["error"]["code"] == 404


async def test_a_key_comes_as_either_client_sends_it(served, tmp_path):
    (keys := tmp_path / "keys").write_text("secret\n")
    async with served(api_keys_file=keys) as s:
        for given in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            async with client_of(s, **given) as client:
                assert (await client.messages.create(**body())).model == "llama"
        for header in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            for path in ("/v1/messages", "/v1/chat/completions"):
                assert (await s.http.post(path, json=body(), headers=header)).status_code == 200
        wrong = {"authorization": "Bearer another", "x-api-key": "secret"}
        assert (await s.http.post("/v1/messages", json=body(), headers=wrong)).status_code == 401


async def test_a_message_is_counted_as_any_other_answer(served):
    async with served() as s:
        await s.http.post("/v1/messages", json=body(max_tokens=7))
        metrics = (await s.http.get("/metrics")).text
        assert 'gearshift_tokens_total{kind="completion",model="llama"} 7.0' in metrics
        assert 'gearshift_tokens_total{kind="prompt",model="llama"} 1.0' in metrics
