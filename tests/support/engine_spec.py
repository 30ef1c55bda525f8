"""What every engine does, as tests over an ``engine`` fixture: run on the fake and on the real one.

The fixture gives an open engine with the aliases ``llama`` and ``qwen``, ``llama`` active, no call running, whose
steps take time (so that a call can be met in the middle). Use it with ``from tests.support.engine_spec import *``.
"""

import asyncio
import json
import math
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from schemas.contexts import Leftover, SwitchMode, SwitchPhase, SwitchReport, Tier
from schemas.progress import Progress
from schemas.requests import Endpoint
from service.errors import NotContinued, UnknownModel
from service.ports import Answer, Call, Engine, Inquiry, Transition, Turn
from tests.support.waiting import LOOKS, PATIENCE_S

LONG = 200
"""Tokens of a call that is met in the middle."""
ENDLESS = 3500
"""Tokens of a call that is ended in the middle: so many that none ends by itself while this process stands still."""


def chat(alias: str = "llama", text: str = "Who are you?", *, max_tokens: int = 24, **options: Any) -> Call:
    body = {
        "model": alias,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }
    return Call(id=uuid.uuid4().hex, alias=alias, endpoint=Endpoint.CHAT, body=body)


def completion(alias: str = "llama", prompt: Any = "Hello", *, max_tokens: int = 24, **options: Any) -> Call:
    body = {"model": alias, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **options}
    return Call(id=uuid.uuid4().hex, alias=alias, endpoint=Endpoint.COMPLETIONS, body=body)


def text(answer: Answer) -> str:
    """The text of an answer's first choice."""
    assert answer.status == 200, answer.body
    choice = answer.body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def delta(chunk: dict[str, Any]) -> str:
    """The text that a chunk adds."""
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chunk["choices"])


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the port has no event for how far a call is
            await asyncio.sleep(0.001)


async def running(engine: Engine, call: Call, *, tokens: int = 8, **how: Any) -> asyncio.Task[Answer]:
    """A call that has generated some tokens and has more to go: anew, where it had ended before anybody looked."""
    for _ in range(LOOKS):
        task = asyncio.create_task(engine.answer(call, **how))
        await until(lambda task=task: engine.tokens(call.id) >= tokens or task.done())
        if not task.done():
            return task
        assert (await task).status == 200
    raise AssertionError(f"{call.id} ended before it was seen to have {tokens} tokens, {LOOKS} times")


async def frozen(engine: Engine, call: Call, **how: Any) -> tuple[asyncio.Task[Answer], SwitchReport]:
    """A call that a switch to ``qwen`` met in the middle: anew, where it had ended before that.

    ``how``: what else is asked of the switch, whose report is told, too.
    """
    for _ in range(LOOKS):
        task = await running(engine, call)
        report = await engine.switch("qwen", **how)
        await engine.answer(chat("qwen", max_tokens=1))  # whatever was on its way has come before this
        if not task.done():
            return task, report
        await engine.switch("llama")
    raise AssertionError(f"{call.id} had ended before it was met in the middle, {LOOKS} times")


def is_part(told: str, of: str) -> bool:
    """Whether one began as the other one, the last of which may be a part of a character."""
    both = min(len(told.rstrip("\ufffd")), len(of))
    return told[:both] == of[:both]


# --- answering ---


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_request_is_answered_by_the_model_that_it_names(engine: Engine, make: Any) -> None:
    answer = await engine.answer(make("llama"))
    assert answer.status == 200
    assert answer.body["model"] == "llama"
    assert (answer.body["usage"]["completion_tokens"], answer.longest) == (24, 24)
    assert text(answer)
    assert not answer.aborted
    assert not answer.retriable
    assert answer.first_token_s is not None


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_greedy_request_has_the_same_text_every_time(engine: Engine, make: Any) -> None:
    alone = text(await engine.answer(make()))
    together = await asyncio.gather(*(engine.answer(make()) for _ in range(8)))
    assert {text(answer) for answer in together} == {alone}


