"""Calls that outlive their connection and their worker: asked at one door, answered by any."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiokafka import AIOKafkaProducer
from starlette.applications import Starlette

from schemas.base import Origin, Record
from schemas.codec import encode_chunk, encode_dead_letter, encode_result
from schemas.errors import ErrorObject, FailureClass
from schemas.requests import Attempt
from schemas.results import Chunk, Outcome, Result, Timing
from service.http.durable import Durable
from service.kafka.calls import Calls
from service.kafka.dead_letters import read_dead_letter, redrive
from service.kafka.files import begin_of, owner_named
from service.kafka.producer import IdempotentProducer
from service.kafka.topics import ensure_topics
from tests.support.bus import Bus, until
from tests.support.http_pool import Pool, official
from tests.support.pool import delete_topics
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def pool(bootstrap: str) -> AsyncIterator[Pool]:
    made = Pool(bootstrap)
    await ensure_topics(made.settings, ["llama", "qwen"])
    yield made
    await delete_topics(made.settings)


def claude(door: httpx.AsyncClient) -> anthropic.AsyncAnthropic:
    """Anthropic's client at a door; it comes with connections of its own."""
    return anthropic.AsyncAnthropic(base_url=str(door.base_url), api_key="none", max_retries=0)


async def finished(client: openai.AsyncOpenAI, id_: str) -> Any:
    found: list[Any] = []

    async def done() -> bool:
        found[:] = [await client.responses.retrieve(id_)]
        return found[0].status not in {"queued", "in_progress"}

    await until(done)
    return found[0]


async def test_a_background_response_is_found_at_any_door_after_every_worker_was_replaced(pool: Pool) -> None:
    async with pool.door("one") as one:
        asked = [
            await official(one).responses.create(
                model=model, input="hello", background=True, max_output_tokens=4, metadata={"of": model}
            )
            for model in ("llama", "qwen") * 5
        ]
        assert {response.status for response in asked} <= {"queued", "in_progress", "completed"}
        assert all(response.background for response in asked)
    async with pool.door("two", step_s=0.0) as two:
        for response, model in zip(asked, ("llama", "qwen") * 5, strict=True):
            found = await finished(official(two), response.id)
            assert (found.id, found.status, found.model) == (response.id, "completed", model)
            assert found.output_text == "".join(f"{model}{i} " for i in range(4))
    assert set((await pool.answers()).values()) == {1}


async def test_a_background_stream_goes_on_behind_the_event_that_was_seen_last(pool: Pool) -> None:
    async with pool.door("one") as one, pool.door("two") as two:
        stream = await official(one).responses.create(
            model="llama", input="hello", background=True, stream=True, max_output_tokens=8
        )
        seen = []
        async for event in stream:
            seen.append(event)
            if event.sequence_number == 2:
                break
        await stream.close()
        (asked,) = await until_answered(pool, 1)
        rest = await official(two).responses.retrieve(asked, stream=True, starting_after=2)
        numbers = [event.sequence_number async for event in rest]
        assert [event.sequence_number for event in seen] + numbers == list(range(9))
        whole = await official(two).responses.retrieve(asked, stream=True)
        last = [event async for event in whole][-1]
        assert (last.type, last.response.id) == ("response.completed", asked)


async def until_answered(pool: Pool, count: int) -> list[str]:
    found: list[str] = []

    async def all_there() -> bool:
        found[:] = list(await pool.answers())
        return len(found) >= count

    await until(all_there)
    return found


