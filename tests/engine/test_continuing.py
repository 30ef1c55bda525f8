"""Answers that are gone on with from some token, of every kind of request: as if nothing had been, and nothing twice.

Bodies are compared with an undisturbed run's. An answer that had begun anew would have the same body; so the tokens
that the core generated are counted, too, by vLLM's own metrics.
"""

import asyncio
import time
import uuid
from typing import Any

import pytest

from schemas.progress import Begun, Progress, Said
from schemas.requests import Endpoint
from service.errors import NotContinued
from service.ports import Answer, Call
from tests.support import forced
from tests.support.engine_spec import broken_off, chat, comparable, completion, delta, same
from tests.support.volume import shown
from tests.support.waiting import LOOKS

pytestmark = [pytest.mark.engine, pytest.mark.parity]

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 5, "maxItems": 5},
    },
    "required": ["ok", "name", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA, "strict": True}}
FREE = {"ignore_eos": False, "max_tokens": 200}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": forced.WEATHER["function"]["parameters"]}}
CALLER = {"messages": ASKED, "max_tokens": 120, "ignore_eos": False}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def response(**options: Any) -> Call:
    body = {"model": "llama", "input": "Who are you?", "max_output_tokens": 40, "temperature": 0, **options}
    return Call(id=uuid.uuid4().hex, alias="llama", endpoint=Endpoint.RESPONSES, body=body)


KINDS = {
    "chat": chat(max_tokens=48),
    "completion": completion(max_tokens=48),
    "response": response(),
    "until it ends": chat(**FREE),
    "penalties": chat(max_tokens=48, presence_penalty=1.5, frequency_penalty=0.7),
    "repetition": completion(max_tokens=48, repetition_penalty=1.4),
    "stop strings": completion(max_tokens=200, stop=[" the", "zzz"]),
    "stop strings kept": completion(max_tokens=200, stop=[" the"], include_stop_str_in_output=True),
    "min_tokens": completion(max_tokens=60, min_tokens=30, stop=["e"], ignore_eos=False),
    "logprobs of a chat": chat(max_tokens=48, logprobs=True, top_logprobs=3),
    "logprobs of a completion": completion(max_tokens=48, logprobs=3),
    "token ids": completion(max_tokens=48, return_token_ids=True),
    "echo": completion(max_tokens=48, echo=True),
    "bad words": completion(max_tokens=48, bad_words=["the", "a"]),
    "logit bias": completion(max_tokens=48, logit_bias={"40": 3.0, "41": -5}),
    "schema": chat(response_format=FORMAT, **FREE),
    "required tool": chat(**forced.CALLED),
    "reasoning and tool": chat("caller", tools=[WEATHER], **CALLER),
    "reasoning and schema": chat("caller", response_format=FORMAT, **CALLER),
    "two prompts": completion(max_tokens=48, prompt=["Hello", "The"]),
    "two prompts of two lengths": completion(max_tokens=90, prompt=["Hello", "The"], stop=["e"], min_tokens=20),
}
BY_DEFAULT = ["chat", "completion", "logprobs of a chat", "schema"]
BY_DEFAULT += ["required tool", "reasoning and tool", "two prompts"]
SEEDED = {
    "seed": chat(max_tokens=48, temperature=1.0, seed=11),
    "seed and top": completion(max_tokens=48, temperature=1.2, seed=12, top_p=0.9, top_k=40),
    "seed and schema": chat(temperature=1.0, seed=13, response_format=FORMAT, **FREE),
    "two samples of a chat": chat(max_tokens=48, n=2, temperature=1, seed=3, logprobs=True, top_logprobs=1),
    "two samples of two lengths": completion(
        max_tokens=90, temperature=0.8, seed=5, n=2, logprobs=2, stop=["e"], min_tokens=12
    ),
}
STREAMS = {
    "chat": chat(max_tokens=48, **USAGE),
    "completion": completion(max_tokens=48, **USAGE),
    "stop strings": completion(max_tokens=200, stop=[" the"], **USAGE),
    "logprobs": chat(max_tokens=48, logprobs=True, top_logprobs=2, **USAGE),
    "schema": chat(response_format=FORMAT, **FREE, **USAGE),
    "reasoning and tool": chat("caller", tools=[WEATHER], **CALLER, **USAGE),
    "two samples": chat(max_tokens=48, n=2, temperature=1, seed=3, **USAGE),
}


def draws_known() -> bool:
    """Whether it is known how often a seed was drawn from on a CPU."""
    import vllm

    return not vllm.__version__.startswith("0.26")


def generated(engine: Any, alias: str) -> float:
    """Tokens that a model's core has generated, by vLLM's own count."""
    count: float = engine.registries()[alias].get_sample_value(
        "vllm:generation_tokens_total", {"model_name": alias, "engine": "0"}
    )
    return count