async def test_models_answer_differently(engine: Engine) -> None:
    llama = text(await engine.answer(chat("llama")))
    await engine.switch("qwen")
    assert text(await engine.answer(chat("qwen"))) != llama


@pytest.mark.parametrize(
    ("endpoint", "body", "status"),
    [
        pytest.param(Endpoint.CHAT, {}, 400, id="no messages"),
        pytest.param(Endpoint.CHAT, {"messages": "hello"}, 400, id="messages of a wrong type"),
        pytest.param(Endpoint.CHAT, {"messages": [], "max_tokens": "x"}, 400, id="no number"),
        pytest.param(Endpoint.COMPLETIONS, {"prompt": "a word " * 20_000}, 400, id="too long a prompt"),
        pytest.param(Endpoint.TRANSCRIPTIONS, {"file": "eA=="}, 404, id="an endpoint that the model has not"),
    ],
)  # fmt: skip
async def test_bad_input_is_an_answer_with_an_error_object(
    engine: Engine, endpoint: Endpoint, body: dict[str, Any], status: int
) -> None:
    answer = await engine.answer(Call(id=uuid.uuid4().hex, alias="llama", endpoint=endpoint, body=body))
    assert answer.status == status
    assert answer.body["error"]["message"]
    assert answer.body["error"]["code"] == status
    assert not answer.retriable


async def test_what_can_be_asked_is_described_whole(engine: Engine) -> None:
    found = await engine.openapi()
    assert found["paths"].keys() <= {endpoint.value for endpoint in Endpoint}
    body = found["paths"][Endpoint.CHAT.value]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schemas = found["components"]["schemas"]
    assert "model" in schemas[body["$ref"].rpartition("/")[2]]["properties"]
    assert references(found) <= {f"#/components/schemas/{name}" for name in schemas}


def references(said: Any) -> set[str]:
    """What an OpenAPI document refers to within itself."""
    if isinstance(said, dict):
        own = {said["$ref"]} if isinstance(said.get("$ref"), str) else set()
        return own.union(*map(references, said.values()))
    return set().union(*map(references, said)) if isinstance(said, list) else set()


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")  # what vLLM asks its environment with
async def test_a_models_server_tells_of_its_inside(engine: Engine) -> None:
    await engine.preload("qwen")
    for alias in ("llama", "qwen"):
        info = await engine.inquire(alias, Inquiry("GET", "/server_info", "config_format=text"))
        assert (info.status, info.media_type) == (200, "application/json"), info.content
        assert alias in json.loads(info.content)["vllm_config"].lower()
        tokenizer = await engine.inquire(alias, Inquiry("GET", "/tokenizer_info"))
        assert json.loads(tokenizer.content)["tokenizer_class"]
    body = json.dumps({"method": "get_supported_tasks"}).encode()
    called = await engine.inquire("qwen", Inquiry("POST", "/collective_rpc", body=body))
    (told,) = json.loads(called.content)["results"]
    assert "generate" in told
    assert (await engine.inquire("llama", Inquiry("POST", "/collective_rpc", body=b"{}"))).status == 400
    assert (await engine.inquire("llama", Inquiry("GET", "/secrets"))).status == 404
    with pytest.raises(UnknownModel, match="did you mean 'llama'"):
        await engine.inquire("lama", Inquiry("GET", "/server_info"))


async def test_an_unknown_model_is_a_404(engine: Engine) -> None:
    answer = await engine.answer(chat("lama"))
    assert answer.status == 404
    assert "`lama` does not exist" in answer.body["error"]["message"]


# --- sessions ---


def part_of(
    session: str, part: int, *, final: bool = False, make: Callable[..., Call] = completion, **how: Any
) -> Call:
    """A part of a session. Each has a prompt of its own."""
    call = make(text=f"And then, {part}?", **how) if make is chat else make(prompt=f"And then, {part}?", **how)
    return replace(call, turn=Turn(session, part, final))


def come_to(answer: Answer) -> Progress:
    """What an answer says that its session has come to."""
    assert answer.status == 200, answer.body
    assert answer.session is not None
    return answer.session