async def test_a_response_goes_on_with_one_that_another_door_was_asked(pool: Pool) -> None:
    async with pool.door("one") as one, pool.door("two") as two:
        first = await official(one).responses.create(model="llama", input="hello", background=True, max_output_tokens=2)
        said = (await finished(official(two), first.id)).output[0].content[0].text
        second = await official(two).responses.create(
            model="llama", input="and then", background=True, previous_response_id=first.id, max_output_tokens=1
        )
        assert (await finished(official(one), second.id)).status == "completed"
        with pytest.raises(openai.NotFoundError) as caught:
            await official(two).responses.create(model="llama", input="x", previous_response_id=first.id[:-1] + "_")
        assert caught.value.param == "previous_response_id"
    asked = (await pool.asked())[second.id]
    assert [item.get("role") for item in asked["input"]] == ["user", "assistant", "user"]
    assert [item["content"] for item in asked["input"][::2]] == ["hello", "and then"]
    assert asked["input"][1]["content"][0]["text"] == said
    assert "previous_response_id" not in asked


async def test_one_key_is_one_response_though_what_it_went_on_with_is_gone(pool: Pool) -> None:
    body = {"model": "llama", "input": "and then", "max_output_tokens": 1}
    headers = {"idempotency-key": "k"}
    async with pool.door("one") as one, pool.door("two") as two:
        first = await official(one).responses.create(model="llama", input="hello", background=True, max_output_tokens=2)
        await finished(official(one), first.id)
        body["previous_response_id"] = first.id
        asked = (await one.post("/v1/responses", json=body, headers=headers)).json()
        assert (await one.delete(f"/v1/responses/{first.id}")).is_success
        again = await two.post("/v1/responses", json=body, headers=headers)
        assert (again.status_code, again.json()) == (200, asked)
        other = await two.post("/v1/responses", json={**body, "max_output_tokens": 2}, headers=headers)
        assert (other.status_code, "used for another request" in other.text) == (409, True)
        new = await two.post("/v1/responses", json=body, headers={"idempotency-key": "another"})
        assert (new.status_code, new.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_response_says_which_one_it_goes_on_with(pool: Pool) -> None:
    async with pool.door("one", step_s=0.02) as one:
        client = official(one).responses
        first = await client.create(model="llama", input="hello", background=True, max_output_tokens=2)
        await finished(official(one), first.id)
        options = {"model": "llama", "input": "and then", "previous_response_id": first.id, "background": True}
        asked = await client.create(**options, max_output_tokens=100_000)
        ended = await client.cancel(asked.id)
        second = await client.create(**options, max_output_tokens=2)
        told = [asked, ended, second, await finished(official(one), second.id)]
        assert {response.status for response in told} >= {"cancelled", "completed"}
        stream = await client.create(**options, stream=True, max_output_tokens=2)
        told += [event.response for event in [event async for event in stream] if hasattr(event, "response")]
        third = told[-1].id
        stream = await client.retrieve(third, stream=True)
        told += [event.response for event in [event async for event in stream] if hasattr(event, "response")]
        found = (await one.get(f"/v1/calls/{third}")).json()
        assert [response.previous_response_id for response in told] == [first.id] * len(told)
        assert (found["previous_response_id"], first.previous_response_id) == (first.id, None)
        assert len(told) == 6


async def test_what_was_said_before_counts_among_what_a_door_holds(pool: Pool) -> None:
    async with pool.door("one", max_waiting_bytes=8192) as one:
        client = official(one)
        first = await client.responses.create(model="llama", input="x" * 3000, background=True, max_output_tokens=500)
        assert (await finished(client, first.id)).status == "completed"
        with pytest.raises(openai.RateLimitError, match="arriving"):
            await client.responses.create(
                model="llama", input="x" * 3000, background=True, previous_response_id=first.id
            )
        asked = await client.responses.create(model="llama", input="x" * 3000, background=True, max_output_tokens=1)
        assert (await finished(client, asked.id)).status == "completed"


@asynccontextmanager
async def unreadable(pool: Pool) -> AsyncIterator[None]:
    """What is written among the calls meanwhile is not read, because of an unfinished transaction in front of it."""
    bootstrap, prefix = pool.settings.kafka.bootstrap_servers, pool.settings.topics.topic_prefix
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=prefix) as producer:
        await producer.begin_transaction()
        for partition in await producer.partitions_for(f"{prefix}calls"):
            await producer.send_and_wait(f"{prefix}calls", b"{}", partition=partition)
        try:
            yield
        finally:
            await producer.abort_transaction()


