"""The same question over the bus, over HTTP with OpenAI's client, and in Python: the same greedy answer from each."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deploy.local.models import CHAT_TEMPLATE
from schemas.requests import Endpoint
from service.ports import Call
from tests.support.doors import Doors, open_doors, with_models
from tests.support.engine_spec import same
from tests.support.models import question

pytestmark = [pytest.mark.engine, pytest.mark.broker, pytest.mark.long]

USER = [{"role": "user", "content": "Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"likes": {"enum": ["grass", "hay"]}, "old": {"type": "boolean"}},
    "required": ["likes", "old"],
    "additionalProperties": False,
}
VOLATILE = {"id", "created", "created_at", "completed_at", "request_id", "item_id"}
VLLMS = {
    "chat_template_kwargs",
    "return_token_ids",
    "structured_outputs",
    "prompt_logprobs",
    "priority",
    "include_stop_str_in_output",
}
"""Fields that OpenAI's client has no parameters for."""
CHAT, TEXT, ANSWER = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES
Body = dict[str, Any]


def chat(model: str, **more: Any) -> tuple[Endpoint, Body]:
    return CHAT, {"model": model, "messages": USER, "max_tokens": 24, "temperature": 0, **more}


def complete(model: str, **more: Any) -> tuple[Endpoint, Body]:
    return TEXT, {"model": model, "prompt": "The sea", "max_tokens": 24, "temperature": 0, **more}


def respond(model: str, **more: Any) -> tuple[Endpoint, Body]:
    return ANSWER, {"model": model, "input": "Who are you?", "max_output_tokens": 24, "temperature": 0, **more}


def ask(endpoint: Endpoint, model: str, **more: Any) -> tuple[Endpoint, Body]:
    return endpoint, {"model": model, **more}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "likes", "schema": SCHEMA}}
WHOLE: dict[str, tuple[Endpoint, Body]] = {
    "chat": chat("llama"),
    "chat with another model": chat("qwen"),
    "chat with logprobs": chat("llama", logprobs=True, top_logprobs=2),
    "chat of three": chat("lynx", n=3, seed=7, temperature=0.7),
    "structured": chat("llama", max_tokens=200, response_format=FORMAT),
    "regex": chat("llama", structured_outputs={"regex": "(grass|hay) [0-9]{2}"}),
    "grammar": chat("llama", structured_outputs={"grammar": 'root ::= "grass" | "hay"'}),
    "choice": chat("llama", structured_outputs={"choice": ["grass", "hay"]}),
    "tool called": chat(
        "caller", max_tokens=120, messages=[{"role": "user", "content": question("Oslo")}], tools=[TOOL]
    ),
    "reasoning": chat("caller", max_tokens=120, messages=[{"role": "user", "content": question("Lima")}]),
    "prompt logprobs": chat("qwen", prompt_logprobs=1, priority=1),
    "stopped": chat("llama", stop=["a"], include_stop_str_in_output=True),
    "completion": complete("qwen"),
    "completion echoed": complete("lynx", echo=True, logprobs=1),
    "response": respond("llama"),
    "embeddings": ask(Endpoint.EMBEDDINGS, "minilm", input=["a llama", "a train"], encoding_format="float"),
    "score": ask(Endpoint.SCORE, "minilm", text_1="a llama", text_2=["a llama", "a train"]),
    "rerank": ask(Endpoint.RERANK, "judge", query="a llama", documents=["a train", "a llama"]),
    "classify": ask(Endpoint.CLASSIFY, "judge", input=["a llama", "a train"]),
    "pooling": ask(Endpoint.POOLING, "minilm", input="a llama"),
    "tokenize": ask(Endpoint.TOKENIZE, "qwen", prompt="the sea"),
    "detokenize": ask(Endpoint.DETOKENIZE, "qwen", tokens=[70, 71, 72]),
}
STREAMED: dict[str, tuple[Endpoint, Body]] = {
    "chat": chat("llama"),
    "completion": complete("qwen"),
    "response": respond("lynx"),
}


@pytest.fixture(scope="module")
async def doors(vllm_engine: Any, broker: Any) -> AsyncIterator[Doors]:
    async with open_doors(vllm_engine, broker.bootstrap) as opened:
        yield opened


def comparable(value: Any) -> Any:
    """A body without ids and times."""
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if name not in VOLATILE}
    return [comparable(part) for part in value] if isinstance(value, list) else value


async def by_bus(doors: Doors, endpoint: Endpoint, body: Body) -> Any:
    result = await doors.bus.result(await doors.bus.submit(body, endpoint=endpoint))
    assert result.status == 200, result.error
    return comparable(result.body)


