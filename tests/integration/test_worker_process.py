"""A worker as a process: what signals, a dead engine, a missing broker and wrong configuration do to it."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator

import pytest

from schemas.results import Outcome
from service.client import Client
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.support.fake_engine import POISON
from tests.support.pool import delete_topics, settings_for
from tests.support.process import options_of, started


@pytest.fixture
async def corner(bootstrap) -> AsyncIterator[Settings]:
    settings = settings_for(bootstrap)
    yield settings
    await delete_topics(settings)


def chat(text: str = "hello", **more: object) -> dict:
    return {"model": "llama", "messages": [{"role": "user", "content": text}], **more}


async def test_a_signal_lets_running_requests_finish_and_the_process_ends_with_zero(corner):
    async with started(*options_of(corner), "--step-s", "0.005") as worker, Client(settings=corner) as client:
        await worker.until("worker.ready")
        stream = client.stream(**chat(max_tokens=200))
        pieces = []
        async for piece in stream:
            if not pieces:
                worker.process.send_signal(signal.SIGTERM)
            pieces.append(piece)
        assert stream.result.outcome is Outcome.COMPLETED
        assert len(pieces) > 200
        assert await worker.ended() == 0
        assert worker.lines[-1]["event"] == "worker.stopped"


async def test_what_a_stopping_worker_could_not_finish_is_done_by_the_next_one_without_a_grudge(corner):
    async with Client(settings=corner) as client:
        async with started(*options_of(corner, shutdown_timeout_s=0.2), "--step-s", "0.005") as first:
            await first.until("worker.ready")
            request = await client.submit(chat(max_tokens=500, stream=True))
            first.process.send_signal(signal.SIGINT)
            assert await first.ended() == 0
        async with started(*options_of(corner)) as second:
            await second.until("worker.ready")
            result = await client.result(request, timeout_s=30)
            assert result.outcome is Outcome.COMPLETED
            assert result.attempt.n == 1


async def test_a_second_signal_leaves_at_once(corner):
    async with started(*options_of(corner), "--step-s", "0.01") as worker, Client(settings=corner) as client:
        await worker.until("worker.ready")
        stream = client.stream(**chat(max_tokens=1_000_000))
        await anext(aiter(stream))
        worker.process.send_signal(signal.SIGTERM)
        await worker.until("worker.draining")
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 128 + signal.SIGTERM


async def test_a_worker_that_may_have_no_new_engine_ends_and_the_next_one_knows_of_the_deaths(corner):
    await ensure_topics(corner, ["llama", "qwen"])
    options = options_of(corner, engine_restarts=0)
    async with Client(settings=corner) as client:
        request = await client.submit(chat(POISON))
        for _death in range(3):
            async with started(*options) as worker:
                assert await worker.ended() == 1
                assert any("EngineDied" in str(line.get("error")) for line in worker.lines)
        async with started(*options) as worker:
            result = await client.result(request, timeout_s=30)
            assert (result.outcome, result.failure) == (Outcome.FAILED, "poison")
            worker.process.send_signal(signal.SIGTERM)
            assert await worker.ended() == 0


async def test_a_worker_starts_a_new_engine_in_place_of_one_that_died_and_answers_all_that_it_had(corner):
    async with started(*options_of(corner), "--step-s", "0.01") as worker, Client(settings=corner) as client:
        await worker.until("worker.ready")
        beside = [await client.submit(chat(f"{number}", max_tokens=100)) for number in range(4)]
        fatal = await client.submit(chat(POISON))
        result = await client.result(fatal, timeout_s=60)
        assert (result.outcome, result.failure) == (Outcome.FAILED, "poison")
        assert {(await client.result(each, timeout_s=60)).outcome for each in beside} == {Outcome.COMPLETED}
        await client.submit(chat(POISON))
        assert await worker.ended() == 1, "so often in ten minutes only"
        assert [line["restarts"] for line in worker.lines if line["event"] == "engine.restarting"] == [1, 2, 3]


async def test_without_a_broker_it_says_so_and_ends():
    options = ["--set", "bootstrap_servers=127.0.0.1:9", "--set", f"group_id={uuid.uuid4().hex}"]
    async with started(*options, "--set", "startup_timeout_s=1") as worker:
        assert await worker.ended() == 3


async def test_a_misspelt_setting_is_a_usage_error():
    environment = {**os.environ, "GEARSHIFT_MAX_RUNING": "3"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service.cli", "config", "check", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"'max_running'" in said