async def test_a_body_counts_among_what_a_door_holds_until_its_call_is_in_the_log(pool: Pool) -> None:
    headers, body = {"prefer": "respond-async"}, {"model": "llama", "prompt": "x" * 5000}
    async with pool.door("one", max_waiting_bytes=8192) as one:
        async with unreadable(pool):
            asking = asyncio.create_task(one.post("/v1/completions", json=body, headers=headers))
            bus, calls = Bus(pool.settings.kafka.bootstrap_servers), pool.settings.topics.named("calls")

            async def written() -> bool:
                return b"x" * 5000 in b"".join([r.value for r in await bus.read(calls, isolation="read_uncommitted")])

            await until(written)
            assert (await one.post("/v1/completions", json=body, headers=headers)).status_code == 429
        await asking
        assert (await one.post("/v1/completions", json=body, headers=headers)).status_code == 202


async def test_what_is_cancelled_says_so_and_what_is_deleted_is_nobody_s_at_once(pool: Pool) -> None:
    async with pool.door("one", step_s=0.02) as one, pool.door("two", step_s=0.02) as two:
        asked = await official(one).responses.create(
            model="llama", input="hello", background=True, max_output_tokens=100_000
        )
        assert (await official(two).responses.cancel(asked.id)).status == "cancelled"
        assert (await official(one).responses.retrieve(asked.id)).status == "cancelled"
        await official(two).responses.delete(asked.id)
        for door in (one, two):
            with pytest.raises(openai.NotFoundError) as caught:
                await official(door).responses.retrieve(asked.id)
            assert asked.id in caught.value.message
    async with pool.door("three") as three:
        assert (await three.get(f"/v1/responses/{asked.id}")).status_code == 404


async def test_without_a_model_the_active_one_is_meant_durable_or_not(pool: Pool) -> None:
    async with pool.door("one") as one:
        for body in ({"prompt": "hello", "max_tokens": 2}, {"prompt": "hello", "max_tokens": 2, "model": ""}):
            plain = await one.post("/v1/completions", json=body)
            kept = [
                await one.post("/v1/completions", json=body, headers={"idempotency-key": str(sorted(body))})
                for _ in range(2)
            ]
            assert [each.status_code for each in kept] == [plain.status_code] * 2, kept[0].text
            if plain.is_success:
                assert [each.json()["choices"] for each in kept] == [plain.json()["choices"]] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_for_a_call_that_is_deleted_is_told_so_at_once(pool: Pool, stream: bool) -> None:
    """Where the worker has no room to read it, nobody would ever say a result of it."""
    endless = {"model": "llama", "prompt": "hello", "max_tokens": 100_000, "stream": stream}
    async with pool.door("one", step_s=0.02, max_running=1, max_waiting=1) as one:
        for _ in range(3):
            assert (await one.post("/v1/completions", json=endless, headers={"prefer": "respond-async"})).is_success
        headers = {"idempotency-key": "a key"}
        asked = await one.post("/v1/completions", json=endless, headers={**headers, "prefer": "respond-async"})
        waiting = asyncio.create_task(one.post("/v1/completions", json=endless, headers=headers))
        await one.get("/health")  # in whichever order the server has the two
        assert (await one.delete(asked.headers["location"])).is_success
        async with asyncio.timeout(PATIENCE_S):
            answer = await waiting
        assert (answer.status_code, "was deleted" in answer.text) == (409, True)


async def test_a_call_that_failed_where_it_had_been_moved_to_is_redriven_among_the_calls(pool: Pool) -> None:
    topics = pool.settings.topics
    moved = Record(topics.for_alias("llama"), 0, 0, 1.0, b"c1", b"{}", [("reply-to", topics.named("answers").encode())])
    error = ErrorObject(message="it died")
    dead = encode_dead_letter("dead-letters", moved, id_="c1", failure=FailureClass.POISON, error=error, attempts=2)
    letter = read_dead_letter(Record(dead.topic, 0, 0, 1.0, dead.key, dead.value, dead.headers))
    again = await redrive(pool.settings, [letter])
    assert list(await pool.asked()) == [again["c1"]]