def said(answer: Answer) -> tuple[str, Any]:
    """What an answer says, and what it has cost."""
    return text(answer), answer.body["usage"]


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_session_that_is_not_here_goes_on_where_it_was_elsewhere(engine: Engine, make: Any) -> None:
    here = [await engine.answer(part_of(uuid.uuid4().hex, 0, make=make))]
    name = uuid.uuid4().hex
    undisturbed = [await engine.answer(part_of(name, part, make=make, final=part == 3)) for part in range(4)]
    assert said(here[0]) == said(undisturbed[0])
    for part in (1, 2, 3):
        elsewhere = part_of(uuid.uuid4().hex, part, make=make, final=part == 3)
        here.append(await engine.answer(elsewhere, None, come_to(here[-1])))
    assert list(map(said, here)) == list(map(said, undisturbed))
    assert [len(come_to(answer).parts) for answer in here] == [1, 2, 3, 0]
    assert {answer.longest for answer in here} == {None}, "its request says what other parts said, too"
    assert [come_to(answer).parts for answer in here] == [come_to(answer).parts for answer in undisturbed]


async def test_a_session_that_went_on_elsewhere_stays_where_it_is_then(engine: Engine) -> None:
    name, other = uuid.uuid4().hex, uuid.uuid4().hex
    first = await engine.answer(part_of(name, 0))
    second = await engine.answer(part_of(other, 1), None, come_to(first))
    assert said(await engine.answer(part_of(other, 2, final=True))) == said(
        await engine.answer(part_of(name, 2, final=True), None, come_to(second))
    )


async def test_a_session_that_was_answered_here_in_vain_goes_on_where_it_was_committed(engine: Engine) -> None:
    name = uuid.uuid4().hex
    first = await engine.answer(part_of(name, 0))
    in_vain = await engine.answer(part_of(name, 1))
    again = await engine.answer(part_of(name, 1), None, come_to(first))
    assert said(again) == said(in_vain)
    alone = await engine.answer(part_of(name, 0, final=True, max_tokens=8))
    assert alone.status == 409, "it is here: only what was committed tells that it went on elsewhere"
    assert alone.session is None


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        pytest.param(1, None, id="nothing known"),
        pytest.param(2, {}, id="a part is missing"),
        pytest.param(0, {}, id="a part that was answered"),
        pytest.param(1, {"engine": "another"}, id="another model"),
    ],
)
async def test_a_session_that_can_not_be_gone_on_with_is_refused(
    engine: Engine, part: int, changed: dict[str, Any] | None
) -> None:
    first = come_to(await engine.answer(part_of(uuid.uuid4().hex, 0)))
    known = None if changed is None else first.model_copy(update=changed)
    answer = await engine.answer(part_of(uuid.uuid4().hex, part), None, known)
    assert (answer.status, answer.body["error"]["type"], answer.session) == (409, "SessionLost", None)


async def test_a_part_that_fails_leaves_nothing_to_go_on_with(engine: Engine) -> None:
    call = part_of(uuid.uuid4().hex, 0, max_tokens=ENDLESS)
    task = await running(engine, call)
    await engine.abort(call.id)
    answer = await task
    assert answer.aborted
    assert answer.session is not None
    assert answer.session.parts == ()


# --- streams ---


@pytest.mark.parametrize("make", [chat, completion])
async def test_the_answer_of_a_stream_is_whole(engine: Engine, make: Any) -> None:
    chunks: list[dict[str, Any]] = []

    async def sink(chunk: dict[str, Any]) -> None:
        chunks.append(chunk)

    whole = await engine.answer(make(stream=True), sink)
    assert "".join(map(delta, chunks)) == text(whole)
    assert text(whole) == text(await engine.answer(make()))
    assert whole.body["usage"]["completion_tokens"] == 24