async def watched(engine: Any, call: Call, **how: Any) -> tuple[Answer, list[Progress]]:
    """An answer, and what its call had said after each step of the event loop in which that was more."""
    task, found = asyncio.create_task(engine.answer(call, **how)), []
    while not task.done():
        progress = engine.progress(call.id)
        if progress is not None and (not found or progress.tokens > found[-1].tokens):
            found.append(progress)
        await asyncio.sleep(0)
    return task.result(), found


def cut(progress: Progress, length: int) -> Progress:
    """As it was when each sequence had said ``length`` tokens at the most."""

    def first(said: Said) -> Said:
        rows = None if said.logprobs is None else said.logprobs[:length]
        return Said(tokens=said.tokens[:length], logprobs=rows)

    def begun(request: Begun) -> Begun:
        return request.model_copy(update={"sequences": tuple(map(first, request.sequences))})

    return progress.model_copy(update={"requests": tuple(map(begun, progress.requests))})


def places(progress: Progress, everywhere: bool) -> list[int]:
    """In the middle and as late as was seen; ``everywhere``: at a first token and at some others, too."""
    longest = max(len(said.tokens) for begun in progress.requests for said in begun.sequences)
    more = {1, longest // 3, 2 * longest // 3, longest - 1} if everywhere else set()
    return sorted({longest // 2, longest, *more} - {0})


def usage(answer: Answer) -> int:
    found = answer.body["usage"]
    return int(found["output_tokens"] if "output_tokens" in found else found["completion_tokens"])


async def check(engine: Any, call: Call, *, everywhere: bool = False) -> None:
    if engine.active != call.alias:
        await engine.switch(call.alias)
    whole, progresses = await watched(engine, call)
    assert whole.status == 200, whole.body
    assert progresses
    for length in places(progresses[-1], everywhere):
        progress = cut(progresses[-1], length)
        before = generated(engine, call.alias)
        answer = await engine.answer(call, progress=Progress.model_validate_json(progress.model_dump_json()))
        assert same(comparable(answer.body), comparable(whole.body)), f"from token {length}"
        assert answer.continued == (progress.tokens,)
        assert generated(engine, call.alias) - before == usage(whole) - progress.tokens, f"from token {length}"


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", shown(KINDS, *BY_DEFAULT))
async def test_a_body_is_that_of_an_undisturbed_run(engine: Any, kind: str, everywhere: bool) -> None:
    await check(engine, KINDS[kind], everywhere=everywhere or kind == "chat")


@pytest.mark.parametrize("kind", shown(SEEDED, "seed", "two samples of a chat"))
async def test_a_seed_is_gone_on_with_or_refused(engine: Any, kind: str) -> None:
    call = SEEDED[kind]
    if not draws_known():
        assert (await watched(engine, call))[1] == []
        greedy = {**call.body, "temperature": 0, "n": 1}
        _, progresses = await watched(engine, Call(call.id, call.alias, call.endpoint, greedy))
        with pytest.raises(NotContinued, match="vocabulary"):
            await engine.answer(call, progress=progresses[-1])
        return
    await check(engine, call)


@pytest.mark.parametrize("busy_s", [0.0, pytest.param(0.015, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", shown(STREAMS, "chat", "stop strings", "schema", "reasoning and tool"))
async def test_a_stream_tells_each_piece_once(engine: Any, kind: str, busy_s: float) -> None:
    """Also where the one before was busy, so that vLLM gave it several tokens at a time."""
    call = STREAMS[kind]
    if engine.active != call.alias:
        await engine.switch(call.alias)
    told: list[tuple[Progress | None, dict[str, Any]]] = []
    firsts: list[int] = []

    async def sink(event: dict[str, Any]) -> None:
        told.append((engine.progress(call.id), event))
        time.sleep(busy_s)  # noqa: ASYNC251 - nothing else is heard meanwhile

    least = 1 if busy_s else 3
    for _ in range(LOOKS):  # where the machine stood still, it was told all at once
        told.clear()
        whole = await engine.answer(call, sink)
        assert whole.status == 200, whole.body
        if "seed" in call.body and not draws_known():
            assert not any(progress for progress, _ in told)
            return
        # What is known of an event has been dealt with before it: the first event of each progress is the next to be
        # told.
        firsts = [index for index in range(1, len(told)) if told[index][0] is not None]
        firsts = [index for index in firsts if told[index][0] != told[index - 1][0]]
        if len(firsts) >= least:
            break
    assert len(firsts) >= least
    for index in firsts if busy_s else {firsts[0], firsts[len(firsts) // 2], firsts[-1]}:
        progress, further = told[index][0], []
        assert progress is not None

        async def rest(event: dict[str, Any], further: list[dict[str, Any]] = further) -> None:
            further.append(event)

        before = generated(engine, call.alias)
        answer = await engine.answer(call, rest, progress)
        assert same(comparable(answer.body), comparable(whole.body))
        assert generated(engine, call.alias) - before == usage(whole) - progress.tokens
        assert said_by(further) == said_by([event for _, event in told[index:]])


async def test_a_streamed_response_names_its_items_anew_and_is_not_gone_on_with(engine: Any) -> None:
    async def sink(_event: dict[str, Any]) -> None:
        """Nobody listens."""

    answer, progresses = await watched(engine, response(stream=True), on_chunk=sink)
    assert (answer.status, progresses) == (200, [])


def said_by(events: list[dict[str, Any]]) -> dict[Any, str]:
    """What events add up to, by sample and field; how many there are is a matter of speed."""
    said: dict[Any, str] = {}
    for event in events:
        if event.get("type", "").endswith(".delta"):
            said["delta"] = said.get("delta", "") + event["delta"]
        for choice in event.get("choices", ()):
            piece = choice.get("delta") or choice
            parts = [(name, piece.get(name)) for name in ("content", "text", "reasoning", "reasoning_content")]
            for tool in piece.get("tool_calls") or ():  # one event may have two pieces of one
                parts += [(f"{name} of a tool", tool["function"].get(name)) for name in ("name", "arguments")]
            parts.append(("finish", choice.get("finish_reason")))
            for name, part in parts:
                said[choice["index"], name] = said.get((choice["index"], name), "") + (part or "")
    return {name: text for name, text in said.items() if text}


async def test_an_answer_that_was_whole_is_not_generated_again(engine: Any) -> None:
    call = completion(max_tokens=48, return_token_ids=True)
    whole, progresses = await watched(engine, call)
    (begun,) = progresses[-1].requests
    said = Said(tokens=whole.body["choices"][0]["token_ids"])
    progress = progresses[-1].model_copy(update={"requests": (begun.model_copy(update={"sequences": (said,)}),)})
    before = generated(engine, "llama")
    answer = await engine.answer(call, progress=progress)
    assert comparable(answer.body) == comparable(whole.body)
    assert generated(engine, "llama") == before
    assert (await engine.answer(chat())).status == 200


async def test_it_is_what_was_said_that_counts(engine: Any) -> None:
    """A falsified beginning stays: the engine has not begun anew."""
    call = completion(max_tokens=48, return_token_ids=True)
    _, progresses = await watched(engine, call)
    (begun,) = cut(progresses[-1], 20).requests
    said = Said(tokens=[*begun.sequences[0].tokens[:10], *[200] * 10])
    progress = progresses[-1].model_copy(update={"requests": (begun.model_copy(update={"sequences": (said,)}),)})
    answer = await engine.answer(call, progress=progress)
    assert answer.body["choices"][0]["token_ids"][:20] == said.tokens


async def test_what_can_not_be_gone_on_with_is_refused_by_name(engine: Any) -> None:
    call = completion(max_tokens=200)
    progress = await broken_off(engine, call)
    told: list[str] = []

    async def sink(event: dict[str, Any]) -> None:
        told.append(delta(event))

    for options, reason in (
        ({"prompt_logprobs": 1}, "prompt are told once"),
        ({"logprobs": 2}, "log-probabilities of its first tokens"),
        ({"stream": True, "prompt": ["Hello", "The"]}, "several prompts|prompt is another"),
    ):
        other = Call(call.id, call.alias, call.endpoint, {**call.body, **options})
        with pytest.raises(NotContinued, match=reason):
            await engine.answer(other, sink, progress)
    assert told == []
    asked = Call(uuid.uuid4().hex, "llama", call.endpoint, {**call.body, "prompt_logprobs": 1})
    assert (await watched(engine, asked))[1] == []


async def test_nobody_says_from_outside_what_an_answer_has_said(engine: Any) -> None:
    call = completion(max_tokens=24)
    forged = {**call.body, "vllm_xargs": {"gearshift_said": [200] * 10}}
    answer = await engine.answer(Call(uuid.uuid4().hex, "llama", call.endpoint, forged))
    assert comparable(answer.body) == comparable((await engine.answer(call)).body)


@pytest.mark.long
async def test_a_model_that_is_not_loaded_goes_on_once_it_is(engine: Any) -> None:
    await engine.switch("qwen")
    call = chat("qwen", max_tokens=200)
    whole = await engine.answer(call)
    progress = await broken_off(engine, call)
    await engine.switch("llama")
    await engine.drop("qwen")
    task = asyncio.create_task(engine.answer(call, progress=progress))
    await engine.switch("qwen")
    answer = await task
    assert comparable(answer.body) == comparable(whole.body)
    assert answer.continued == (progress.tokens,)