async def test_no_owner_has_more_than_a_share_of_the_unfinished_calls_and_finished_ones_do_not_count(
    pool: Pool, tmp_path: Path
) -> None:
    (keys := tmp_path / "keys").write_text("mine\nother\n")
    async with pool.door("one", step_s=0.02, api_keys_file=keys, http_most_calls=4) as one:
        mine, other = official(one, "mine").responses, official(one, "other").responses
        endless = await mine.create(model="llama", input="hello", background=True, max_output_tokens=100_000)
        with pytest.raises(openai.RateLimitError) as caught:
            await mine.create(model="llama", input="hello", background=True)
        assert "1 durable calls of yours" in caught.value.message
        for _ in range(2):
            short = await other.create(model="llama", input="hello", background=True, max_output_tokens=1)
            await finished(official(one, "other"), short.id)
        await mine.cancel(endless.id)
        await mine.create(model="llama", input="hello", background=True, max_output_tokens=1)


async def test_every_endpoint_may_be_asked_for_later(pool: Pool) -> None:
    async with pool.door("one") as one, pool.door("two") as two:
        body = {"model": "qwen", "messages": HELLO, "max_tokens": 3}
        headers = {"prefer": "wait=5, respond-async"}
        accepted = await one.post("/v1/chat/completions", json=body, headers=headers)
        assert (accepted.status_code, accepted.headers["preference-applied"]) == (202, "respond-async")
        place = accepted.headers["location"]
        answer = await two.get(place)
        while answer.status_code == 202:
            assert answer.json()["status"] in {"queued", "in_progress"}
            answer = await two.get(place)
        assert answer.json()["choices"][0]["message"]["content"] == "qwen0 qwen1 qwen2 "
        unknown = await one.post("/v1/completions", json={"model": "nobody", "prompt": "x"}, headers=headers)
        while (answer := await two.get(unknown.headers["location"])).status_code == 202:
            pass
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        assert (await one.delete(place)).json()["deleted"] is True
        assert (await two.get(place)).status_code == 404


async def test_a_call_that_waits_or_runs_here_says_when_to_ask_again(pool: Pool) -> None:
    async with pool.door("one", step_s=0.01) as one:
        body = {"model": "llama", "prompt": "x", "max_tokens": 100}
        for _ in range(2):
            assert (await one.post("/v1/completions", json=body)).status_code == 200
        asked = {**body, "max_tokens": 5000}
        place = (await one.post("/v1/completions", json=asked, headers={"prefer": "respond-async"})).headers["location"]

        async def known() -> bool:
            return int((await one.get(place)).headers["retry-after"]) > 20

        await until(known)
        assert (await one.delete(place)).json()["deleted"] is True


async def test_anthropic_s_messages_outlive_their_door_and_one_key_is_one_message(pool: Pool) -> None:
    body: dict[str, Any] = {"model": "qwen", "messages": HELLO, "max_tokens": 3}
    text = "qwen0 qwen1 qwen2 "
    async with pool.door("one") as one:
        accepted = await one.post("/v1/messages", json=body, headers={"prefer": "respond-async"})
        streamed = await one.post("/v1/messages", json={**body, "stream": True}, headers={"prefer": "respond-async"})
        assert [answer.status_code for answer in (accepted, streamed)] == [202, 202]
        async with claude(one) as client:
            first = await client.messages.create(**body, extra_headers={"idempotency-key": "k"})
    async with pool.door("two") as two, claude(two) as client:
        while (answer := await two.get(accepted.headers["location"])).status_code == 202:
            pass
        assert (answer.json()["type"], answer.json()["content"]) == ("message", [{"type": "text", "text": text}])
        events = await two.get(f"{streamed.headers['location']}?stream=true")
        names = [line.removeprefix("event: ") for line in events.text.splitlines() if line.startswith("event: ")]
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        assert names.count("content_block_delta") == 3
        again = await client.messages.create(**body, extra_headers={"idempotency-key": "k"})
        assert (again.id, again.content[0].text) == (first.id, text)
        async with client.messages.stream(**body, extra_headers={"idempotency-key": "s"}) as stream:
            assert await stream.get_final_text() == text
        with pytest.raises(anthropic.ConflictError) as refused:
            await client.messages.create(**{**body, "max_tokens": 4}, extra_headers={"idempotency-key": "k"})
        assert refused.value.body["type"] == "error"
    assert set((await pool.answers()).values()) == {1}
    assert len(await pool.asked()) == 4