async def test_a_slow_reader_of_chunks_loses_nothing(engine: Engine) -> None:
    chunks: list[dict[str, Any]] = []
    turn = asyncio.Event()

    async def sink(chunk: dict[str, Any]) -> None:
        await turn.wait()
        chunks.append(chunk)

    call, other = chat(stream=True), chat(max_tokens=LONG)
    slow = asyncio.create_task(engine.answer(call, sink))
    await engine.answer(other)
    assert not slow.done()
    turn.set()
    whole = await slow
    assert "".join(map(delta, chunks)) == text(whole)


async def test_a_stream_that_nobody_reads_is_answered_whole(engine: Engine) -> None:
    assert text(await engine.answer(chat(stream=True))) == text(await engine.answer(chat()))


# --- going on with what another engine began ---


def comparable(body: Any) -> Any:
    """A body without what is made anew by each run: ids and times."""
    if isinstance(body, dict):
        made = {"id", "created", "created_at", "completed_at", "item_id", "call_id"}
        return {name: comparable(value) for name, value in body.items() if name not in made}
    return [comparable(value) for value in body] if isinstance(body, list) else body


def same(one: Any, other: Any) -> bool:
    """Whether two bodies are, but for the last digits of numbers: what shares a step is added up in another order."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
    return bool(one == other)


async def test_caches_are_forgotten_but_for_blocks_that_what_runs_holds(engine: Engine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await engine.reset_caches("llama", "prefix"):  # noqa: ASYNC110 - sessions of other tests wait
            await asyncio.sleep(0.1)
    call = completion(max_tokens=LONG)
    whole = text(await engine.answer(call))
    task = await running(engine, call)
    assert not await engine.reset_caches("llama", "prefix")
    assert not await engine.reset_caches()
    assert await engine.reset_caches("llama", "mm")
    assert await engine.reset_caches("llama", "encoder")
    assert await engine.reset_caches("llama", "prefix", running=True)
    assert text(await task) == whole
    assert await engine.reset_caches("llama", "prefix")
    with pytest.raises(UnknownModel):
        await engine.reset_caches("llame")


async def test_a_model_that_is_not_loaded_has_no_caches_and_nothing_to_profile(engine: Engine) -> None:
    await engine.switch("qwen")
    await engine.switch("llama")
    await engine.drop("qwen")
    for cache in ("prefix", "mm", "encoder", None):
        assert await engine.reset_caches("qwen", cache)
        assert await engine.reset_caches(cache=cache)
    for start in (True, False):
        with pytest.raises(UnknownModel, match="qwen is not loaded"):
            await engine.profile("qwen", start=start)
    assert (await engine.answer(chat("llama"))).status == 200


async def broken_off(engine: Engine, call: Call, **how: Any) -> Progress:
    """What a call had said when it ended in the middle: anew, where it had ended before anybody looked."""
    for _ in range(LOOKS):
        task = await running(engine, call, **how)
        await until(lambda task=task: task.done() or engine.progress(call.id) is not None)
        progress = engine.progress(call.id)
        if progress is not None and task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
            return Progress.model_validate_json(progress.model_dump_json())  # the bus carries it as JSON
    raise AssertionError(f"{call.id} had ended before it had said anything, {LOOKS} times")


@pytest.mark.parametrize("make", [chat, completion])
async def test_an_answer_goes_on_from_where_another_engine_left_it(engine: Engine, make: Any) -> None:
    uninterrupted = await engine.answer(make(max_tokens=LONG))
    call = make(max_tokens=LONG)
    progress = await broken_off(engine, call)
    assert 8 <= progress.tokens < LONG
    answer = await engine.answer(call, progress=progress)
    assert comparable(answer.body) == comparable(uninterrupted.body)
    assert (answer.continued, uninterrupted.continued) == ((progress.tokens,), ())


async def test_a_run_that_has_not_ended_is_not_gone_on_with_beside_itself(engine: Engine) -> None:
    call = chat(max_tokens=LONG)
    task, _ = await frozen(engine, call)
    await until(lambda: engine.progress(call.id) is not None)
    with pytest.raises(NotContinued, match="not ended"):
        await engine.answer(call, progress=engine.progress(call.id))
    await engine.switch("llama")
    assert (await task).status == 200


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_stream_goes_on_after_what_was_told_of_it(engine: Engine, make: Any) -> None:
    uninterrupted = await engine.answer(make(max_tokens=LONG))
    call = make(max_tokens=LONG, stream=True)
    told: list[str] = []
    progresses: list[Progress | None] = []

    async def sink(chunk: dict[str, Any]) -> None:
        told.append(delta(chunk))
        progresses.append(engine.progress(call.id))
        if len(told) == LONG // 3:
            await asyncio.Event().wait()  # what is not known to have arrived is told again

    for _ in range(LOOKS):  # where the machine stood still, it was told in fewer pieces
        told.clear()
        progresses.clear()
        task = asyncio.create_task(engine.answer(call, sink))
        await until(lambda task=task: len(told) == LONG // 3 or task.done())
        if not task.done():
            break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    progress = progresses[-1]
    assert progress is not None
    further: list[str] = []

    async def rest(chunk: dict[str, Any]) -> None:
        further.append(delta(chunk))

    answer = await engine.answer(call, rest, progress)
    assert "".join([*told[:-1], *further]) == text(answer) == text(uninterrupted)
    assert answer.continued == (progress.tokens,)
    assert progress.events == len(told) - 1
    assert len(further) <= LONG + 2 - progress.tokens


async def test_a_frozen_call_can_be_gone_on_with(engine: Engine) -> None:
    uninterrupted = text(await engine.answer(chat(max_tokens=LONG)))
    call = chat(max_tokens=LONG)
    task, _ = await frozen(engine, call)
    progress = engine.progress(call.id)
    await engine.abort(call.id)
    assert (await task).aborted
    assert progress is not None
    await engine.switch("llama")
    assert text(await engine.answer(call, progress=progress)) == uninterrupted


async def test_an_answer_is_gone_on_with_many_times(engine: Engine) -> None:
    """And by whoever has not come as far as its progress yet: nothing is lost on the way."""
    uninterrupted = await engine.answer(chat(max_tokens=LONG))
    call = chat(max_tokens=LONG)
    progress = await broken_off(engine, call)
    had = [progress.tokens]
    for _ in range(3):
        progress = await broken_off(engine, call, tokens=had[-1] + 8, progress=progress)
        assert progress.continued == tuple(had)
        had.append(progress.tokens)
        assert had[-1] >= had[-2] + 8
    answer = await engine.answer(call, progress=progress)
    assert comparable(answer.body) == comparable(uninterrupted.body)
    assert answer.continued == tuple(had)


async def test_another_prompt_is_not_gone_on_with(engine: Engine) -> None:
    call = chat(max_tokens=LONG)
    progress = await broken_off(engine, call)
    other = replace(chat(text="Who is she?", max_tokens=LONG), id=call.id)
    with pytest.raises(NotContinued, match="prompt"):
        await engine.answer(other, progress=progress)
    with pytest.raises(NotContinued):
        await engine.answer(replace(call, id="another"), progress=progress)
    with pytest.raises(NotContinued):
        await engine.answer(call, progress=progress.model_copy(update={"engine": "another"}))
    assert (await engine.answer(other)).status == 200


async def test_what_has_said_nothing_has_no_progress(engine: Engine) -> None:
    assert engine.progress("nobody") is None
    call = chat()
    await engine.answer(call)
    assert engine.progress(call.id) is None


# --- ending a call ---


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("make", [chat, completion])
async def test_an_aborted_call_returns_with_what_it_has(engine: Engine, make: Any, streamed: bool) -> None:
    uninterrupted = text(await engine.answer(make(max_tokens=LONG)))

    async def sink(_chunk: dict[str, Any]) -> None: ...

    call = make(max_tokens=ENDLESS, stream=streamed)
    task = await running(engine, call, **({"on_chunk": sink} if streamed else {}))
    await engine.abort(call.id)
    answer = await task
    assert answer.aborted
    assert answer.body["choices"][0]["finish_reason"] == "abort"
    assert 8 <= answer.body["usage"]["completion_tokens"] < ENDLESS
    assert text(answer)
    assert is_part(text(answer), uninterrupted)


async def test_steps_are_counted_of_whichever_model_takes_them(engine: Engine) -> None:
    for alias in ("llama", "qwen"):
        if engine.active != alias:
            await engine.switch(alias)
        before = engine.steps
        await engine.answer(chat(alias, max_tokens=24))
        assert engine.steps >= before + 24


async def test_an_unknown_call_can_be_aborted_and_has_no_tokens(engine: Engine) -> None:
    await engine.abort("nobody")
    assert engine.tokens("nobody") == 0


async def test_a_call_that_is_over_has_no_tokens(engine: Engine) -> None:
    call = chat()
    await engine.answer(call)
    assert engine.tokens(call.id) == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_the_task_ends_the_call(engine: Engine, streamed: bool) -> None:
    """Frozen, so that it can't end by itself."""

    async def sink(_chunk: dict[str, Any]) -> None: ...

    call = chat(max_tokens=ENDLESS, stream=streamed)
    task = await running(engine, call, **({"on_chunk": sink} if streamed else {}))
    await engine.switch("qwen")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: all(context.unfinished == 0 for context in engine.contexts()))


