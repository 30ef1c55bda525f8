"""What vLLM's own handlers answer when they are called without its server."""

import asyncio
import base64
import json
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from schemas.requests import Endpoint
from service.ports import Answer, Call
from tests.support.engine_spec import ENDLESS, chat, completion, delta, running, text, until
from tests.support.forced import CALLED, NAMED, WEATHER, calls
from tests.support.greedy import in_core

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def call(endpoint: Endpoint, alias: str = "llama", **body: Any) -> Call:
    return Call(id=uuid.uuid4().hex, alias=alias, endpoint=endpoint, body={"model": alias, **body})


def response(**options: Any) -> Call:
    return call(Endpoint.RESPONSES, input="Who are you?", max_output_tokens=24, temperature=0, **options)


def comparable(answer: Answer) -> dict[str, Any]:
    """A body without what differs from run to run: ids and times."""
    body = json.loads(json.dumps(answer.body))
    for name in ("id", "created", "created_at", "completed_at"):
        body.pop(name, None)
    for item in body.get("output", ()):
        item.pop("id", None)
    for choice in body.get("choices", ()):
        for tool_call in choice.get("message", {}).get("tool_calls") or ():
            tool_call.pop("id", None)
    return body


# --- a stream's whole answer is the answer without a stream ---


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}
FREE = {"ignore_eos": False, "max_tokens": 400}
STREAMS: dict[str, tuple[Callable[..., Call], dict[str, Any]]] = {
    "chat": (chat, {}),
    "three samples": (chat, {"n": 3, "temperature": 1, "seed": 3}),
    "logprobs": (chat, {"logprobs": True, "top_logprobs": 2}),
    "stop words": (chat, {"stop": ["e", "o"]}),
    "stop words kept": (chat, {"stop": "e", "include_stop_str_in_output": True}),
    "token ids": (chat, {"return_token_ids": True}),
    "echo": (chat, {"echo": True}),
    "tools that the model does not call": (chat, {"tools": [WEATHER]}),
    "a tool that it must call": (chat, CALLED),
    "a tool by name": (chat, {**CALLED, "tool_choice": NAMED}),
    "a schema": (chat, {"response_format": SCHEMA_FORMAT, **FREE}),
    "beam search": (chat, {"use_beam_search": True, "n": 2, "max_tokens": 6}),
    "more tokens than there are": (chat, {"max_tokens": 100_000}),
    "completion": (completion, {}),
    "three completions": (completion, {"n": 3, "temperature": 1, "seed": 3}),
    "three prompts": (completion, {"prompt": ["One", "Two", "Three"]}),
    "token ids as a prompt": (completion, {"prompt": [5, 6, 7]}),
    "completion with logprobs": (completion, {"logprobs": 2}),
    "prompt and logprobs echoed": (completion, {"echo": True, "logprobs": 1}),
    "only the prompt echoed": (completion, {"echo": True, "max_tokens": 0}),
    "response": (response, {}),
    "response with logprobs": (response, {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}),
}


@pytest.mark.parametrize(("make", "options"), STREAMS.values(), ids=STREAMS)
async def test_the_whole_of_a_stream_equals_the_answer_without_one(
    engine: Any, make: Callable[..., Call], options: dict[str, Any]
) -> None:
    chunks: list[dict[str, Any]] = []

    async def sink(chunk: dict[str, Any]) -> None:
        chunks.append(chunk)

    plain = await engine.answer(make(**options))
    streamed = await engine.answer(make(stream=True, **options), sink)
    assert streamed.status == plain.status
    assert comparable(streamed) == comparable(plain)
    assert bool(chunks) == (plain.status == 200)
    if "tool_choice" in options:
        assert calls(plain.body) == ["weather"]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_tells_how_long_its_longest_sample_is(engine: Any, streams: bool) -> None:
    async def sink(_chunk: dict[str, Any]) -> None: ...

    three = {"n": 3, "temperature": 1, "seed": 5, "return_token_ids": True, "stop": ["a", "e"], "max_tokens": 200}
    answer = await engine.answer(chat(stream=streams, **three), sink)
    said = [len(choice["token_ids"]) for choice in answer.body["choices"]]
    assert len(set(said)) > 1
    assert (answer.longest, answer.body["usage"]["completion_tokens"]) == (max(said), sum(said))
    prompts = {"prompt": ["One", "Two"], "return_token_ids": True}
    assert (await engine.answer(completion(**prompts))).longest == 24
    assert (await engine.answer(chat(use_beam_search=True, n=2, max_tokens=6))).longest is None


