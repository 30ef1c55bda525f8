"""The client against a worker on the real broker."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from schemas.control import Cancel
from schemas.results import Outcome
from schemas.status import StatusState
from service.client import (
    BrokerUnavailable,
    Client,
    NoAnswer,
    RecordRefused,
    RequestCancelled,
    RequestExpired,
    RequestFailed,
    SwitchFailed,
    SyncClient,
    TopicError,
    UnknownModel,
)
from service.settings import Settings
from tests.support.pool import delete_topics, serving, settings_for
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
async def pool(bootstrap: str) -> AsyncIterator[Settings]:
    """A worker whose engine makes a token in 2 ms."""
    settings = settings_for(bootstrap)
    async with serving(settings, step_s=0.002):
        yield settings
    await delete_topics(settings)


@pytest.fixture(scope="module")
async def client(pool: Settings) -> AsyncIterator[Client]:
    async with Client(settings=pool, timeout_s=60) as opened:
        yield opened


def text(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


async def test_calls_are_answered_in_the_openai_packages_types(client: Client):
    chat = await client.chat(model="llama", messages=HELLO, max_tokens=2)
    assert isinstance(chat, ChatCompletion)
    assert text(chat) == "llama0 llama1 "
    completion = await client.complete(model="qwen", prompt="hello", max_tokens=1)
    assert isinstance(completion, Completion)
    assert completion.choices[0].text == "qwen0 "
    with pytest.raises(RequestFailed, match="does not support"):
        await client.embed(model="llama", input="hello")


async def test_a_stream_gives_the_pieces_and_then_the_whole(client: Client):
    stream = client.stream(model="llama", messages=HELLO, max_tokens=3)
    pieces = [piece async for piece in stream]
    assert all(isinstance(piece, ChatCompletionChunk) for piece in pieces)
    assert "".join(c.delta.content or "" for piece in pieces for c in piece.choices) == "llama0 llama1 llama2 "
    assert text(stream.answer) == "llama0 llama1 llama2 "


async def test_leaving_a_stream_cancels_its_request(client: Client):
    stream = client.stream(model="llama", messages=HELLO, max_tokens=4000)
    pieces = aiter(stream)
    await anext(pieces)
    await pieces.aclose()
    result = await client.result(stream.request_id, timeout_s=PATIENCE_S)
    assert result.outcome is Outcome.CANCELLED


async def test_a_failed_request_raises_with_the_openai_error_inside(client: Client):
    with pytest.raises(RequestFailed) as caught:
        await client.chat(model="lama", messages=HELLO)
    assert (caught.value.status, caught.value.error.type) == (404, "NotFoundError")
    assert "'llama'" in caught.value.error.message


async def test_a_stream_that_fails_raises_likewise(client: Client):
    with pytest.raises(RequestFailed, match="lama"):
        _ = [piece async for piece in client.stream(model="lama", messages=HELLO)]


async def test_a_request_that_is_submitted_is_collected_by_its_id_with_its_times(client: Client):
    request_id = await client.submit({"model": "qwen", "prompt": "hello", "max_tokens": 2})
    result = await client.result(request_id)
    assert (result.id, result.outcome, result.model) == (request_id, Outcome.COMPLETED, "qwen")
    assert result.timing.latency_s > 0


async def test_several_may_wait_for_one_result_and_for_a_streams(client: Client):
    request_id = await client.submit({"model": "qwen", "prompt": "hello", "max_tokens": 200})
    results = await asyncio.gather(*(client.result(request_id, timeout_s=PATIENCE_S) for _ in range(3)))
    assert results[0].outcome is Outcome.COMPLETED
    assert results == [results[0]] * 3
    stream = client.stream(model="llama", messages=HELLO, max_tokens=200)
    pieces = aiter(stream)
    await anext(pieces)
    beside = asyncio.create_task(client.result(str(stream.request_id), timeout_s=PATIENCE_S), name="beside")
    assert len([piece async for piece in pieces]) >= 199
    assert await beside == stream.result


async def test_a_request_goes_to_its_models_own_topic_when_told(pool: Settings, client: Client):
    request_id = await client.submit({"prompt": "hello", "max_tokens": 1}, topic_of="qwen")
    result = await client.result(request_id)
    assert (result.model, result.origin.topic) == ("qwen", pool.topics.for_alias("qwen"))
    with pytest.raises(UnknownModel, match="'qwen'"):
        await client.submit({"prompt": "hello"}, topic_of="qwem")


async def test_what_one_client_asks_of_one_model_goes_to_all_partitions_and_so_to_all_workers(client: Client):
    ids = [await client.submit({"model": "qwen", "prompt": "hello", "max_tokens": 1}) for _ in range(64)]
    results = await asyncio.gather(*map(client.result, ids))
    assert {result.origin.partition for result in results} == {0, 1}


async def test_a_request_goes_to_its_models_own_topic_as_soon_as_a_worker_says_that_it_has_the_model(bootstrap: str):
    settings = settings_for(bootstrap)
    own, shared = settings.topics.for_alias("qwen"), settings.topics.named(settings.topics.requests)
    async with Client(settings=settings, timeout_s=60) as client:
        async with serving(settings) as pool:
            asked = {"model": "qwen", "prompt": "hello", "max_tokens": 1}
            while not await client.presences():
                await client.complete(**asked)
            results = [await client.result(await client.submit(asked)) for _ in range(2)]
            unknown = await client.result(await client.submit({**asked, "model": "qwem"}))
            session = await client.result(await client.submit(asked, session="s", part=0))
            assert results[-1].origin.topic == own
            assert (unknown.status, unknown.origin.topic) == (404, shared)
            assert session.origin.topic == shared, "one worker has the place of all parts"
        await delete_topics(pool)


async def test_a_result_is_found_by_a_client_that_came_later(pool: Settings, client: Client):
    request_id = await client.submit({"model": "qwen", "prompt": "hello", "max_tokens": 2})
    first = await client.result(request_id)
    async with Client(settings=pool) as another:
        assert await another.result(request_id) == first


async def test_a_request_id_is_sent_once_however_often_it_is_asked_for(client: Client):
    once = uuid.uuid4().hex
    asked = [client.chat(model="llama", messages=HELLO, max_tokens=50, request_id=once) for _ in range(5)]
    answers = await asyncio.gather(*asked)
    assert len({answer.id for answer in answers}) == 1
    found = [result async for result in client.results(past=True, follow=False) if result.id == once]
    assert len(found) == 1


async def test_a_cancelled_request_says_so_with_what_there_was(client: Client):
    request_id = await client.submit({"model": "llama", "prompt": "hello", "max_tokens": 4000})
    await client.cancel(request_id)
    result = await client.result(request_id, timeout_s=PATIENCE_S)
    assert result.outcome is Outcome.CANCELLED
    with pytest.raises(RequestCancelled):
        raise RequestFailed.of(result)


async def test_a_cancel_of_what_no_worker_has_is_answered_by_each(client: Client):
    answers = await client.control(Cancel(request="nobody's"), timeout_s=PATIENCE_S)
    assert {(answer.state, str(answer.answer)) for answer in answers} == {
        (StatusState.COMPLETED, str({"cancelled": 0}))
    }


async def test_cancelling_the_call_cancels_the_request(client: Client):
    request_id = uuid.uuid4().hex
    asking = asyncio.create_task(
        client.chat(model="llama", messages=HELLO, max_tokens=4000, request_id=request_id), name="asking"
    )
    async with asyncio.timeout(PATIENCE_S):
        while "running" not in str(await client.query(request_id)):
            pass
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await client.result(request_id, timeout_s=PATIENCE_S)).outcome is Outcome.CANCELLED


async def test_a_timeout_is_the_requests_deadline(client: Client):
    with pytest.raises(RequestExpired):
        await client.chat(model="llama", messages=HELLO, max_tokens=4000, timeout_s=0.5)


async def test_a_request_too_large_for_the_topic_is_refused_and_the_next_one_is_not(client: Client):
    with pytest.raises(RecordRefused):
        await client.complete(model="llama", prompt="x" * (17 << 20))
    assert await client.complete(model="llama", prompt="x", max_tokens=1)


async def test_a_switch_returns_when_it_is_done_and_tells_the_steps(client: Client):
    await client.switch("llama")
    states: list[StatusState] = []
    status = await client.switch("qwen", on_status=lambda step: states.append(step.state))
    assert states == [StatusState.ACCEPTED, StatusState.SWITCHING, StatusState.COMPLETED]
    assert status.switch is not None
    assert (status.switch.from_model, status.switch.to_model) == ("llama", "qwen")
    assert (await client.switch("qwen")).state is StatusState.NO_OP


async def test_a_refused_switch_raises_with_the_workers_reason(client: Client):
    with pytest.raises(SwitchFailed, match="did you mean 'qwen'"):
        await client.switch("qwem")


async def test_a_switch_that_nobody_is_meant_by_is_not_waited_for_in_vain(client: Client):
    with pytest.raises(NoAnswer, match="no answer of any worker"):
        await client.switch("qwen", target="another-pool", timeout_s=0.2)


async def test_a_query_is_answered_by_every_worker(client: Client, pool: Settings):
    answers = await client.query()
    assert list(answers) == [pool.worker.worker_id]
    assert answers[pool.worker.worker_id]["active"] in {"llama", "qwen"}


async def test_the_workers_that_are_there_are_seen(client: Client, pool: Settings):
    (presence,) = await client.presences()
    assert (presence.worker, presence.pool) == (pool.worker.worker_id, pool.worker.group_id)


async def test_map_answers_in_order_with_errors_in_their_places(client: Client):
    bodies = [{"model": model, "prompt": "hello"} for model in ("llama", "qwen", "lama") * 10]
    answers = [answer async for answer in client.map(bodies, concurrency=8, errors="return", max_tokens=1)]
    assert len(answers) == 30
    for body, answer in zip(bodies, answers, strict=True):
        if body["model"] == "lama":
            assert isinstance(answer, RequestFailed)
        else:
            assert answer.choices[0].text == f"{body['model']}0 "


async def test_results_go_to_a_reply_topic_of_ones_own_where_workers_allow_it(bootstrap: str):
    settings = settings_for(bootstrap)
    reply = f"{settings.topics.topic_prefix}mine"
    settings = settings.model_copy(update={"topics": settings.topics.model_copy(update={"reply_topics": (reply,)})})
    async with serving(settings), Client(settings=settings, reply_topic=reply) as client:
        assert text(await client.chat(model="llama", messages=HELLO, max_tokens=1)) == "llama0 "
        async with Client(settings=settings) as shared:
            assert [result async for result in shared.results(past=True, follow=False)] == []
    await delete_topics(settings)


async def test_what_is_no_result_in_the_results_topic_is_passed_over(client: Client, pool: Settings):
    topic = pool.topics.named(pool.topics.results)
    async with AIOKafkaProducer(bootstrap_servers=pool.kafka.bootstrap_servers) as stranger:
        request_id = await client.submit({"model": "llama", "prompt": "hello", "max_tokens": 200})
        await stranger.send_and_wait(topic, b"not a result", key=request_id.encode())
    assert (await client.result(request_id)).outcome is Outcome.COMPLETED


async def test_the_synchronous_face_does_the_same(pool: Settings):
    await asyncio.to_thread(use_synchronously, pool)  # the worker has this thread


def use_synchronously(pool: Settings) -> None:
    with SyncClient(settings=pool, timeout_s=60) as client:
        assert text(client.chat(model="llama", messages=HELLO, max_tokens=1)) == "llama0 "
        pieces = list(client.stream(model="qwen", prompt="hello", max_tokens=2))
        assert "".join(choice.text for piece in pieces for choice in piece.choices) == "qwen0 qwen1 "
        assert client.result(client.submit({"model": "qwen", "prompt": "x"})).outcome is Outcome.COMPLETED
        assert client.switch("llama").state in {StatusState.COMPLETED, StatusState.NO_OP}
        mapped = client.map([{"prompt": "a"}, {"prompt": "b"}], model="llama", max_tokens=1)
        assert [answer.choices[0].text for answer in mapped] == ["llama0 ", "llama0 "]
        assert len(client.presences()) == 1
        with pytest.raises(RequestFailed):
            client.chat(model="lama", messages=HELLO)


async def test_threads_that_ask_a_synchronous_client_are_told_when_it_is_closed(pool: Settings):
    streamed, waited = await asyncio.to_thread(close_under_threads, pool)
    for error in (streamed, waited):
        assert isinstance(error, BrokerUnavailable | RuntimeError), "the latter where it asks when it is closed already"


def close_under_threads(pool: Settings) -> list[BaseException | None]:
    client, streaming = SyncClient(settings=pool, timeout_s=600), threading.Event()

    def stream() -> None:
        for _ in client.stream(model="llama", prompt="hello", max_tokens=4000):
            streaming.set()

    with client:
        asked = [in_a_thread(stream), in_a_thread(lambda: client.result("nobody's"))]
        assert streaming.wait(PATIENCE_S)
    return [thread.exception(PATIENCE_S) for thread in asked]


def in_a_thread(work: Callable[[], object]) -> "Future[object]":
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="asking").start()
    return future


async def test_a_callback_on_the_synchronous_clients_thread_can_t_wait_for_it(pool: Settings):
    await asyncio.to_thread(ask_from_callbacks, pool)


def ask_from_callbacks(pool: Settings) -> None:
    def bodies() -> Iterator[dict[str, Any]]:
        yield {"prompt": client.complete(model="llama", prompt="a").id}

    with SyncClient(settings=pool, timeout_s=PATIENCE_S) as client:
        with pytest.raises(RuntimeError, match="would wait for itself"):
            list(client.map(bodies(), model="llama"))
        with pytest.raises(RuntimeError, match="would wait for itself"):
            client.switch("llama", on_status=lambda _: client.query())
        assert len(client.presences()) == 1


async def test_without_a_broker_the_client_says_where_it_looked():
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        async with Client("127.0.0.1:1", request_timeout_s=0.5):
            pass


async def test_without_the_topics_a_call_says_how_to_make_them_and_makes_none_itself(bootstrap: str):
    async with Client(settings=settings_for(bootstrap, request_timeout_s=0.5)) as client:
        with pytest.raises(TopicError, match="gearshift topics create"):
            await client.chat(model="llama", messages=HELLO)