async def test_a_sink_that_fails_ends_the_call_with_its_failure(engine: Engine) -> None:
    async def sink(_chunk: dict[str, Any]) -> None:
        raise ConnectionError("the broker is gone")

    with pytest.raises(ConnectionError, match="the broker is gone"):
        await engine.answer(chat(max_tokens=LONG, stream=True), sink)
    await until(lambda: all(context.unfinished == 0 for context in engine.contexts()))


# --- switching ---


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_call_frozen_by_a_switch_goes_on_as_if_nothing_had_been(engine: Engine, make: Any) -> None:
    uninterrupted = text(await engine.answer(make(max_tokens=LONG)))
    call = make(max_tokens=LONG)
    task, report = await frozen(engine, call)
    assert report.kept == 1
    had = engine.tokens(call.id)
    assert (await engine.answer(make("qwen"))).status == 200
    assert 0 < engine.tokens(call.id) == had
    assert not task.done()
    await engine.switch("llama")
    answer = await task
    assert text(answer) == uninterrupted
    assert answer.body["usage"]["completion_tokens"] == LONG


async def test_a_call_for_another_model_waits_for_its_turn(engine: Engine) -> None:
    alone = text(await engine.answer(chat()))
    await engine.switch("qwen")
    waiting = asyncio.create_task(engine.answer(chat()))
    await engine.answer(chat("qwen"))
    assert not waiting.done()
    await engine.switch("llama")
    assert text(await waiting) == alone