async def test_usage_is_in_the_last_chunk_where_it_is_asked_for(engine: Any) -> None:
    chunks: list[dict[str, Any]] = []

    async def sink(chunk: dict[str, Any]) -> None:
        chunks.append(chunk)

    whole = await engine.answer(chat(stream=True, stream_options={"include_usage": True}), sink)
    assert chunks[-1]["usage"] == {name: count for name, count in whole.body["usage"].items() if count is not None}


async def test_what_ends_a_line_for_some_is_streamed_like_any_other_text(engine: Any) -> None:
    said, chunks = "one\u2028two\u2029three\u0085four", []

    async def sink(chunk: dict[str, Any]) -> None:
        chunks.append(chunk)

    answer = await engine.answer(completion(prompt=said, echo=True, stream=True), sink)
    assert text(answer).startswith(said)
    assert "".join(map(delta, chunks)) == text(answer)
    assert (await engine.answer(completion())).status == 200


# --- ending calls of every kind ---


SEVERAL = {
    "three samples": (chat, {"n": 3, "temperature": 1, "seed": 1}),
    "two prompts": (completion, {"prompt": ["One", "Two"]}),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("make", "options"), SEVERAL.values(), ids=SEVERAL)
async def test_all_parts_of_an_aborted_call_end_with_what_they_have(
    engine: Any, make: Callable[..., Call], options: dict[str, Any], streamed: bool
) -> None:
    async def sink(_chunk: dict[str, Any]) -> None: ...

    asked = make(stream=streamed, max_tokens=ENDLESS, **options)
    task = await running(engine, asked, tokens=12, **({"on_chunk": sink} if streamed else {}))
    had = engine.tokens(asked.id)
    await engine.abort(asked.id)
    answer = await task
    assert answer.aborted
    assert {choice["finish_reason"] for choice in answer.body["choices"]} == {"abort"}
    assert had <= answer.body["usage"]["completion_tokens"] < 2 * ENDLESS


async def test_an_aborted_response_has_its_text(engine: Any) -> None:
    asked = call(Endpoint.RESPONSES, input="Who are you?", max_output_tokens=ENDLESS, temperature=0, ignore_eos=True)
    task = await running(engine, asked)
    await engine.abort(asked.id)
    answer = await task
    assert answer.aborted
    assert answer.body["output"][0]["content"][0]["text"]
    assert answer.body["usage"]["output_tokens"] >= 8


async def test_an_aborted_beam_search_has_no_partial_answer(engine: Any) -> None:
    asked = chat(use_beam_search=True, n=2, max_tokens=ENDLESS)
    task = asyncio.create_task(engine.answer(asked))
    await until(lambda: engine.tokens(asked.id) > 0 or task.done())
    await engine.abort(asked.id)
    answer = await task
    assert (answer.status, answer.aborted) == (499, True)


# --- many at once ---


class StepCounter:
    """A statistics logger beside vLLM's own: how many steps the engine took, and with how many requests."""

    def __init__(self) -> None:
        self.steps = 0
        self.most = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None and iteration_stats is not None and iteration_stats.num_generation_tokens:
            self.steps += 1
            self.most = max(self.most, iteration_stats.num_generation_tokens)


async def test_64_requests_at_once_share_the_engines_steps(engine: Any) -> None:
    tokens = 32
    counter = StepCounter()

    async def all_there() -> bool:
        return bool((await in_core(engine.multi, "llama"))["unfinished"] == 64)

    loggers = engine.multi.context("llama").logger_manager.stat_loggers
    loggers.append(counter)
    try:
        await engine.switch("qwen")  # until all are there
        calls = [completion(prompt=f"{n}", max_tokens=tokens) for n in range(64)]
        asked = [asyncio.create_task(engine.answer(each)) for each in calls]
        await until(all_there)
        await engine.switch("llama")
        answers = await asyncio.gather(*asked)
    finally:
        loggers.remove(counter)
    assert all(answer.body["usage"]["completion_tokens"] == tokens for answer in answers)
    assert counter.most == 64
    assert counter.steps < 4 * tokens


