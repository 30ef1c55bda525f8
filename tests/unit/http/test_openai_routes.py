"""OpenAI's own client against a worker's HTTP server."""

import asyncio
import base64
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from schemas.control import Reload
from schemas.objectives import Objective
from schemas.progress import Progress
from schemas.requests import Endpoint
from service.errors import EngineRefused
from service.models_file import ModelsFile, ModelSpec
from service.ports import Answer, Call, ChunkSink
from tests.support.fake_engine import BROKEN, FakeEngine
from tests.support.waiting import PATIENCE_S

HELLO: Any = [{"role": "user", "content": "hello"}]


class Listener(FakeEngine):
    """Also answers what has no words, and keeps what it was asked."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.calls: list[Call] = []

    async def answer(self, call: Call, on_chunk: ChunkSink | None = None, progress: Progress | None = None) -> Answer:
        self.calls.append(call)
        if call.endpoint is Endpoint.EMBEDDINGS:
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            return Answer(200, {"object": "list", "model": call.alias, "data": data, "usage": usage})
        if call.endpoint is Endpoint.TRANSCRIPTIONS:
            return Answer(200, {"text": base64.b64decode(call.body["file"]).decode()})
        if call.endpoint is Endpoint.POOLING:
            body = {"content_type": "application/octet-stream", "metadata": {"model": "モデル"}, "data_base64": "AAEC"}
            return Answer(200, body)
        if call.endpoint is Endpoint.RESPONSES and on_chunk is not None:
            await on_chunk({"type": "response.created", "sequence_number": 0})
            await on_chunk({"type": "response.completed", "response": {"id": "r"}, "sequence_number": 1})
            return Answer(200, {"id": "r"})
        return await super().answer(call, on_chunk, progress)


async def test_the_openai_client_chats_with_every_alias(served):
    async with served() as s:
        for model in ("llama", "qwen"):
            answer = await s.openai.chat.completions.create(model=model, messages=HELLO, max_tokens=3)
            assert answer.choices[0].message.content == f"{model}0 {model}1 {model}2 "
            assert answer.choices[0].finish_reason == "length"


class Choosy(FakeEngine):
    """Takes no file until it is told to."""

    takes = False

    async def reload(self, models: ModelsFile) -> Mapping[str, str]:
        if not self.takes:
            raise EngineRefused("the device has no room for them")
        return await super().reload(models)


async def test_what_a_model_is_made_of_is_told_by_the_file_that_the_engine_took(served):
    engine, roots = Choosy(), iter(("before", "refused", "after"))

    def read() -> ModelsFile:
        root = next(roots)
        models = {alias: ModelSpec(alias=alias, engine_args={"model": root}) for alias in engine.aliases}
        return ModelsFile(path=Path("models.yaml"), default_model="llama", models=models)

    async def roots_after_reload() -> set[str]:
        await s.server.commands.ask(s.server.worker, Reload(id=f"{engine.takes}"))
        return {card["root"] for card in (await s.http.get("/v1/models")).json()["data"]}

    async with served(engine=engine, read_models=read) as s:
        assert await roots_after_reload() == {"before"}
        engine.takes = True
        assert await roots_after_reload() == {"after"}


async def test_the_openai_client_completes(served):
    async with served() as s:
        answer = await s.openai.completions.create(model="qwen", prompt="The sea", max_tokens=2)
        assert answer.choices[0].text == "qwen0 qwen1 "


async def test_the_openai_client_streams_and_the_pieces_are_the_whole(served):
    async with served(engine=FakeEngine(step_s=0.001)) as s:
        stream = await s.openai.chat.completions.create(model="qwen", messages=HELLO, max_tokens=20, stream=True)
        pieces = [piece async for piece in stream]
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == "".join(f"qwen{i} " for i in range(20))
        assert pieces[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_stream_whose_model_must_leave_the_memory_goes_on_or_is_broken(served, forgets):
    async with served(engine=FakeEngine(step_s=0.001)) as s:
        s.engine.forgets = forgets
        stream = await s.openai.completions.create(model="llama", prompt="x", max_tokens=200, stream=True)
        pieces = [await anext(stream)]
        s.engine.hand_back("llama")
        if forgets:
            with pytest.raises(openai.APIError, match="interrupted"):
                pieces += [piece async for piece in stream]
        else:
            pieces += [piece async for piece in stream]
        said = [piece.choices[0].text for piece in pieces]
        assert said == [f"llama{i} " for i in range(len(pieces))][:200] + ([] if forgets else [""])
        assert forgets or s.engine.steps == 200


@pytest.mark.parametrize("named", [{}, {"model": ""}, {"model": None}])
async def test_a_body_that_names_no_model_means_the_active_one(served, named):
    async with served(dev_mode=True) as s:
        for model in ("llama", "qwen"):
            await s.http.post("/v1/models/switch", json={"model": model})
            answer = await s.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, **named})
            assert answer.json()["model"] == model


async def test_a_stream_that_fails_before_its_first_piece_is_an_error_and_no_stream(served):
    async with served() as s:
        with pytest.raises(openai.BadRequestError):
            await s.openai.chat.completions.create(
                model="llama", messages=HELLO, stream=True, extra_body={"max_tokens": "many"}
            )


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_must_be_called_json_for_browsers_send_anything_else_to_anyone(served, kind):
    async with served() as s:
        body = json.dumps({"model": "llama", "prompt": "hi", "max_tokens": 1})
        answer = await s.http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == 400
        assert "Only 'application/json' is allowed" in answer.json()["error"]["message"]
        fine = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await s.http.post("/v1/completions", content=body, headers=fine)).status_code == 200


async def test_a_stream_has_the_framing_of_the_server(served):
    async with served() as s:
        body = {"model": "llama", "messages": HELLO, "max_tokens": 2, "stream": True}
        answer = await s.http.post("/v1/chat/completions", json=body)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        for event in events[:-2]:
            assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


async def test_a_stream_of_responses_names_its_events_and_has_no_end_mark(served):
    async with served(engine=Listener()) as s:
        answer = await s.http.post("/v1/responses", json={"model": "llama", "input": "x", "stream": True})
        first, second, end = answer.text.split("\n\n")
        assert first.splitlines()[0] == "event: response.created"
        assert second.splitlines()[0] == "event: response.completed"
        assert json.loads(second.splitlines()[1].removeprefix("data: "))["response"] == {"id": "r"}
        assert end == ""


async def test_embeddings_go_through_as_they_are(served):
    async with served(engine=Listener()) as s:
        answer = await s.openai.embeddings.create(model="llama", input="hi", encoding_format="float")
        assert answer.data[0].embedding == [0.5, -0.25]
        assert s.engine.calls[0].body == {"model": "llama", "input": "hi", "encoding_format": "float"}


@pytest.mark.parametrize(("charset", "value"), [("undefined", b"llama"), ("unicode_escape", rb"\ud800")])
async def test_a_form_in_words_that_can_not_be_read_is_refused(served, charset, value):
    head = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n'
    async with served() as s:
        answer = await s.http.post(
            "/v1/audio/transcriptions",
            content=head + value + b"\r\n--b--\r\n",
            headers={"content-type": f"multipart/form-data; boundary=b; charset={charset}"},
        )
        assert answer.status_code == 400, answer.text
        assert charset in answer.json()["error"]["message"]


async def test_a_recording_is_uploaded_as_a_form(served):
    async with served(engine=Listener()) as s:
        answer = await s.openai.audio.transcriptions.create(
            model="llama", file=("a.wav", b"some sound"), timestamp_granularities=["word"]
        )
        assert answer.text == "some sound"
        assert s.engine.calls[0].body["timestamp_granularities"] == ["word"]
        for word in ("true", "maybe"):
            form = {"model": "llama", "stream": word}
            await s.http.post("/v1/audio/transcriptions", data=form, files={"file": b"some sound"})
        assert [call.body["stream"] for call in s.engine.calls[1:]] == [True, "maybe"]


async def test_a_recording_that_is_too_large_is_told_how_many_bytes_it_may_have(served):
    """As base64 it is a third more than what was sent, and that is what must fit."""
    most = r"a recording may have at most (\d+) bytes here: as base64 .* max_request_bytes \(10000\)"
    async with served(engine=Listener(), max_request_bytes=10_000) as s:
        ask = s.openai.audio.transcriptions.create
        for size in (7600, 20_000):  # the second is too large even as it comes
            with pytest.raises(openai.APIStatusError, match=most) as caught:
                await ask(model="llama", file=("a.wav", b"x" * size))
            assert caught.value.status_code == 413
            assert caught.value.param == "file"
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(model="llama", file=("a.wav", b"x" * 8000), prompt="y" * 1000)
        told = int(re.search(most, str(caught.value))[1])
        assert 0 < told < 7000
        assert (await ask(model="llama", file=("a.wav", b"x" * told), prompt="y" * 1000)).text == "x" * told
        with pytest.raises(openai.APIStatusError, match=f"at most {told} bytes"):
            await ask(model="llama", file=("a.wav", b"x" * (told + 3)), prompt="y" * 1000)
        assert len(s.engine.calls) == 1


async def test_an_answer_in_bytes_comes_as_bytes(served):
    async with served(engine=Listener()) as s:
        answer = await s.http.post("/pooling", json={"model": "llama", "input": "x"})
        assert answer.content == b"\x00\x01\x02"
        assert json.loads(answer.headers["metadata"]) == {"model": "モデル"}


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank", "/v2/rerank", "/score", "/rerank"])
async def test_an_endpoint_is_found_under_each_of_its_paths(served, path):
    async with served(engine=Listener()) as s:
        answer = await s.http.post(path, json={"model": "llama"})
        assert answer.json()["error"]["message"].startswith("The model does not support")
        assert str(s.engine.calls[0].endpoint).endswith(path.rsplit("/", 1)[1])


@pytest.mark.parametrize(
    ("model", "more", "error", "status"),
    [
        ("lama", {}, openai.NotFoundError, 404),
        ("llama", {"max_tokens": "many"}, openai.BadRequestError, 400),
        ("llama", {"messages": "none"}, openai.BadRequestError, 400),
    ],
)
async def test_errors_are_typed_by_the_openai_client(served, model, more, error, status):
    async with served() as s:
        with pytest.raises(error) as caught:
            await s.openai.chat.completions.create(**({"model": model, "messages": HELLO} | more))
        assert caught.value.status_code == status
        assert caught.value.body["code"] == status
        assert caught.value.body["message"]


async def test_what_is_no_json_and_what_is_too_large_is_refused(served):
    async with served(max_request_bytes=1000) as s:
        named = {"content-type": "application/json"}
        broken = await s.http.post("/v1/completions", content=b"{", headers=named)
        large = await s.http.post("/v1/completions", json={"model": "llama", "prompt": "x" * 2000})
        chunked = await s.http.post("/v1/completions", content=_pieces(b"x" * 600, 3), headers=named)
        assert [answer.status_code for answer in (broken, large, chunked)] == [400, 413, 413]
        assert all(answer.json()["error"]["message"] for answer in (broken, large, chunked))


async def _pieces(piece: bytes, count: int):
    for _ in range(count):
        yield piece


async def test_what_is_not_there_is_answered_with_an_error_object(served):
    async with served() as s:
        assert (await s.http.get("/v1/nothing")).json()["error"]["code"] == 404
        assert (await s.http.get("/v1/completions")).json()["error"]["code"] == 405


async def test_realtime_is_refused_by_name_also_where_a_websocket_is_asked_for(served):
    async with served() as s:
        websocket = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        for headers in ({}, websocket):
            answer = await s.http.get("/v1/realtime", headers=headers)
            assert answer.status_code == 501
            assert "/v1/realtime is not served" in answer.json()["error"]["message"]


async def test_a_server_error_is_answered_as_such_after_the_retries(served):
    async with served(retry_backoff_s=0.001) as s:
        with pytest.raises(openai.InternalServerError):
            await s.openai.completions.create(model="llama", prompt=BROKEN)


async def test_a_deadline_in_a_header_ends_the_request(served):
    async with served(engine=FakeEngine(step_s=0.005)) as s:
        body = {"model": "llama", "prompt": "x", "max_tokens": 100_000}
        answer = await s.http.post("/v1/completions", json=body, headers={"ttl": "0.2"})
        assert answer.status_code == 408
        absolute = {"X-Gearshift-Deadline": str(time.time() - 1)}
        assert (await s.http.post("/v1/completions", json=body, headers=absolute)).status_code == 408


async def test_headers_give_priority_trace_and_tenant_and_a_browsers_priority_is_none(served):
    async with served(engine=Listener()) as s:
        body = {"model": "llama", "prompt": "x", "max_tokens": 1}
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await s.http.post("/v1/completions", json=body, headers={"priority": "-3", "traceparent": trace})
        browsers = ("u=1, i", "i", "u=0", "i, u=2", "i=?0")
        for priority in browsers:
            answer = await s.http.post("/v1/completions", json=body, headers={"priority": priority})
            assert answer.status_code == 200, answer.text
        first, *others = s.engine.calls
        assert (first.priority, first.trace_headers) == (-3, {"traceparent": trace})
        assert [call.priority for call in others] == [0] * len(browsers)
        wrong = await s.http.post("/v1/completions", json=body, headers={"priority": "high"})
        assert (wrong.status_code, "must be a number" in wrong.text) == (400, True)


async def test_with_keys_a_tenant_is_the_key_s_and_no_header_s(served, tmp_path):
    (keys := tmp_path / "keys").write_text("acmes tenant=acme\nothers tenant=other\nnobodys\n")
    body = {"model": "llama", "prompt": "x", "max_tokens": 1}

    async def salts(s, *asked: tuple[str | None, str | None]) -> list[str | None]:
        """What keeps the prefix cache of each (key, header) apart."""
        for key, tenant in asked:
            given = {"authorization": f"Bearer {key}" if key else None, "tenant": tenant}
            headers = {name: value for name, value in given.items() if value is not None}
            assert (await s.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        return [call.body.get("cache_salt") for call in s.engine.calls]

    async with served(engine=Listener(), api_keys_file=keys) as s:
        asked = [("acmes", None), ("acmes", "other"), ("others", "other"), ("nobodys", "acme"), ("nobodys", None)]
        acme, still_acme, other, claims_acme, nobody = await salts(s, *asked)
        assert acme
        assert (still_acme, claims_acme, nobody) == (acme, None, None)
        assert other not in {acme, None}
    async with served(engine=Listener()) as s:
        says_acme, nobody = await salts(s, (None, "acme"), (None, None))
        assert (says_acme is not None, nobody) == (True, None)


async def test_a_client_that_goes_away_ends_what_it_asked_for(served):
    async with served(engine=FakeEngine(step_s=0.001)) as s:
        body = {"model": "llama", "prompt": "x", "max_tokens": 1_000_000, "stream": True}
        async with s.http.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            assert sum(info.unfinished for info in s.engine.contexts()) == 1
        async with asyncio.timeout(PATIENCE_S):
            while sum(info.unfinished for info in s.engine.contexts()) or len(s.server.bus):
                await s.http.get("/health")


async def test_a_request_that_waits_behind_others_is_given_up_with_its_client(served):
    async with served(engine=FakeEngine(step_s=0.001), max_running=1) as s:
        long = {"model": "llama", "prompt": "x", "max_tokens": 1_000_000}
        first = asyncio.create_task(s.http.post("/v1/completions", json=long))
        second = asyncio.create_task(s.http.post("/v1/completions", json={**long, "model": "qwen"}))
        await _until(s, lambda: len(s.server.bus) == 2)
        for task in (first, second):
            task.cancel()
        await _until(s, lambda: len(s.server.bus) == 0)
        answer = await s.openai.completions.create(model="llama", prompt="x", max_tokens=1)
        assert answer.choices[0].text == "llama0 "


async def test_too_many_at_once_are_told_to_come_back(served):
    async with served(engine=FakeEngine(step_s=0.001), max_running=1, max_waiting=1) as s:
        for _ in range(3):
            await s.openai.completions.create(model="llama", prompt="x", max_tokens=200)
        long = {"model": "llama", "prompt": "x", "max_tokens": 1_000_000}
        waiting = [asyncio.create_task(s.http.post("/v1/completions", json=long)) for _ in range(2)]
        await _until(s, lambda: len(s.server.bus) == 2)
        answer = await s.http.post("/v1/completions", json=long)
        assert answer.status_code == 429
        assert 500 < int(answer.headers["retry-after"]) < 20_000, "a token takes a millisecond or a few"
        for task in waiting:
            task.cancel()


async def test_stopping_finishes_what_runs_and_sends_away_what_waits(served):
    async with served(engine=FakeEngine(step_s=0.001), max_running=1) as s:
        running = asyncio.create_task(s.http.post("/v1/completions", json=_prompt("llama", 300)))
        await _until(s, lambda: sum(info.unfinished for info in s.engine.contexts()))
        waiting = asyncio.create_task(s.http.post("/v1/completions", json=_prompt("llama", 1)))
        await _until(s, lambda: len(s.server.bus) == 2)
        s.stop.set()
        assert (await waiting).status_code == 503
        answer = await running
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 300)
        await s.done


async def test_what_is_too_slow_for_the_stop_is_answered_all_the_same(served):
    async with served(engine=FakeEngine(step_s=0.001), shutdown_timeout_s=0.1) as s:
        running = asyncio.create_task(s.http.post("/v1/completions", json=_prompt("llama", 1_000_000)))
        await _until(s, lambda: sum(info.unfinished for info in s.engine.contexts()))
        s.stop.set()
        assert (await running).status_code == 503
        await s.done


async def test_when_the_engine_dies_everyone_is_answered(served):
    async with served(engine=FakeEngine(step_s=0.001)) as s:
        running = asyncio.create_task(s.http.post("/v1/completions", json=_prompt("llama", 1_000_000)))
        await _until(s, lambda: sum(info.unfinished for info in s.engine.contexts()))
        s.engine.kill("a test")
        assert (await running).status_code == 503
        with pytest.raises(BaseExceptionGroup):
            await s.done


async def test_many_at_once_are_each_answered_by_their_own_model(served):
    async with served(engine=FakeEngine(aliases=("llama", "qwen", "phi"))) as s:
        models = [("llama", "qwen", "phi")[i % 3] for i in range(300)]
        gate = asyncio.Semaphore(100)

        async def ask(model: str) -> str:
            async with gate:
                answer = await s.http.post("/v1/completions", json=_prompt(model, 2))
            return str(answer.json()["choices"][0]["text"])

        texts = await asyncio.gather(*(ask(model) for model in models))
        assert texts == [f"{model}0 {model}1 " for model in models]


def _prompt(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "x", "max_tokens": tokens}


async def _until(s: Any, true: Any) -> None:
    """Ask for the health, a turn of everything, until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await s.http.get("/health")


async def test_an_answer_says_whether_its_objective_was_met_and_an_error_why_not(served):
    async with served(engine=FakeEngine(step_s=0.001), objective=Objective(ttft_s=30, tpot_s=30)) as s:
        body = {"model": "llama", "messages": HELLO, "max_tokens": 3}
        met = await s.http.post("/v1/chat/completions", json=body)
        assert (met.status_code, met.headers["x-gearshift-objective"]) == (200, "met")
        late = await s.http.post("/v1/chat/completions", json={**body, "max_tokens": 1_000_000}, headers={"ttl": "2"})
        assert (late.status_code, late.headers["x-gearshift-objective"]) == (408, "missed; by=decode")
        wrong = await s.http.post("/v1/chat/completions", json=body, headers={"x-gearshift-ttft": "soon"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "ttft")
        assert "x-gearshift-objective" not in wrong.headers


async def test_without_an_objective_nothing_is_said_of_one(served):
    async with served() as s:
        answer = await s.http.post("/v1/completions", json={"model": "llama", "prompt": "x", "max_tokens": 3})
        assert "x-gearshift-objective" not in answer.headers