async def test_a_frozen_call_can_be_aborted(engine: Engine) -> None:
    call = chat(max_tokens=ENDLESS)
    task = await running(engine, call)
    await engine.switch("qwen")
    await engine.abort(call.id)
    answer = await task
    assert answer.aborted
    assert engine.active == "qwen"
    assert text(answer)


async def test_draining_finishes_what_runs(engine: Engine) -> None:
    task = await running(engine, chat(max_tokens=LONG))
    report = await engine.switch("qwen", mode=SwitchMode.DRAIN, drain_timeout=60)
    answer = await task
    assert not answer.aborted
    assert answer.body["usage"]["completion_tokens"] == LONG
    assert (report.kept, report.aborted) == (0, 0)


async def test_a_drain_that_is_too_short_aborts_what_is_left(engine: Engine) -> None:
    task = await running(engine, chat(max_tokens=ENDLESS))
    report = await engine.switch("qwen", mode=SwitchMode.DRAIN, drain_timeout=0, leftover=Leftover.ABORT)
    assert (await task).aborted
    assert report.aborted == 1


async def test_a_drain_that_is_too_short_keeps_what_is_left_if_told_so(engine: Engine) -> None:
    drain = {"mode": SwitchMode.DRAIN, "drain_timeout": 0, "leftover": Leftover.KEEP}
    task, report = await frozen(engine, chat(max_tokens=LONG), **drain)
    assert (report.kept, report.aborted) == (1, 0)
    await engine.switch("llama")
    assert not (await task).aborted