async def by_http(doors: Doors, endpoint: Endpoint, body: Body) -> Any:
    """With OpenAI's client for what it knows; vLLM's own fields go through it as they are."""
    body = {**body, "extra_body": {name: body[name] for name in VLLMS & body.keys()}}
    for name in VLLMS:
        body.pop(name, None)
    known = {
        CHAT: doors.openai.chat.completions.create,
        TEXT: doors.openai.completions.create,
        ANSWER: doors.openai.responses.create,
        Endpoint.EMBEDDINGS: doors.openai.embeddings.create,
    }
    if endpoint in known:
        return comparable((await known[endpoint](**body)).model_dump(mode="json", exclude_unset=True))
    answer = await doors.http.post(endpoint, json={**body, **body.pop("extra_body")})
    assert answer.status_code == 200, answer.text
    return comparable(answer.json())


async def in_python(doors: Doors, endpoint: Endpoint, body: Body) -> Any:
    await doors.bus.switch(body["model"], hold=60)
    call = Call(id=uuid.uuid4().hex, alias=body["model"], endpoint=endpoint, body=body)
    answer = await doors.engine.answer(call)
    await doors.bus.switch(body["model"], hold=0)
    assert answer.status == 200, answer.body
    return comparable(answer.body)


@pytest.mark.parametrize(("endpoint", "body"), WHOLE.values(), ids=WHOLE)
async def test_each_door_gives_the_same_answer(doors: Doors, endpoint: Endpoint, body: Body) -> None:
    first, *others = [await way(doors, endpoint, body) for way in (by_bus, by_http, in_python)]
    assert [other for other in others if not same(first, other)] == [], first


def told(events: list[Body]) -> str:
    """The text of a stream's events, of any endpoint."""
    found = []
    for event in events:
        if event.get("type") == "response.output_text.delta":
            found.append(event["delta"])
        choices = event.get("choices", ())
        found += [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    return "".join(found)


@pytest.mark.parametrize(("endpoint", "body"), STREAMED.values(), ids=STREAMED)
async def test_a_stream_says_the_same_at_each_door_and_the_same_as_the_whole(
    doors: Doors, endpoint: Endpoint, body: Body
) -> None:
    chunks: list[Body] = []

    async def sink(chunk: Body) -> None:
        chunks.append(chunk)

    create = {
        CHAT: doors.openai.chat.completions.create,
        TEXT: doors.openai.completions.create,
        ANSWER: doors.openai.responses.create,
    }[endpoint]
    over_http = [event.model_dump(mode="json", exclude_unset=True) async for event in await create(**body, stream=True)]
    stream = doors.bus.stream_of(endpoint, body)
    over_bus = [
        piece if isinstance(piece, dict) else piece.model_dump(mode="json", exclude_unset=True)
        async for piece in stream
    ]
    await doors.bus.switch(body["model"], hold=60)
    call = Call(id=uuid.uuid4().hex, alias=body["model"], endpoint=endpoint, body={**body, "stream": True})
    whole = await doors.engine.answer(call, sink)
    await doors.bus.switch(body["model"], hold=0)
    texts = {told(events) for events in (over_http, over_bus, chunks)}
    assert len(texts) == 1
    assert comparable(stream.result.body) == comparable(whole.body)
    said = json.dumps(whole.body)
    assert all(json.dumps(text)[1:-1] in said for text in texts)


async def test_a_structured_answer_satisfies_its_schema(doors: Doors) -> None:
    endpoint, body = WHOLE["structured"]
    for way in (by_bus, by_http):
        answer = await way(doors, endpoint, body)
        Draft202012Validator(SCHEMA).validate(json.loads(answer["choices"][0]["message"]["content"]))


async def test_a_template_in_models_yaml_is_used_with_the_kwargs_of_the_request(doors: Doors) -> None:
    llama = doors.models.now.models["llama"]
    template = CHAT_TEMPLATE.replace("assistant", "{{ speaker | default('assistant') }}")
    host = replace(llama, alias="host", frontend={**llama.frontend, "chat_template": template})
    plain = {"messages": USER, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    named = {**plain, "chat_template_kwargs": {"speaker": "user"}}
    async with with_models(doors, host):
        for way in (by_bus, by_http, in_python):
            usual = await way(doors, CHAT, {"model": "llama", **plain})
            assert {**await way(doors, CHAT, {"model": "host", **plain}), "model": "llama"} == usual
            other = await way(doors, CHAT, {"model": "host", **named})
            assert other["prompt_token_ids"] != usual["prompt_token_ids"]


async def test_generators_and_the_embedding_model_are_asked_at_once(doors: Doors) -> None:
    chats = [doors.bus.chat(model=m, messages=USER, max_tokens=8, temperature=0) for m in ("llama", "qwen") * 4]
    vectors = [doors.openai.embeddings.create(model="minilm", input=f"text {n}") for n in range(8)]
    alone = await doors.bus.embed(model="minilm", input="text 3", encoding_format="float")
    answers, found = await asyncio.gather(asyncio.gather(*chats), asyncio.gather(*vectors))
    assert len({answer.choices[0].message.content for answer in answers}) == 2
    assert found[3].data[0].embedding == pytest.approx(alone.data[0].embedding, abs=1e-5)
