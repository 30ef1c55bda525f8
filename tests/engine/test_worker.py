"""The whole worker on the real broker and the real engine: from `requests` to `results`, switched by `control`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.results import Outcome
from service.app import Parts, serve
from service.client import Client
from service.errors import RequestFailed
from service.models_file import ModelsFile
from service.settings import Settings
from tests.support.doors import Lent
from tests.support.pool import delete_topics, settings_for
from tests.support.waiting import LOOKS

pytestmark = [pytest.mark.engine, pytest.mark.broker]

QUESTION = [{"role": "user", "content": "Tell me about your day."}]


@pytest.fixture(scope="module")
async def client(vllm_engine: Any, broker: Any) -> AsyncIterator[Client]:
    """A client of a worker that serves from the session's engine."""
    settings: Settings = settings_for(broker.bootstrap, hold_s=0.5)
    models: ModelsFile = vllm_engine._models

    async def open_engine(*_: object) -> Any:
        return Lent(vllm_engine)

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(read_models=lambda: models, open_engine=open_engine)
        tasks.create_task(serve(settings, parts, stop), name="worker")
        async with Client(settings=settings, timeout_s=120) as opened:
            yield opened
        stop.set()
    await delete_topics(settings)


def said(completion: Any) -> str:
    return completion.choices[0].message.content


async def chat(client: Client, model: str, **more: Any) -> Any:
    return await client.chat(model=model, messages=QUESTION, temperature=0.0, **{"max_tokens": 32, **more})


async def test_each_model_answers_in_its_own_words_and_the_same_after_switches(client: Client) -> None:
    first = {model: said(await chat(client, model)) for model in ("llama", "qwen")}
    assert first["llama"] != first["qwen"]
    assert "llama" in first["llama"].lower()
    assert "qwen" in first["qwen"].lower()
    for model in ("llama", "qwen", "llama"):
        await client.switch(model)
        assert said(await chat(client, model)) == first[model]


async def test_a_stream_frozen_by_a_switch_goes_on_with_the_same_text(client: Client) -> None:
    await client.switch("llama", hold="forever")
    asked = {"model": "llama", "messages": QUESTION, "max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
    whole = said(await client.chat(**asked))

    async def away_and_back() -> Any:
        status = await client.switch("qwen", hold="forever")
        await client.switch("llama", hold=0)
        return status.switch

    for _ in range(LOOKS):  # it may have ended before it was left
        stream = client.stream(**asked)
        away: asyncio.Task[Any] | None = None
        async for _piece in stream:
            away = away or asyncio.create_task(away_and_back())
        assert away is not None
        report = await away
        if stream.result.timing.freezes:
            break
    assert report.kept == 1
    assert report.core_pid > 0
    assert said(stream.answer) == whole
    (freeze,) = stream.result.timing.freezes
    assert 0 < freeze.tokens < 400


async def test_many_requests_of_two_models_are_all_answered(client: Client) -> None:
    bodies = [{"model": model, "messages": QUESTION} for model in ("llama", "qwen") for _ in range(32)]
    answers = [one async for one in client.map(bodies, concurrency=64, max_tokens=16, temperature=0.0)]
    assert len({said(one) for one in answers[:32]}) == 1
    assert len({said(one) for one in answers[32:]}) == 1


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"model": "lama"}, 404),
        ({"max_tokens": "many"}, 400),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, 400),
    ],
)
async def test_bad_input_gets_the_servers_error_and_the_worker_goes_on(
    client: Client, changed: dict[str, Any], status: int
) -> None:
    body = {"model": "llama", "messages": QUESTION, "max_tokens": 8, **changed}
    with pytest.raises(RequestFailed) as caught:
        await client.call("/v1/chat/completions", **body)
    assert caught.value.status == status
    result = await client.result(await client.submit({"model": "llama", "messages": QUESTION, "max_tokens": 8}))
    assert result.outcome is Outcome.COMPLETED
