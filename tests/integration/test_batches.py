"""OpenAI's files and batches: asked at one door, worked on by any worker, every line once."""

import asyncio
import codecs
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from schemas.base import Origin
from schemas.batches import BatchAsked, BatchEnd, BatchEnded
from schemas.codec import decode_control, encode_result
from schemas.control import Cancel
from schemas.results import Outcome, Result, Timing
from service.kafka.batch_runs import BatchRuns, line_id
from service.kafka.calls import Calls
from service.kafka.files import BATCH, Files, new_id, owner_named
from service.kafka.producer import IdempotentProducer
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.support.bus import until
from tests.support.http_pool import Pool, official
from tests.support.pool import delete_topics

pytestmark = pytest.mark.broker


@pytest.fixture
async def pool(bootstrap: str) -> AsyncIterator[Pool]:
    made = Pool(bootstrap, http_max_file_bytes=1 << 20, http_most_batch_lines=5000)
    await ensure_topics(made.settings, ["llama", "qwen"])
    yield made
    await delete_topics(made.settings)


def line(number: int, **changed: object) -> dict[str, Any]:
    body = {"model": ("llama", "qwen")[number % 2], "prompt": f"number {number}", "max_tokens": 2}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": {**body, **changed}}


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def begun(client: openai.AsyncOpenAI, content: bytes, **given: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", **given
    )


async def ended(client: openai.AsyncOpenAI, id_: str) -> Any:
    found: list[Any] = []

    async def done() -> bool:
        found[:] = [await client.batches.retrieve(id_)]
        return found[0].status not in {"in_progress", "cancelling"}

    await until(done)
    return found[0]


async def lines_of(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(one) for one in (await client.files.content(file)).text.splitlines()]


async def test_a_file_is_at_every_door_as_it_was_until_it_is_deleted(pool: Pool) -> None:
    content = jsonl([line(n) for n in range(3)])
    async with pool.door("one") as one, pool.door("two") as two:
        file = await official(one).files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
        assert (await official(two).files.content(file.id)).content == content
        assert [each.id async for each in official(two).files.list()] == [file.id]
        assert (await official(two).files.delete(file.id)).deleted
        for door in (one, two):
            with pytest.raises(openai.NotFoundError):
                await official(door).files.retrieve(file.id)
            assert [each.id async for each in official(door).files.list()] == []
    contents = await pool.records("files")
    assert {record.key for record in contents} == {f"{file.id}/0".encode()}
    assert contents[-1].value is None, "Kafka may forget it"


async def test_a_file_whose_content_kafka_has_forgotten_is_not_found(pool: Pool) -> None:
    """Kafka forgets block by block, the index the file as a whole, some time later."""
    async with pool.door("one") as door:
        file = await official(door).files.create(file=("in.jsonl", jsonl([line(0)])), purpose="batch")
        (block,) = await pool.records("files")
        await pool.forget_before(block.topic, block.partition, block.offset + 1)
        with pytest.raises(openai.NotFoundError, match="not whole any more"):
            await official(door).files.content(file.id)


async def test_a_batch_over_two_models_answers_every_line_once_through_the_death_of_its_workers(pool: Pool) -> None:
    count = 600
    content = codecs.BOM_UTF8 + jsonl([*(line(n) for n in range(count)), line(count, model="nobody")])
    async with AsyncExitStack() as stack:
        async with pool.door("one", step_s=0.005) as one, pool.door("two", step_s=0.005) as two:
            batch = await begun(official(one), content, metadata={"night": "12"})
            assert (batch.status, batch.request_counts.total) == ("in_progress", count + 1)
            assert batch.metadata == {"night": "12"}

            async def under_way() -> bool:
                return (await official(two).batches.retrieve(batch.id)).request_counts.completed > 0

            await until(under_way)
        door = await stack.enter_async_context(pool.door("three"))
        found = await ended(official(door), batch.id)
        assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", count, 1)
        output = await lines_of(official(door), found.output_file_id)
        (wrong,) = await lines_of(official(door), found.error_file_id)
        assert Counter(one["custom_id"] for one in output) == Counter(f"line {n}" for n in range(count))
        for one in output:
            number = int(one["custom_id"].split()[1])
            assert one["response"]["status_code"] == 200
            assert one["response"]["body"]["model"] == ("llama", "qwen")[number % 2]
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == (f"line {count}", 404)
        assert [one.id async for one in official(door).batches.list()] == [batch.id]
    assert set((await pool.answers()).values()) == {1}