# --- what the handlers can do ---


async def test_a_structured_answer_satisfies_its_schema(engine: Any) -> None:
    asked = chat(response_format=SCHEMA_FORMAT, **FREE)
    assert json.loads(text(await engine.answer(asked)))["ok"] in {True, False}


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"choice": ["left", "right"]}, "left|right"),
        ({"regex": "[0-9]{3}x"}, "[0-9]{3}x"),
        ({"grammar": 'root ::= "a" "b"'}, "ab"),
    ],
)
async def test_an_answer_keeps_to_its_constraint(engine: Any, constraint: dict[str, Any], expected: str) -> None:
    answer = await engine.answer(chat(structured_outputs=constraint, ignore_eos=False))
    assert re.fullmatch(expected, text(answer))


async def test_tools_need_their_parser(engine: Any) -> None:
    await engine.switch("qwen")
    answer = await engine.answer(chat("qwen", tools=[WEATHER], tool_choice="auto"))
    assert answer.status == 400
    assert "--tool-call-parser" in answer.body["error"]["message"]


async def test_an_embedding_model_answers_beside_generators(engine: Any) -> None:
    await engine.switch("minilm")
    one = await engine.answer(call(Endpoint.EMBEDDINGS, "minilm", input="a llama"))
    assert len(one.body["data"][0]["embedding"]) == 384
    both = await engine.answer(call(Endpoint.EMBEDDINGS, "minilm", input=["a llama", "a train"]))
    assert both.body["data"][0]["embedding"] == pytest.approx(one.body["data"][0]["embedding"], abs=1e-5)
    scored = await engine.answer(call(Endpoint.SCORE, "minilm", text_1="a llama", text_2=["a llama", "a train"]))
    same, other = (entry["score"] for entry in scored.body["data"])
    assert same > other
    ranked = await engine.answer(call(Endpoint.RERANK, "minilm", query="a llama", documents=["a train", "a llama"]))
    assert ranked.body["results"][0]["index"] == 1
    packed = await engine.answer(call(Endpoint.EMBEDDINGS, "minilm", input="a llama", encoding_format="bytes"))
    assert len(base64.b64decode(packed.body["data_base64"])) == 384 * 4


async def test_a_chat_is_not_for_an_embedding_model(engine: Any) -> None:
    await engine.switch("minilm")
    assert (await engine.answer(chat("minilm"))).status == 404


async def test_text_becomes_tokens_and_text_again(engine: Any) -> None:
    tokens = (await engine.answer(call(Endpoint.TOKENIZE, prompt="Hello, who are you?"))).body["tokens"]
    assert (await engine.answer(call(Endpoint.DETOKENIZE, tokens=tokens))).body["prompt"] == "Hello, who are you?"


# --- what strangers may not say ---


async def test_a_producers_request_id_stays_outside_of_the_engine(engine: Any) -> None:
    """Two requests with the same id are two requests: neither hears of the other."""
    one, two = chat(request_id="same"), chat(request_id="same", max_tokens=12)
    answers = await asyncio.gather(engine.answer(one), engine.answer(two))
    assert [answer.body["id"] for answer in answers] == [f"chatcmpl-{one.id}", f"chatcmpl-{two.id}"]
    assert [answer.body["usage"]["completion_tokens"] for answer in answers] == [24, 12]


@pytest.mark.parametrize(
    "body", [{"kv_transfer_params": {"do_remote_prefill": True}}, {"vllm_xargs": {"kv_transfer_params": "x"}}]
)
async def test_where_kv_caches_come_from_is_not_the_producers_to_say(engine: Any, body: dict[str, Any]) -> None:
    answer = await engine.answer(chat(**body))
    assert text(answer) == text(await engine.answer(chat()))


async def test_a_chunk_is_a_server_sent_event_without_its_framing(engine: Any) -> None:
    chunks: list[dict[str, Any]] = []

    async def sink(chunk: dict[str, Any]) -> None:
        chunks.append(chunk)

    await engine.answer(chat(stream=True), sink)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(map(delta, chunks))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
