"""Long answers outlive their worker: whoever has their partitions next goes on with what they had said."""

import asyncio
import signal
import time
from typing import Any

import pytest

from schemas.results import Outcome
from service.client import Client
from service.settings import Settings
from tests.support.pool import delete_topics, kept_progress, settings_for
from tests.support.process import Worker, working
from tests.support.volume import shown
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker

ANSWERS = 40
TOKENS = 800
STEP, SLOW_STEP = "--step-s=0.001", "--step-s=0.05"
QUICK = {"shutdown_timeout_s": 0, "presence_interval_s": 0.5, "log_level": "info"}
LEFT_WITHIN_S = 30.0


def before(how: signal.Signals) -> dict[str, object]:
    """Settings of a worker that is ended so: of one that is killed it is to be seen soon."""
    return QUICK | ({"session_timeout_s": 6.0} if how is signal.SIGKILL else {})


async def all_kept(settings: Settings) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(await kept_progress(settings)) < ANSWERS:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)


async def end(worker: Worker, how: signal.Signals) -> float:
    """Seconds until its process has ended."""
    began = time.monotonic()
    worker.process.process.send_signal(how)
    async with asyncio.timeout(PATIENCE_S):
        await worker.process.process.wait()
    return time.monotonic() - began


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_another_goes_on_with_all_that_a_worker_ran(bootstrap: str, how: signal.Signals) -> None:
    settings = settings_for(bootstrap)
    try:
        async with Client(settings=settings, timeout_s=120) as client:
            async with working(settings, SLOW_STEP, **before(how)) as first:
                asking = (
                    client.submit(
                        {
                            "model": "llama",
                            "messages": [{"role": "user", "content": "hello"}],
                            "max_tokens": TOKENS,
                            "stream": number % 2 == 0,
                        }
                    )
                    for number in range(ANSWERS)
                )
                asked = await asyncio.gather(*asking)
                await all_kept(settings)
                took_s = await end(first, how)
                assert how is signal.SIGKILL or took_s < LEFT_WITHIN_S
            async with working(settings, STEP, **QUICK):
                results = [await client.result(one) for one in asked]
        assert {result.outcome for result in results} == {Outcome.COMPLETED}
        assert [len(result.continued) for result in results] == [1] * ANSWERS
        whole = "".join(f"llama{index} " for index in range(TOKENS))
        assert {result.body["choices"][0]["message"]["content"] for result in results if result.body} == {whole}
        assert {result.attempt.n for result in results} == {1 if how is signal.SIGTERM else 2}
        assert await kept_progress(settings) == set()
    finally:
        await delete_topics(settings)


WORDS = 8
"""Of each part's answer; a session keeps all but the last."""
LONG = 200
"""Words of an answer that has not ended before its worker is killed."""


def counted(answer: Any) -> list[int]:
    """The numbers of an answer's words, which a session counts on."""
    return [int(word.removeprefix("llama")) for word in answer.choices[0].text.split()]


def expected(part: int, words: int = WORDS) -> list[int]:
    """What a session's part is answered with where nothing is lost."""
    first = part * (WORDS - 1)
    return list(range(first, first + words))


@pytest.mark.parametrize("how", shown([signal.SIGTERM, signal.SIGKILL], signal.SIGKILL))
async def test_a_session_outlives_its_workers(bootstrap: str, how: signal.Signals) -> None:
    settings = settings_for(bootstrap)
    try:
        async with Client(settings=settings, timeout_s=120) as client:
            session = client.session(model="llama", max_tokens=WORDS)
            for part in range(2):
                async with working(settings, STEP, **before(how)) as worker:
                    answer = await session.complete(f"part {part}")
                    assert counted(answer) == expected(part)
                    assert len(await kept_progress(settings)) == 1
                    assert session.name.encode() not in b"".join(await kept_progress(settings))
                    await end(worker, how)
            async with working(settings, STEP, **QUICK):
                answers = [await session.complete("part 2"), await session.complete("part 3", final=True)]
        assert list(map(counted, answers)) == [expected(2), expected(3)]
        assert [answer.usage.prompt_tokens for answer in answers] == [6, 8], "of all parts, and of no answer"
        assert await kept_progress(settings) == set()
    finally:
        await delete_topics(settings)


async def test_a_part_that_ran_when_its_worker_died_begins_anew_where_its_session_was(bootstrap: str) -> None:
    settings = settings_for(bootstrap)
    try:
        async with Client(settings=settings, timeout_s=120) as client:
            session = client.session(model="llama", max_tokens=WORDS)
            async with working(settings, "--step-s=0.2", **before(signal.SIGKILL)) as first:
                await session.complete("part 0")
                pieces = session.stream("part 1", final=True, max_tokens=LONG)
                await anext(aiter(pieces))
                await end(first, signal.SIGKILL)
            async with working(settings, STEP, **QUICK):
                [piece async for piece in pieces]
        assert counted(pieces.answer) == expected(1, LONG)
        assert await kept_progress(settings) == set()
    finally:
        await delete_topics(settings)


@pytest.mark.long
async def test_a_session_that_hears_nothing_is_kept_no_longer(bootstrap: str) -> None:
    settings = settings_for(bootstrap)
    try:
        killed = before(signal.SIGKILL)
        async with Client(settings=settings, timeout_s=120) as client, working(settings, STEP, **killed) as first:
            session = client.session(model="llama", max_tokens=WORDS)
            await session.complete("part 0")
            await end(first, signal.SIGKILL)
            assert len(await kept_progress(settings)) == 1
            async with working(settings, STEP, **QUICK, session_idle_s=0.5), asyncio.timeout(PATIENCE_S):
                while await kept_progress(settings):
                    pass
    finally:
        await delete_topics(settings)