async def test_what_a_cancelled_batch_did_not_answer_is_in_its_error_file(pool: Pool) -> None:
    count = 3000
    content = jsonl([line(n, max_tokens=50) for n in range(count)])
    async with pool.door("one", step_s=0.01) as one, pool.door("two", step_s=0.01) as two:
        batch = await begun(official(one), content)
        with pytest.raises(openai.ConflictError):
            await official(one).files.delete(batch.input_file_id)
        assert (await official(two).batches.cancel(batch.id)).status == "cancelling"
        found = await ended(official(one), batch.id)
        assert (found.status, found.request_counts.total) == ("cancelled", count)
        output = await lines_of(official(two), found.output_file_id)
        wrong = await lines_of(official(two), found.error_file_id)
        assert (len(output), len(wrong)) == (found.request_counts.completed, found.request_counts.failed)
        assert Counter(one["custom_id"] for one in (*output, *wrong)) == Counter(f"line {n}" for n in range(count))
        assert {one["error"]["code"] for one in wrong} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError):
            await official(one).batches.cancel(batch.id)


async def test_a_batch_takes_every_path_that_a_door_has_for_an_endpoint(pool: Pool) -> None:
    body = {"model": "llama", "query": "where?", "documents": ["here", "there"]}
    content = jsonl([line(n, **body) | {"url": path} for n, path in enumerate(("/rerank", "/v1/rerank", "/v2/rerank"))])
    async with pool.door("one") as one:
        client = official(one)
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v2/rerank",  # type: ignore[arg-type]
            completion_window="24h",
        )
        found = await ended(client, batch.id)
        assert (found.status, found.request_counts.total) == ("completed", 3)
    asked = [dict(record.headers)["endpoint"] for record in await pool.records("calls")]
    assert asked == [b"/rerank"] * 3