async def test_aborting_ends_what_runs(engine: Engine) -> None:
    task = await running(engine, chat(max_tokens=ENDLESS))
    report = await engine.switch("qwen", mode=SwitchMode.ABORT)
    assert (await task).aborted
    assert report.aborted == 1


async def test_a_switch_tells_its_phases_and_what_it_did(engine: Engine) -> None:
    steps: list[Transition] = []
    report = await engine.switch("qwen", observe=steps.append)
    assert [step.phase for step in steps] == [SwitchPhase.ACCEPTED, SwitchPhase.SWITCHING, SwitchPhase.COMPLETED]
    assert steps[-1].report == report
    assert (report.from_model, report.to_model, report.switched) == ("llama", "qwen", True)
    assert report.ms > 0
    assert engine.active == "qwen"
    assert [context.alias for context in engine.contexts() if context.active] == ["qwen"]


async def test_a_switch_to_the_active_model_does_nothing(engine: Engine) -> None:
    steps: list[Transition] = []
    report = await engine.switch("llama", observe=steps.append)
    assert steps[-1].phase is SwitchPhase.NO_OP
    assert not report.switched


async def test_switches_asked_at_once_are_done_one_after_another(engine: Engine) -> None:
    first, second = await asyncio.gather(engine.switch("qwen"), engine.switch("llama"))
    assert (first.from_model, first.to_model) == ("llama", "qwen")
    assert (second.from_model, second.to_model) == ("qwen", "llama")


async def test_a_switch_to_an_unknown_model_names_the_nearest(engine: Engine) -> None:
    with pytest.raises(UnknownModel, match="did you mean 'llama'"):
        await engine.switch("lama")
    assert engine.active == "llama"


async def test_the_active_model_is_resident(engine: Engine) -> None:
    assert [context.tier for context in engine.contexts() if context.active] == [Tier.RESIDENT]


# --- tiers ---


@pytest.mark.parametrize("tier", [Tier.PARKED, Tier.DROPPED])
async def test_a_model_comes_back_from_any_tier_and_says_the_same(engine: Engine, tier: Tier) -> None:
    await engine.switch("qwen")
    before = text(await engine.answer(chat("qwen")))
    await engine.switch("llama")
    info = await (engine.park("qwen") if tier is Tier.PARKED else engine.drop("qwen"))
    assert (info.alias, info.tier, info.active) == ("qwen", tier, False)
    assert (await engine.switch("qwen")).tier_found is tier
    assert text(await engine.answer(chat("qwen"))) == before


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_the_tiers_alone_are_those_of_the_contexts(engine: Engine, level: int) -> None:
    async def check(step: Awaitable[object]) -> None:
        await step
        assert engine.tiers() == {context.alias: context.tier for context in engine.contexts()}

    await check(engine.switch("qwen"))
    await check(engine.park("llama"))
    await check(engine.drop("llama"))
    await check(engine.sleep(level))
    await check(engine.wake())
    await check(engine.switch("llama"))


async def test_preloading_leaves_the_active_model_active(engine: Engine) -> None:
    await engine.switch("qwen")
    await engine.switch("llama")
    await engine.drop("qwen")
    info = await engine.preload("qwen")
    assert (info.tier, info.active) == (Tier.RESIDENT, False)
    assert engine.active == "llama"


async def test_a_pin_is_seen(engine: Engine) -> None:
    assert (await engine.pin("llama", True)).pinned
    assert [context.alias for context in engine.contexts() if context.pinned] == ["llama"]
    assert not (await engine.pin("llama", False)).pinned


@pytest.mark.parametrize("operation", ["preload", "park", "drop"])
async def test_operations_on_an_unknown_model_name_the_nearest(engine: Engine, operation: str) -> None:
    with pytest.raises(UnknownModel, match="did you mean 'qwen'"):
        await getattr(engine, operation)("qwenn")
