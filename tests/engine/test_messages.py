"""Anthropic's messages of the real engine: what vLLM's handlers say of them, Anthropic's own client, and the bus."""

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from schemas.requests import Endpoint
from service.ports import Answer, Call
from tests.support.doors import Doors, open_doors
from tests.support.engine_spec import LONG, broken_off, chat, frozen, until
from tests.support.models import question
from tests.support.waiting import LOOKS

pytestmark = [pytest.mark.engine, pytest.mark.parity]

USER: Any = [{"role": "user", "content": "Who are you?"}]
TOOL: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FORCED: Any = {"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "tool", "name": "weather"}}
MADE = ("id", "signature")
"""What is drawn anew by each run."""
GREEDY = {"temperature": 0}
"""Anthropic's client has no parameter for it any more."""
Event = dict[str, Any]


def message(alias: str = "llama", *, max_tokens: int = 48, **options: Any) -> Call:
    body = {"model": alias, "messages": USER, "max_tokens": max_tokens, "temperature": 0, **options}
    return Call(id=uuid.uuid4().hex, alias=alias, endpoint=Endpoint.MESSAGES, body=body)


def asked(city: str) -> dict[str, Any]:
    """What the model that calls tools was trained on."""
    return {"messages": [{"role": "user", "content": question(city)}], "max_tokens": 120, "tools": [TOOL]}


def comparable(said: Any) -> Any:
    if isinstance(said, dict):
        return {name: comparable(part) for name, part in said.items() if name not in MADE}
    return [comparable(part) for part in said] if isinstance(said, list) else said


def text(body: Any) -> str:
    return "".join(block.get("text", "") for block in body["content"])


async def streamed(engine: Any, call: Call) -> tuple[Answer, list[Event]]:
    events: list[Event] = []

    async def sink(event: Event) -> None:
        events.append(event)

    return await engine.answer(call, sink), events


def told(events: list[Event]) -> list[Any]:
    """What events add up to: how many there are is a matter of speed."""
    found: list[Any] = []
    for event in events:
        delta = event.get("delta", {})
        piece = [delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")]
        kind = [event["type"], event.get("index"), delta.get("type")]
        if found and event["type"] == "content_block_delta" and found[-1][:-1] == kind:
            found[-1][-1] += piece[0]
        else:
            found.append(kind + piece)
    return found


# --- what the handlers answer ---


async def test_a_message_says_what_a_chat_says(engine: Any) -> None:
    answer = await engine.answer(message())
    same = await engine.answer(chat(max_tokens=48, ignore_eos=False))
    assert answer.status == 200, answer.body
    assert (answer.body["type"], answer.body["role"], answer.body["model"]) == ("message", "assistant", "llama")
    assert text(answer.body) == same.body["choices"][0]["message"]["content"]
    counted = same.body["usage"]
    assert answer.body["usage"]["input_tokens"] == counted["prompt_tokens"]
    assert answer.body["usage"]["output_tokens"] == counted["completion_tokens"]
    assert answer.body["stop_reason"] == "max_tokens"


async def test_tokens_are_counted_as_a_message_has_them(engine: Any) -> None:
    asked = {"model": "llama", "messages": USER, "system": "Be brief."}
    found = await engine.answer(Call(uuid.uuid4().hex, "llama", Endpoint.COUNT_TOKENS, asked))
    answer = await engine.answer(message(system="Be brief.", max_tokens=1))
    assert found.status == 200, found.body
    assert found.body["input_tokens"] == answer.body["usage"]["input_tokens"] > 0


STREAMS: dict[str, Call] = {
    "text": message(),
    "stop words": message(stop_sequences=["e"]),
    "a tool called": message("caller", **asked("Oslo")),
    "a thought": message("caller", **{**asked("Lima"), "tools": []}),
    "a tool by name": message("caller", **{**asked("Oslo"), **FORCED}),
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_the_whole_of_a_stream_equals_the_answer_without_one(engine: Any, kind: str) -> None:
    call = STREAMS[kind]
    if engine.active != call.alias:
        await engine.switch(call.alias)
    plain = await engine.answer(call)
    again = Call(uuid.uuid4().hex, call.alias, call.endpoint, {**call.body, "stream": True})
    whole, events = await streamed(engine, again)
    assert plain.status == 200, plain.body
    assert comparable(whole.body) == comparable(plain.body)
    if "tool_choice" in call.body:
        assert plain.body["content"][-1]["type"] == "tool_use"
    assert [event["type"] for event in (events[0], events[-2], events[-1])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["usage"]["output_tokens"] == plain.body["usage"]["output_tokens"]


async def test_a_tool_s_input_that_vllm_makes_no_whole_of_is_told_by_its_stream(engine: Any) -> None:
    """Where it is not streamed, vLLM's server refuses: it is no object."""
    flag = {"name": "flag", "input_schema": {"type": "boolean"}, "strict": True}
    asked: Any = {"tools": [flag], "tool_choice": {"type": "tool", "name": "flag"}, "max_tokens": 200}
    plain = await engine.answer(message(**asked))
    assert (plain.status, plain.retriable) == (400, False)
    whole, events = await streamed(engine, message(stream=True, **asked))
    assert whole.status == 200, whole.body
    assert [(block["name"], block["input"]) for block in whole.body["content"]] == [("flag", {})]
    assert whole.body["usage"] == events[-2]["usage"]


REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "no messages": ({"messages": None}, 400),
    "no tokens": ({"max_tokens": 0}, 400),
    "too long": ({"messages": [{"role": "user", "content": "a word " * 20_000}]}, 400),
    "a salt that is none": ({"cache_salt": 5}, 400),
    "another model": ({"model": "lama"}, 404),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_what_can_not_be_answered_is_refused_with_the_reason_and_once(engine: Any, kind: str) -> None:
    more, status = REFUSED[kind]
    answer = await engine.answer(message(**more))
    assert (answer.status, answer.retriable) == (status, False)
    assert answer.body["error"]["message"]


async def test_a_model_without_messages_says_so(engine: Any) -> None:
    await engine.switch("minilm")
    answer = await engine.answer(message("minilm"))
    assert (answer.status, answer.body["error"]["message"]) == (404, "The model does not support /v1/messages")


async def test_who_has_another_salt_shares_no_prompt(engine: Any) -> None:
    async def found(salt: str | None) -> int:
        """How many tokens of a long prompt the cache had."""
        asked = [{"role": "user", "content": "Who is the oldest of them all? " * 40}]
        call = message(messages=asked, max_tokens=100, **({} if salt is None else {"cache_salt": salt}))
        cached = [(await broken_off(engine, call, tokens=1)).requests[0].cached]
        return cached[0]

    assert await found(None) == 0
    assert await found(None) > 0
    assert await found("acme") == 0
    assert await found("acme") > 0


# --- frozen, aborted, gone on with ---


async def test_a_message_frozen_by_a_switch_goes_on_as_if_nothing_had_been(engine: Any) -> None:
    uninterrupted = await engine.answer(message(max_tokens=LONG))
    call = message(max_tokens=LONG)
    task, _ = await frozen(engine, call)
    assert (await engine.answer(message("qwen"))).status == 200
    assert not task.done()
    await engine.switch("llama")
    assert comparable((await task).body) == comparable(uninterrupted.body)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_message_has_what_it_said(engine: Any, stream: bool) -> None:
    whole = text((await engine.answer(message(max_tokens=120))).body)
    call = message(max_tokens=120, stream=stream)
    task, _ = await frozen(engine, call)
    await engine.abort(call.id)
    answer = await task
    assert answer.aborted
    assert whole.startswith(text(answer.body).rstrip("\ufffd"))
    assert answer.body["usage"]["output_tokens"] >= 8
    assert answer.body.get("stop_reason") is None


@pytest.mark.parametrize("kind", ["text", "a tool called", "a thought"])
async def test_a_stream_of_messages_tells_each_piece_once_wherever_it_is_gone_on_with(engine: Any, kind: str) -> None:
    call = STREAMS[kind]
    call = Call(uuid.uuid4().hex, call.alias, call.endpoint, {**call.body, "stream": True})
    if engine.active != call.alias:
        await engine.switch(call.alias)
    seen: list[tuple[Any, Event]] = []

    async def sink(event: Event) -> None:
        seen.append((engine.progress(call.id), event))

    firsts: list[int] = []
    for _ in range(LOOKS):  # where the machine stood still, it was told all at once
        seen.clear()
        whole = await engine.answer(call, sink)
        firsts = [at for at in range(1, len(seen)) if seen[at][0] is not None and seen[at][0] != seen[at - 1][0]]
        if len(firsts) > 2:
            break
    assert len(firsts) > 2
    for at in {firsts[0], firsts[len(firsts) // 2], firsts[-1]}:
        further: list[Event] = []

        async def rest(event: Event, further: list[Event] = further) -> None:
            further.append(event)

        progress = seen[at][0]
        answer = await engine.answer(call, rest, progress)
        assert progress.events == at
        assert answer.continued == (progress.tokens,)
        assert comparable(answer.body) == comparable(whole.body)
        assert told(further) == told([event for _, event in seen[at:]])


# --- Anthropic's client, and the bus ---


@pytest.fixture(scope="module")
async def doors(vllm_engine: Any, broker: Any) -> AsyncIterator[Doors]:
    async with open_doors(vllm_engine, broker.bootstrap) as opened:
        yield opened


@pytest.fixture
async def client(doors: Doors) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own, as it is."""
    base = str(doors.http.base_url)
    async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0, timeout=120) as official:
        yield official


@pytest.mark.broker
async def test_anthropics_client_asks_and_streams_and_counts(doors: Doors, client: anthropic.AsyncAnthropic) -> None:
    for model in ("llama", "qwen"):
        whole = await client.messages.create(model=model, messages=USER, max_tokens=24, extra_body=GREEDY)
        async with client.messages.stream(model=model, messages=USER, max_tokens=24, extra_body=GREEDY) as stream:
            said = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert (whole.model, whole.role) == (model, "assistant")
        assert said == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.stop_reason == whole.stop_reason
        counted = await client.messages.count_tokens(model=model, messages=USER)
        assert counted.input_tokens == whole.usage.input_tokens


@pytest.mark.broker
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_answer_is_told(client: anthropic.AsyncAnthropic, stream: bool) -> None:
    async def say(messages: Any) -> Any:
        given: Any = {"model": "caller", "max_tokens": 120, "extra_body": GREEDY, "tools": [TOOL], "messages": messages}
        if not stream:
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as told:
            return await told.get_final_message()

    first = await say([{"role": "user", "content": question("Oslo")}])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "weather", {"city": "Oslo"})
    last = await say(
        [
            {"role": "user", "content": question("Oslo")},
            {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
        ]
    )
    assert last.stop_reason == "end_turn"
    assert "".join(block.text for block in last.content if block.type == "text").strip() == "There is rain in Oslo."


@pytest.mark.broker
async def test_anthropics_client_knows_the_errors(doors: Doors, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="lama", messages=USER, max_tokens=4)
    assert unknown.value.body["type"] == "error"  # type: ignore[index]
    assert "lama" in unknown.value.body["error"]["message"]  # type: ignore[index]
    for more in ({"max_tokens": -1}, {"messages": [{"role": "user", "content": "a word " * 20_000}]}):
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**{"model": "llama", "messages": USER, "max_tokens": 4, **more})


@pytest.mark.broker
async def test_a_switch_in_the_middle_of_a_stream_loses_nothing(doors: Doors, client: anthropic.AsyncAnthropic) -> None:
    given: Any = {"model": "llama", "messages": USER, "max_tokens": 100, "extra_body": GREEDY}
    whole = await client.messages.create(**given)
    said = ""
    async with client.messages.stream(**given) as stream:
        async for piece in stream.text_stream:
            if not said:
                for model in ("qwen", "llama"):
                    switched = await doors.http.post("/v1/models/switch", json={"model": model, "mode": "keep"})
                    assert switched.json()["current_model"] == model
            said += piece
    assert said == whole.content[0].text  # type: ignore[union-attr]


@pytest.mark.broker
async def test_over_the_bus_the_header_says_that_it_is_a_message(doors: Doors) -> None:
    body = message().body
    result = await doors.bus.result(await doors.bus.submit(body, endpoint=Endpoint.MESSAGES))
    assert (result.status, result.endpoint) == (200, "/v1/messages")
    stream = doors.bus.stream_of(Endpoint.MESSAGES, body)
    events = [event async for event in stream]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert comparable(stream.result.body) == comparable(result.body)
    counted = await doors.bus.result(
        await doors.bus.submit({"model": "llama", "messages": USER}, endpoint=Endpoint.COUNT_TOKENS)
    )
    assert counted.body["input_tokens"] == result.body["usage"]["input_tokens"]
    refused = await doors.bus.result(await doors.bus.submit({**body, "max_tokens": 0}, endpoint=Endpoint.MESSAGES))
    assert (refused.status, refused.error.code) == (400, 400)
    assert json.dumps(refused.body) == "null"
    await until(lambda: all(info.unfinished == 0 for info in doors.engine.contexts()))