async def test_files_and_batches_belong_to_who_made_them(pool: Pool, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("mine tenant=acme\nours ask,tenant=acme\nother\n")
    async with pool.door("one", api_keys_file=keys) as one:
        mine, ours, other = (official(one, key) for key in ("mine", "ours", "other"))
        batch = await begun(mine, jsonl([line(0)]))
        found = await ended(ours, batch.id)
        assert len(await lines_of(ours, found.output_file_id)) == 1
        for act in (
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.content(found.output_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await act
        assert [one async for one in other.files.list()] == []
        assert [one async for one in other.batches.list()] == []


BAD = {
    "no JSON lines": b"hello\n",
    "nothing": b"\n",
    "an id twice": jsonl([line(1), line(1)]),
    "an unknown endpoint": jsonl([{**line(1), "url": "/v1/nothing"}]),
    "a stream": jsonl([line(1, stream=True)]),
    "too many lines": jsonl([line(n, prompt="") for n in range(5001)]),
}


async def test_what_is_no_batch_s_file_is_refused_by_its_line_and_leaves_nothing_behind(pool: Pool) -> None:
    async with pool.door("one") as one:
        client = official(one)
        for name, content in BAD.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await client.files.create(file=("in.jsonl", content), purpose="batch")
            assert caught.value.param == "file", name
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(file=("in.jsonl", jsonl([line(1)])), purpose="fine-tune")
        assert caught.value.param == "purpose"
        with pytest.raises(openai.APIStatusError) as too_large:
            await client.files.create(file=("in.jsonl", b"x" * (2 << 20)), purpose="batch")
        assert too_large.value.status_code == 413
        assert b" 413 " in await _announced(one, 10 << 30)
        for content_type in ("application/json", "multipart/form-data"):
            refused = await one.post("/v1/files", content=b"{}", headers={"content-type": content_type})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400)
        assert [file async for file in client.files.list()] == []
    kept = {record.key: record.value for record in await pool.records("files")}
    assert set(kept.values()) <= {None}


async def _announced(door: httpx.AsyncClient, size: int) -> bytes:
    """How a door answers to a body of this size before it comes."""
    reading, writing = await asyncio.open_connection(door.base_url.host, door.base_url.port)
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n"
    writing.write(head.encode() + b"content-type: multipart/form-data; boundary=x\r\n\r\n")
    try:
        return await reading.readline()
    finally:
        writing.close()
        await writing.wait_closed()


async def test_an_upload_whose_connection_stops_in_the_middle_leaves_nothing_behind(pool: Pool) -> None:
    async with pool.door("one", http_max_file_bytes=8 << 20) as one:
        head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        sent, stop = asyncio.Event(), asyncio.Event()

        async def half() -> AsyncIterator[bytes]:
            yield head + jsonl([line(n, prompt="x" * 1000) for n in range(3000)])
            sent.set()
            await stop.wait()

        headers = {"content-type": "multipart/form-data; boundary=x"}
        async with httpx.AsyncClient(base_url=str(one.base_url)) as other:
            asking = asyncio.create_task(other.post("/v1/files", content=half(), headers=headers))
            await sent.wait()

            async def stored() -> bool:
                return len(await pool.records("files")) > 0

            await until(stored)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        async def taken_back() -> bool:
            kept = {record.key: record.value for record in await pool.records("files")}
            return set(kept.values()) == {None}

        await until(taken_back)
        assert [file async for file in official(one).files.list()] == []


async def test_a_batch_that_can_t_be_begun_is_refused_by_what_is_wrong_with_it(pool: Pool) -> None:
    async with pool.door("one") as one:
        client = official(one)
        file = await client.files.create(file=("in.jsonl", jsonl([line(1)])), purpose="batch")
        for endpoint, window, param in (
            ("/v1/chat/completions", "24h", "endpoint"),
            ("/v1/nothing", "24h", "endpoint"),
            ("/v1/completions", "30d", "completion_window"),
            ("/v1/completions", "soon", "completion_window"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.batches.create(
                    input_file_id=file.id,
                    endpoint=endpoint,  # type: ignore[arg-type]
                    completion_window=window,  # type: ignore[arg-type]
                )
            assert caught.value.param == param
        assert [batch async for batch in client.batches.list()] == []


async def test_a_batch_of_a_file_that_expires_before_it_is_refused_with_what_to_do(pool: Pool) -> None:
    week_s = pool.settings.topics.files_retention_s
    async with pool.door("one") as one, Files(settings=pool.settings) as files:
        client = official(one)
        file = await client.files.create(file=("in.jsonl", jsonl([line(1)])), purpose="batch")
        stored_file = files.index.file(file.id)
        assert stored_file is not None
        nearly = time.time() - week_s + 4 * 3600
        await files.store(stored_file.model_copy(update={"at": nearly}))
        with pytest.raises(openai.BadRequestError, match=r"expires at .*upload it again") as caught:
            await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert caught.value.param == "completion_window"
        assert [batch async for batch in client.batches.list()] == []
        shorter = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="2h",  # type: ignore[arg-type]
        )
        assert (await ended(client, shorter.id)).status == "completed"


async def test_a_batch_whose_file_is_gone_says_so(pool: Pool) -> None:
    async with pool.door("one") as one, Files(settings=pool.settings) as files:
        id_ = new_id(BATCH, owner_named(""))
        asked = BatchAsked(id=id_, file="file-9", endpoint="/v1/completions", lines=1, at=time.time(), window_s=600.0)
        await files.store(asked)
        found = await ended(official(one), id_)
        assert (found.status, found.errors.object) == ("failed", "list")
        (error,) = found.errors.data
        assert (error.code, error.line, error.param) == ("batch_failed", None, None)
        assert "file-9" in error.message


@asynccontextmanager
async def unread(settings: Settings) -> AsyncIterator[Files]:
    """Batches are worked on, and nobody reads what they ask."""
    async with (
        Calls(settings=settings) as calls,
        Files(settings=settings) as files,
        BatchRuns(calls=calls, files=files, owned=lambda: range(calls.partitions)),
    ):
        yield files


async def result_of(files: Files, lines: Sequence[dict[str, Any]], *, window_s: float) -> BatchEnded:
    """How a batch of these lines ends."""
    return await end_of(files, jsonl(lines), lines=len(lines), window_s=window_s)


async def stored(files: Files, content: bytes, *, lines: int) -> str:
    """The id of a file."""
    async with files.writing("file-") as writing:
        await writing.write(content)
        return (await writing.finish(filename="in.jsonl", purpose="batch", lines=lines)).id


async def end_of(files: Files, content: bytes, *, lines: int, window_s: float) -> BatchEnded:
    """How a batch of this input ends."""
    id_, file = f"batch_{uuid.uuid4().hex}", await stored(files, content, lines=lines)
    endpoint, now = "/v1/completions", time.time()
    await files.store(BatchAsked(id=id_, file=file, endpoint=endpoint, lines=lines, at=now, window_s=window_s))
    found: list[BatchEnded] = []

    async def over() -> bool:
        batch = files.index.batch(id_)
        found[:] = [batch.ended] if batch is not None and batch.ended is not None else []
        return bool(found)

    await until(over)
    return found[0]


async def test_a_batch_whose_lines_nobody_answers_ends_with_its_window(pool: Pool) -> None:
    async with unread(pool.settings) as files:
        end = await result_of(files, [line(n) for n in range(3)], window_s=2.0)
        assert (end.end, end.completed, end.failed, end.output) == (BatchEnd.EXPIRED, 0, 3, None)
        file = files.index.file(end.errors or "")
        assert file is not None
        errors = [json.loads(one) for one in b"".join([data async for data in files.content(file)]).splitlines()]
    assert Counter(one["custom_id"] for one in errors) == Counter(f"line {n}" for n in range(3))
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}


async def test_a_batch_asks_no_more_than_there_is_room_for(bootstrap: str) -> None:
    pool = Pool(bootstrap, http_most_calls=5, http_calls_share=1.0)
    await ensure_topics(pool.settings, ["llama", "qwen"])
    async with unread(pool.settings) as files:
        end = await result_of(files, [line(n) for n in range(12)], window_s=3.0)
    assert (end.end, end.completed, end.failed) == (BatchEnd.EXPIRED, 0, 12)
    assert len(await pool.records("calls")) == 5
    await delete_topics(pool.settings)


async def test_a_batch_with_a_line_that_no_broker_takes_fails_and_cancels_the_others(bootstrap: str) -> None:
    pool = Pool(bootstrap, max_message_bytes=4096)
    await ensure_topics(pool.settings, ["llama", "qwen"])
    async with unread(pool.settings) as files:
        end = await result_of(files, [line(1), line(2, prompt="x" * 8192)], window_s=3600.0)
        assert end.end is BatchEnd.FAILED
    (cancel,) = [decode_control(record) for record in await pool.records("control")]
    assert isinstance(cancel, Cancel)
    assert cancel.correlation_id == end.id
    await delete_topics(pool.settings)


@pytest.mark.parametrize(
    ("content", "given"),
    [
        (b"x" * (3 << 20), {"max_request_bytes": 1 << 20}),
        (jsonl([line(n) for n in range(4)]), {"http_most_batch_lines": 3}),
    ],
)
async def test_an_input_that_no_door_would_have_taken_fails_its_batch(
    bootstrap: str, content: bytes, given: dict[str, int]
) -> None:
    pool = Pool(bootstrap, **given)
    await ensure_topics(pool.settings, ["llama", "qwen"])
    async with unread(pool.settings) as files:
        end = await end_of(files, content, lines=4, window_s=3600.0)
    assert end.end is BatchEnd.FAILED
    await delete_topics(pool.settings)


async def test_a_batch_by_the_name_of_somebodys_requests_is_none(pool: Pool) -> None:
    async with unread(pool.settings) as files:
        now = time.time()
        named = BatchAsked(id="customer 42", file="none", endpoint="/v1/completions", lines=1, at=now, window_s=60.0)
        await files.store(named)
        assert files.index.batch(named.id) is None
        end = await result_of(files, [line(1)], window_s=2.0)
        assert end.end is BatchEnd.EXPIRED
    told = [decode_control(record) for record in await pool.records("control") if record.value]
    assert not [one for one in told if isinstance(one, Cancel) and one.correlation_id == named.id]


async def test_one_batch_that_ends_takes_nothing_from_another(pool: Pool) -> None:
    async with Calls(settings=pool.settings) as calls:
        with calls.arrivals() as first:
            with calls.arrivals() as second:
                assert first is not second
            first.waiting.add(b"a")
            calls._arrived(b"a", None)
            assert first.waiting == {b"a"}, "neither finished nor deleted"
            assert any(one is first for one in calls._arrivals)
        assert calls._arrivals == []


async def test_what_came_while_there_was_no_room_is_counted_and_not_asked_again(bootstrap: str) -> None:
    """Its first owner has asked a line, and said so late; it was answered while the next one waited for room."""
    pool = Pool(bootstrap, http_most_calls=1, http_calls_share=1.0)
    await ensure_topics(pool.settings, ["llama", "qwen"])
    settings = pool.settings
    async with (
        Calls(settings=settings) as calls,
        IdempotentProducer(kafka=settings.kafka, max_record_bytes=1 << 20) as outlet,
        unread(settings) as files,
    ):
        await calls.write([("resp_endless", b"{}", [])])
        id_, file = f"batch_{uuid.uuid4().hex}", await stored(files, jsonl([line(1)]), lines=1)
        asked = BatchAsked(id=id_, file=file, endpoint="/v1/completions", lines=1, at=time.time(), window_s=600.0)
        await files.store(asked)

        async def waits_for_room() -> bool:
            return "_ask" in _at(f"batch {id_}")

        await until(waits_for_room)
        own = line_id(id_, 1)
        await calls.write([(own, b"{}", [])])
        call = calls.index.call(own)
        assert call is not None
        result = Result(
            id=own,
            origin=Origin(topic=calls.topic, partition=call.partition, offset=call.offset),
            outcome=Outcome.COMPLETED,
            status=200,
            body={"said": "once"},
            timing=Timing(received=1.0, finished=2.0),
        )
        await outlet.send(encode_result(settings.topics.named("answers"), result))

        async def is_answered() -> bool:
            return calls.index.answer(own) is not None

        await until(is_answered)
        await calls.delete("resp_endless")
        found: list[BatchEnded] = []

        async def is_over() -> bool:
            batch = files.index.batch(id_)
            found[:] = [batch.ended] if batch is not None and batch.ended is not None else []
            return bool(found)

        await until(is_over)
    assert (found[0].end, found[0].completed) == (BatchEnd.COMPLETED, 1)
    assert len([one for one in await pool.records("calls") if one.key == own.encode()]) == 1
    await delete_topics(settings)


async def test_a_line_whose_call_was_deleted_has_no_answer_whenever_that_was(pool: Pool) -> None:
    async with pool.door("one", step_s=0.01) as one:
        client = official(one)
        asked = await begun(client, jsonl([line(1), line(2, max_tokens=400), line(3, max_tokens=400)]))

        async def first_is_answered() -> bool:
            return (await client.batches.retrieve(asked.id)).request_counts.completed == 1

        await until(first_is_answered)
        for number in (1, 2):
            assert (await one.delete(f"/v1/calls/{line_id(asked.id, number)}")).status_code == 200
        found = await ended(client, asked.id)
        answered = (await client.files.content(found.output_file_id)).text
        assert [json.loads(one)["custom_id"] for one in answered.splitlines()] == ["line 3"]
        assert (found.request_counts.completed, found.request_counts.failed) == (1, 2)


@asynccontextmanager
async def no_room(pool: Pool) -> AsyncIterator[openai.AsyncOpenAI]:
    """At a door that takes one call, there is one that does not end."""
    async with pool.door("one", step_s=0.02, http_most_calls=1) as one:
        client = official(one)
        endless = await client.responses.create(
            model="llama", input="hello", background=True, max_output_tokens=100_000
        )
        yield client
        await client.responses.cancel(endless.id)


async def test_a_batch_that_waits_for_room_ends_when_it_is_cancelled(pool: Pool) -> None:
    async with no_room(pool) as client:
        waiting = await begun(client, jsonl([line(2)]))
        await client.batches.cancel(waiting.id)
        found = await ended(client, waiting.id)
        assert (found.status, found.request_counts.failed) == ("cancelled", 1)


async def test_four_batches_are_worked_on_at_a_time_the_oldest_first(pool: Pool) -> None:
    async with no_room(pool) as client:
        waiting = [(await begun(client, jsonl([line(2)]))).id for _ in range(6)]

        async def run(*expected: str) -> None:
            async def as_expected() -> bool:
                return _worked_on() == set(expected)

            await until(as_expected)

        await run(*waiting[:4])
        await client.batches.cancel(waiting[5])
        assert (await ended(client, waiting[5])).status == "cancelled", "what is to end waits for no other batch"
        await run(*waiting[:4])
        await client.batches.cancel(waiting[0])
        assert (await ended(client, waiting[0])).status == "cancelled"
        await run(*waiting[1:5])


def _at(name: str) -> list[str]:
    """What a task is in the middle of, the innermost last."""
    at: list[str] = []
    for task in asyncio.all_tasks():
        coroutine = task.get_coro() if task.get_name() == name else None
        while (code := getattr(coroutine, "cr_code", None)) is not None:
            at.append(code.co_name)
            coroutine = coroutine.cr_await
    return at


def _worked_on() -> set[str]:
    return {name.removeprefix("batch ") for task in asyncio.all_tasks() if (name := task.get_name())[:6] == "batch "}
