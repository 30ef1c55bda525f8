"""A prompt that arrives in parts while it is being answered: over the bus, on the real engine."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.progress import Part
from schemas.requests import Endpoint
from service.client import RequestFailed, SyncClient
from service.ports import Call, Turn
from tests.support.doors import Doors, open_doors
from tests.support.engine_spec import until
from tests.support.pool import kept_progress
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.broker]

FIRST, SECOND, THIRD = [70, 81, 92, 103], [110, 90, 77], [99, 88]
Body = dict[str, Any]


@pytest.fixture(scope="module")
async def doors(vllm_engine: Any, broker: Any) -> AsyncIterator[Doors]:
    await vllm_engine.switch("llama")
    async with open_doors(vllm_engine, broker.bootstrap) as opened:
        yield opened


def greedy(max_tokens: int, model: str = "llama") -> Body:
    return {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def ids(answer: Any) -> list[int]:
    return list(answer.choices[0].token_ids)


async def at_once(doors: Doors, prompt: list[int], max_tokens: int) -> list[int]:
    """What one prompt is answered with."""
    return ids(await doors.bus.complete(prompt=prompt, **greedy(max_tokens)))


@pytest.mark.long
async def test_the_parts_of_a_prompt_are_answered_as_one_prompt_would_be(doors: Doors) -> None:
    session = doors.bus.session(**greedy(1))
    await session.complete(FIRST)
    await session.complete(SECOND)
    last = await session.complete(THIRD, final=True, max_tokens=16)
    assert ids(last) == await at_once(doors, FIRST + SECOND + THIRD, 16)
    assert last.usage.completion_tokens == 16


@pytest.mark.long
async def test_the_token_that_is_discarded_before_a_part_is_nobodys_cached_prompt(doors: Doors) -> None:
    """It would have been the last one of its block."""
    await doors.engine.switch("llama")
    block = doors.engine.multi.context("llama").vllm_config.cache_config.block_size
    begun = [5 + n % 90 for n in range(block - 1)]
    (discarded,) = await at_once(doors, begun, 1)
    prompt = [*begun, discarded, 70, 71, 72]

    async def said() -> list[float]:
        answer = await doors.bus.complete(prompt=prompt, logprobs=1, **greedy(16))
        return list(answer.choices[0].logprobs.token_logprobs)

    alone = await said()
    await doors.engine.multi.reset_prefix_cache(model="llama")
    session = doors.bus.session(**greedy(1))
    await session.complete(begun)
    await session.complete([(discarded + 7) % 90 + 5, 73, 74], final=True)
    assert await said() == pytest.approx(alone, abs=1e-4)


async def test_a_part_goes_on_after_the_answer_to_the_one_before_it_also_after_a_switch(doors: Doors) -> None:
    session = doors.bus.session(**greedy(8))
    first = ids(await session.complete(FIRST))
    await doors.bus.switch("qwen")
    (here,) = doors.engine._sessions._open.values()
    second = ids(await session.complete(SECOND, final=True))
    assert here._ended == "part 1 of this session was its last", "it went on where it was"
    assert first == await at_once(doors, FIRST, 8)
    # vLLM keeps what it has computed, which the last token of an answer is not.
    assert second == await at_once(doors, FIRST + first[:-1] + SECOND, 8)


@pytest.mark.long
async def test_parts_that_come_while_the_model_is_at_it_are_answered_in_their_order(doors: Doors) -> None:
    session = doors.bus.session(**greedy(40))
    parts = (FIRST, SECOND, THIRD)
    asked = [asyncio.create_task(session.complete(part, final=part is THIRD)) for part in parts]
    answers = [ids(answer) for answer in await asyncio.gather(*asked)]
    prompt: list[int] = []
    for part, answer in zip(parts, answers, strict=True):
        prompt += part
        assert answer == await at_once(doors, prompt, 40)
        prompt += answer[:-1]


@pytest.mark.long
async def test_a_streamed_part_is_told_in_pieces_that_make_its_answer(doors: Doors) -> None:
    session = doors.bus.session(**greedy(8))
    await session.complete(FIRST)
    stream = session.stream(SECOND, final=True)
    pieces = [piece async for piece in stream]
    told = [token for piece in pieces for choice in piece.choices for token in choice.token_ids or ()]
    assert told == ids(stream.answer)
    assert len(told) == 8
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == stream.answer.choices[0].text


@pytest.mark.long
async def test_the_synchronous_client_has_sessions_too(doors: Doors) -> None:
    def work() -> tuple[list[int], str]:
        with SyncClient(settings=doors.settings, timeout_s=60) as client:
            session = client.session(**greedy(8))
            return ids(session.complete(FIRST)), "".join(p.choices[0].text for p in session.stream(SECOND, final=True))

    first, told = await asyncio.to_thread(work)
    again = await doors.bus.complete(prompt=FIRST + first[:-1] + SECOND, **greedy(8))
    assert told == again.choices[0].text


@pytest.mark.long
async def test_a_chat_goes_on_in_a_session_too(doors: Doors) -> None:
    place = {"session": uuid.uuid4().hex, "model": "llama", "max_tokens": 12, "temperature": 0}
    say = [{"role": "user", "content": "Who are you?"}]
    first = await doors.bus.chat(messages=say, part=0, final=False, **place)
    second = await doors.bus.chat(messages=say, part=1, **place)
    alone = await doors.bus.chat(messages=say, model="llama", max_tokens=12, temperature=0)
    assert first.choices[0].message.content == alone.choices[0].message.content
    assert second.usage.prompt_tokens == 2 * alone.usage.prompt_tokens


async def refused(asked: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await asked
    return caught.value


@pytest.mark.long
async def test_a_part_of_a_session_that_is_not_here_is_refused(doors: Doors) -> None:
    session = doors.bus.session(**greedy(2))
    await session.complete(FIRST, final=True)
    late = {"session": session.name, "part": 1}
    error = await refused(doors.bus.complete(prompt=SECOND, **greedy(2), **late))
    assert (error.status, error.error.type) == (409, "SessionLost")
    assert "begin again" in error.error.message


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": "x"},
        {"n": 2},
        {"prompt": [[70], [71]]},
        {"prompt": [70] * 4090},
        {"use_beam_search": True},
        {"max_tokens": -1},
    ],
)
async def test_a_part_that_can_not_be_taken_ends_its_session_and_nothing_else(doors: Doors, wrong: Body) -> None:
    session = doors.bus.session(**greedy(8))
    await session.complete(FIRST)
    changed = {"prompt": SECOND, **wrong}
    error = await refused(session.complete(changed.pop("prompt"), **changed))
    assert error.status == 400
    error = await refused(session.complete(THIRD))
    assert error.status == 409
    assert len(await at_once(doors, FIRST, 4)) == 4
    await until(lambda: not any(info.unfinished for info in doors.engine.contexts()))


async def forget(doors: Doors) -> None:
    """Let the engine know nothing of any session, as one in another process."""
    await doors.engine._sessions.close()
    await until(lambda: not any(info.unfinished for info in doors.engine.contexts()))


async def test_a_session_that_its_engine_lost_goes_on_as_if_it_had_not(doors: Doors) -> None:
    parts = (FIRST, SECOND, THIRD)
    here, lost = doors.bus.session(**greedy(8)), doors.bus.session(**greedy(8))
    undisturbed = [await here.complete(part, final=part is THIRD) for part in parts]
    answers = []
    for part in parts:
        answers.append(await lost.complete(part, final=part is THIRD))
        await forget(doors)
    assert list(map(ids, answers)) == list(map(ids, undisturbed))
    for answer, wanted in zip(answers, undisturbed, strict=True):
        assert answer.usage == wanted.usage
        assert answer.choices[0].text == wanted.choices[0].text
        assert answer.choices[0].prompt_token_ids == wanted.choices[0].prompt_token_ids


@pytest.mark.long
async def test_parts_that_come_together_go_on_with_a_session_that_was_lost_in_their_order(doors: Doors) -> None:
    here, lost = doors.bus.session(**greedy(8)), doors.bus.session(**greedy(8))
    undisturbed = [await here.complete(part) for part in (FIRST, SECOND)] + [await here.complete(THIRD, final=True)]
    await lost.complete(FIRST)
    await forget(doors)
    answers = await asyncio.gather(lost.complete(SECOND), lost.complete(THIRD, final=True))
    assert list(map(ids, answers)) == list(map(ids, undisturbed[1:]))
    assert [answer.usage for answer in answers] == [answer.usage for answer in undisturbed[1:]]


@pytest.mark.long
@pytest.mark.parametrize("changed", [{"seed": 7, "temperature": 1.0}, {"temperature": 1.0}])
async def test_a_seeded_session_is_in_its_process_alone(doors: Doors, changed: Body) -> None:
    session = doors.bus.session(**{**greedy(8), **changed})
    await session.complete(FIRST)
    await forget(doors)
    if "seed" in changed:
        assert (await refused(session.complete(SECOND))).status == 409
    else:
        assert len(ids(await session.complete(SECOND, final=True))) == 8


@pytest.mark.long
async def test_a_session_that_goes_on_echoes_what_was_asked_in_all_its_parts(doors: Doors) -> None:
    echoing = {**greedy(8), "echo": True, "return_token_ids": False}
    here, lost = doors.bus.session(**echoing), doors.bus.session(**echoing)
    undisturbed = [await here.complete("Who are you?"), await here.complete("And why?", final=True)]
    first = await lost.complete("Who are you?")
    await forget(doors)
    answers = [first, await lost.complete("And why?", final=True)]
    assert [answer.choices[0].text for answer in answers] == [answer.choices[0].text for answer in undisturbed]
    assert answers[1].choices[0].text.startswith("Who are you?And why?")


@pytest.mark.long
async def test_a_session_of_tokens_that_the_model_has_not_is_refused(doors: Doors) -> None:
    call = part(uuid.uuid4().hex, 0, FIRST, 4)
    first = (await doors.engine.answer(call)).session
    assert first is not None
    forged = first.model_copy(update={"parts": (Part(prompt=[1 << 30], said=[1]),)})
    answer = await doors.engine.answer(part(uuid.uuid4().hex, 1, SECOND, 4), None, forged)
    assert answer.status == 409
    assert "no such tokens" in json.dumps(answer.body)
    await forget(doors)


@pytest.mark.long
async def test_a_session_that_hears_nothing_ends_and_gives_its_memory_back(broker: Any, doors: Doors) -> None:
    sessions = doors.engine._sessions
    idle_s, sessions.idle_s = sessions.idle_s, 0.2
    try:
        async with open_doors(doors.engine, broker.bootstrap, session_idle_s=0.2) as impatient:
            session = impatient.bus.session(**greedy(4))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(until(lambda: len(sessions) == 1))
                tasks.create_task(session.complete(FIRST))
            await until(lambda: len(sessions) == 0)
            await until(lambda: not any(info.unfinished for info in doors.engine.contexts()))
            async with asyncio.timeout(PATIENCE_S):
                while await kept_progress(impatient.settings):
                    pass
            assert (await refused(session.complete(SECOND))).status == 409
    finally:
        sessions.idle_s = idle_s


@pytest.mark.long
@pytest.mark.parametrize("early", [True, False])
async def test_a_part_does_not_wait_for_ever_for_one_that_does_not_come(doors: Doors, early: bool) -> None:
    sessions = doors.engine._sessions
    idle_s, sessions.idle_s = sessions.idle_s, 0.2
    try:
        name = uuid.uuid4().hex
        first = asyncio.create_task(doors.engine.answer(part(name, 0, FIRST, 4)))
        await asyncio.wait([first], timeout=0 if early else None)
        async with asyncio.timeout(PATIENCE_S):
            answer = await doors.engine.answer(part(name, 2, THIRD, 4))
        assert [(await first).status, answer.status] == [200, 409]
    finally:
        sessions.idle_s = idle_s


@pytest.mark.long
async def test_a_waiting_session_does_not_keep_its_model_in_memory_and_goes_on_all_the_same(doors: Doors) -> None:
    session = doors.bus.session(**greedy(4))
    first = ids(await session.complete(FIRST))
    await doors.bus.switch("qwen")
    assert (await doors.engine.park("llama")).tier == "parked"
    second = ids(await session.complete(SECOND, final=True))
    assert second == await at_once(doors, FIRST + first[:-1] + SECOND, 4)


def part(name: str, number: int, prompt: list[int], max_tokens: int) -> Call:
    """A part of a session, as the worker asks the engine for it."""
    body = {"prompt": prompt, **greedy(max_tokens)}
    turn = Turn(name, number, final=False)
    return Call(id=uuid.uuid4().hex, alias="llama", endpoint=Endpoint.COMPLETIONS, body=body, turn=turn)


@pytest.mark.long
async def test_an_aborted_part_ends_with_what_it_has_and_ends_its_session(doors: Doors) -> None:
    engine = doors.engine
    await engine.switch("llama")
    name = uuid.uuid4().hex

    first, long, waiting = part(name, 0, FIRST, 4), part(name, 1, SECOND, 2000), part(name, 2, THIRD, 4)
    assert (await engine.answer(first)).status == 200
    running = asyncio.create_task(engine.answer(long))
    behind = asyncio.create_task(engine.answer(waiting))
    await until(lambda: engine.tokens(long.id) > 8)
    assert engine.tokens(long.id) < 2000
    await engine.abort(long.id)
    answer = await running
    assert answer.aborted
    assert 8 < answer.body["usage"]["completion_tokens"] < 2000
    assert (await behind).status == 409


@pytest.mark.long
async def test_a_part_without_its_number_is_refused_on_the_bus(doors: Doors) -> None:
    body = {"prompt": FIRST, **greedy(2)}
    request_id = await doors.bus.submit(body, session=uuid.uuid4().hex)
    result = await doors.bus.result(request_id)
    assert result.status == 400
    assert "'part'" in json.dumps(result.error.model_dump())