async def test_one_key_is_one_request_at_every_door_and_after_the_connection_died(pool: Pool) -> None:
    async with pool.door("one", step_s=0.005) as one, pool.door("two", step_s=0.005) as two:
        doors = (one, two)

        async def ask(door: httpx.AsyncClient, number: int) -> str:
            body = {"model": "llama", "prompt": f"hello {number}", "max_tokens": 2}
            answer = await door.post("/v1/completions", json=body, headers={"idempotency-key": f"key {number}"})
            assert answer.status_code == 200, answer.text
            id_: str = answer.json()["id"]
            return id_

        ids = await asyncio.gather(*(ask(doors[turn % 2], turn // 10) for turn in range(200)))
        assert [len(set(ids[n * 10 : n * 10 + 10])) for n in range(20)] == [1] * 20
        assert len(set(ids)) == 20
        long = {"model": "llama", "prompt": "hello", "max_tokens": 50}
        with pytest.raises(httpx.ReadTimeout):
            await one.post("/v1/completions", json=long, headers={"idempotency-key": "dead"}, timeout=0.1)
        answer = await two.post("/v1/completions", json=long, headers={"idempotency-key": "dead"})
        assert answer.json()["usage"]["completion_tokens"] == 50
        other = await two.post("/v1/completions", json={**long, "prompt": "no"}, headers={"idempotency-key": "dead"})
        assert (other.status_code, other.json()["error"]["param"]) == (409, "idempotency-key")
    counts = await pool.answers()
    assert (len(counts), set(counts.values())) == (21, {1})


async def test_what_one_key_asked_is_found_by_its_tenant_s_keys_alone(pool: Pool, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("mine tenant=acme\nours ask,tenant=acme\nother\n")
    async with pool.door("one", api_keys_file=keys) as one:
        asked = await official(one, "mine").responses.create(model="llama", input="hello", background=True)
        assert (await finished(official(one, "ours"), asked.id)).status == "completed"
        for act in ("retrieve", "cancel", "delete"):
            with pytest.raises(openai.NotFoundError):
                await getattr(official(one, "other").responses, act)(asked.id)
        same = {"model": "llama", "prompt": "hello", "max_tokens": 1}
        ids = set()
        for key in ("mine", "ours", "other"):
            headers = {"authorization": f"Bearer {key}", "idempotency-key": "same"}
            ids.add((await one.post("/v1/completions", json=same, headers=headers)).json()["id"])
        assert len(ids) == 2
    assert len(await pool.answers()) == 3


async def test_where_all_calls_are_durable_answers_and_streams_are_as_they_were(pool: Pool) -> None:
    async with AsyncExitStack() as stack:
        door = await stack.enter_async_context(pool.door("one", http_durable=True))
        client = official(door)
        answer = await client.chat.completions.create(model="qwen", messages=HELLO, max_tokens=3)
        assert answer.choices[0].message.content == "qwen0 qwen1 qwen2 "
        stream = await client.chat.completions.create(model="llama", messages=HELLO, max_tokens=3, stream=True)
        pieces = [piece.choices[0].delta.content or "" async for piece in stream]
        assert "".join(pieces) == "llama0 llama1 llama2 "
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=HELLO)
    assert len(await pool.answers()) == 3


WHOLE = ["one ", "two "]


@asynccontextmanager
async def answered(pool: Pool, *said: int | None, run: int = 1) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A door, and a call whose answer is in the log: pieces and the end mark by their numbers, None: the result.

    The pieces are the first run's, the result is that of ``run``.
    """
    topics, id_ = pool.settings.topics, begin_of("resp_", owner_named("")) + "0" * 32
    async with (
        Calls(settings=pool.settings) as calls,
        IdempotentProducer(kafka=pool.settings.kafka, max_record_bytes=1 << 20) as outlet,
    ):
        call = await calls.ask(id_, b'{"stream": true}', [("endpoint", b"/v1/completions")], sent=b'{"stream": true}')
        origin = Origin(topic=calls.topic, partition=call.partition, offset=call.offset)
        result = Result(
            id=id_,
            origin=origin,
            outcome=Outcome.COMPLETED,
            status=200,
            body={"said": "".join(WHOLE)},
            attempt=Attempt(n=run),
            timing=Timing(received=1.0, finished=2.0),
        )
        for number in said:
            if number is None:
                await outlet.send(encode_result(topics.named("answers"), result))
                continue
            data = {"said": WHOLE[number]} if number < len(WHOLE) else None
            piece = Chunk(id=id_, seq=number, origin=origin, final=data is None, data=data)
            await outlet.send(encode_chunk(topics.named("answers"), piece))
        await calls._log.read_up(topics.named("answers"))
        durable = Durable(lambda: calls, always=False, ends_s=lambda _id: None)
        door = httpx.ASGITransport(Starlette(routes=durable.routes()))
        async with httpx.AsyncClient(transport=door, base_url="http://door", timeout=60) as http:
            yield http, id_


def events(answer: httpx.Response) -> list[Any]:
    """What a stream says; its end mark as it is."""
    said = [one.removeprefix("data: ") for one in answer.text.split("\n\n") if one]
    return [one if one == "[DONE]" else json.loads(one) for one in said]


@pytest.mark.parametrize(
    ("said", "run"), [((0, None), 1), ((0, 1, None), 1), ((0, 2, None), 1), ((0, None, 2), 1), ((0, 1, 2, None), 2)]
)
async def test_a_stream_whose_last_pieces_are_lost_ends_with_an_error_that_tells_where_the_answer_is(
    pool: Pool, said: tuple[int | None, ...], run: int
) -> None:
    """Also where all are there of a run whose worker died before its result: who ran it again said something else."""
    async with answered(pool, *said, run=run) as (door, id_):
        *pieces, error, end = events(await door.get(f"/v1/calls/{id_}", params={"stream": "true"}))
        assert "".join(one["said"] for one in pieces) in {"one ", "one two "}
        assert (error["error"]["code"], end) == (500, "[DONE]")
        assert f"/v1/calls/{id_}" in error["error"]["message"]
        assert (await door.get(f"/v1/calls/{id_}")).json() == {"said": "one two "}


async def test_a_stream_of_which_nothing_is_there_is_an_error_that_tells_where_the_answer_is(pool: Pool) -> None:
    async with answered(pool, None) as (door, id_):
        answer = await door.get(f"/v1/calls/{id_}", params={"stream": "true"})
        assert answer.status_code == 500
        assert f"/v1/calls/{id_}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("said", [(0, 1, 2, None), (0, 1, None, 2), (0, None, 1, 2), (None, 0, 1, 2)])
async def test_a_stream_is_whole_in_every_replay_however_late_its_pieces_came(
    pool: Pool, said: tuple[int | None, ...]
) -> None:
    async with answered(pool, *said) as (door, id_):
        assert events(await door.get(f"/v1/calls/{id_}", params={"stream": "true"})) == [
            {"said": "one "},
            {"said": "two "},
            "[DONE]",
        ]
        rest = await door.get(f"/v1/calls/{id_}", params={"stream": "true", "starting_after": "0"})
        assert events(rest) == [{"said": "two "}, "[DONE]"]
